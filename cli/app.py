"""Table of the verbs of ``fleet``, and lazy import of a verb's module.

Rule: ``fleet --help`` imports no verb, and a verb imports no other one.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from cli.common.audit import audit_commands


@dataclass(frozen=True, slots=True)
class Verb:
    """Verb, or group of verbs, in the help of ``fleet``.

    Attributes:
        module: module below ``cli`` whose ``register`` adds the verb.
        help: first paragraph of the verb's own help, on one line.
        hidden: whether the help omits the verb.
    """

    module: str
    help: str
    hidden: bool = False


# In the order of the help. tests/unit/cli/test_app.py compares each row with the verb itself.
VERBS: Final = {
    "status": Verb("commands.inspect.status", "Show devices by mode, message counts, the frontier, and the jobs' health."),
    "devices": Verb("commands.inspect.status", "List devices with their mode, its start, and the time of the last signal."),
    "transitions": Verb(
        "commands.inspect.status",
        "List mode changes in order of event time, with amendments applied.",
    ),
    "late": Verb(
        "commands.inspect.status",
        "List late messages, or messages not judged for another reason (--kind).",
    ),
    "quarantine": Verb(
        "commands.inspect.status",
        "List messages that could not be decoded, with the reason and the beginning of the payload.",
    ),
    "listen": Verb(
        "commands.inspect.status",
        "Show messages as they arrive, on any topic, and the result of each.",
    ),
    "audit": Verb("commands.inspect.audit", "List who changed what: grants, commands to devices, policies, state, approvals."),
    "why": Verb(
        "commands.inspect.why",
        "Explain the mode of a device: reason, arithmetic, messages, rule, and what would have prevented it.",
    ),
    "commands": Verb("commands.inspect.commands", "List commands to devices, each with its state and answer."),
    "twin": Verb("commands.inspect.commands", "Show the desired and the reported state of a device, and their difference."),
    "rewind": Verb("commands.inspect.rewind", "Show every device's mode at an instant, or the life of one device up to it."),
    "maintain": Verb("commands.batch.maintain", "Compact small files, remove expired rows, and delete unused files."),
    "doctor": Verb(
        "commands.inspect.doctor", "Check the machine, the home and the Spark cluster, with the remedy of each failure."
    ),
    "plan": Verb("commands.inspect.plan", "Estimate the resources that a fleet needs: cores, memory, state and storage."),
    "service": Verb("commands.run.service", "Run one part of a home in the foreground, for systemd or a container."),
    "fetch": Verb(
        "commands.run.fetch",
        "Download and compile in advance everything that later starts need.",
    ),
    "backtest": Verb("commands.batch.backtest", "Replay the received messages under another policy, and compare the verdicts."),
    "test": Verb("dev.commands", "Run tests by layer: unit, property, dags, spark, e2e; options go to pytest."),
    "lint": Verb("dev.commands", "Check style, types, import contracts, and that generated files are up to date."),
    "lock": Verb("dev.commands", "Compile the lock files: pinned versions and hashes, without index URLs."),
    "sbom": Verb(
        "dev.commands", "Print the software bill of materials: components and hashes, in CycloneDX's JSON format.", hidden=True
    ),
    "chaos": Verb("chaos.command", "Kill processes of a fleet under load, at random, and account for every message."),
    "drill": Verb("commands.batch.drill", "Replay a recording with and without state operations; compare the verdicts."),
    "amend": Verb("commands.batch.amend", "Replay devices with late messages, and amend their verdicts."),
    "availability": Verb(
        "commands.inspect.availability",
        "Show the share of a day that devices spent in each mode.",
    ),
    "version": Verb("commands.run.version", "Print the version."),
    "replay": Verb("commands.run.run", "Play a recording through the whole pipeline and judge it to the end."),
    "up": Verb("commands.run.run", "Start the whole platform and show it live; Ctrl-C stops it in order."),
    "down": Verb("commands.run.run", "Stop the run that uses a home."),
    "job": Verb("commands.run.job", "Run one process of a run; started by other commands.", hidden=True),
    "device": Verb("commands.fleet.device", "Show a device (fleet device ID), or register and control devices."),
    "rollout": Verb(
        "commands.fleet.rollout",
        "Give firmware to devices by cohort; a rollout stops where a cohort fares worse than the rest.",
    ),
    "policy": Verb("commands.fleet.policy", "Check and apply policies: timeouts, error limits and other rules."),
    "map": Verb("commands.fleet.mapping", "Add, test and watch mappings for devices with their own topics and payloads."),
    "access": Verb("commands.fleet.access", "Manage users of the embedded broker and their topics, and tokens of the HTTP API."),
    "state": Verb("commands.state.commands", "Inspect, snapshot, migrate and roll back the lifecycle job's state."),
    "serve": Verb("commands.run.serve", "Serve the API, the metrics and the operations page of a home."),
    "stream": Verb("commands.run.stream", "Stop and start the lifecycle job alone; all other processes keep running."),
    "quality": Verb("commands.batch.quality", "Run data-quality suites over tables and state, and show results."),
    "bench": Verb("dev.commands", "Measure this project, and compare it with its peers."),
}


class _Commands(Mapping[str, Any]):
    """Commands of ``VERBS``; each is built at its first lookup."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            scratch_app = typer.Typer()
            import_module(f"cli.{VERBS[name].module}").register(scratch_app)
            commands = get_group(scratch_app).commands
            audit_commands(commands)
            self._built.update(commands)
        return self._built[name]

    def __contains__(self, name: object) -> bool:
        return name in VERBS

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


class _Verbs(TyperGroup):
    """Group ``fleet``, after Click's recipe for lazily imported commands."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.commands = cast("dict[str, Any]", _Commands())

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the verbs."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a verb; None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        return self.commands[cmd_name]  # not get(): it would hide a KeyError during the import of the module

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help from the table, without importing the commands."""
        listed = copy(self)
        listed.commands = {name: TyperCommand(name, help=verb.help, hidden=verb.hidden) for name, verb in VERBS.items()}
        super(_Verbs, listed).format_help(ctx, formatter)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trustworthy presence verdicts about devices.",
)


@app.callback()
def _fleet() -> None:
    """Make the application a group, although it has no command yet."""
