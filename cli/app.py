"""The command ``fleet``: a table of its verbs, and the group that imports a verb's module when the verb is called.

Rule: the help of ``fleet`` is printed from the table alone, and a verb imports nothing of the others.
"""

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb, or a group of verbs, as the help of ``fleet`` lists it.

    Attributes:
        module: the module below ``cli`` whose ``register`` adds the verb.
        help: the first paragraph of the verb's own help, on one line.
        hidden: whether the list leaves it out.
    """

    module: str
    help: str
    hidden: bool = False


# In the order of the list. tests/unit/test_cli_imports.py compares each row with the verb itself.
VERBS: Final = {
    "status": Verb("commands.inspect.status", "Show devices by mode, counts, and how far everything is."),
    "devices": Verb("commands.inspect.status", "List devices with their mode, since when, and when they were last heard."),
    "transitions": Verb(
        "commands.inspect.status",
        "List mode changes, in order of event time, as far as is known by now; --all with what was taken back.",
    ),
    "late": Verb(
        "commands.inspect.status",
        "List messages that came when their time had been judged; with --kind, whatever else was not judged, and why.",
    ),
    "quarantine": Verb(
        "commands.inspect.status", "List messages that could not be decoded, with the reason and the raw payload."
    ),
    "listen": Verb(
        "commands.inspect.status",
        "Show messages as they come, on any topic, and what becomes of each; "
        "a message that waits is shown again when it is judged.",
    ),
    "rewind": Verb("commands.inspect.rewind", "Show every device's mode at an instant, or how one device came to its own."),
    "maintain": Verb(
        "commands.batch.maintain",
        "Join small files, remove what is older than it is kept for, delete what nobody needs any more; the fleet may run.",
    ),
    "plan": Verb(
        "commands.inspect.plan", "Say what a fleet will need: state, batches, key groups, cores, memory, and storage a month out."
    ),
    "service": Verb(
        "commands.run.service", "Run one part of a home in the foreground, for systemd or containers; SIGTERM stops it in order."
    ),
    "fetch": Verb(
        "commands.run.fetch",
        "Fetch Java where there is none, and Spark's JARs, compile the fold, and keep Spark's classes for quicker starts.",
    ),
    "backtest": Verb(
        "commands.batch.backtest",
        "Judge what was received under another policy, and show which verdicts that adds, takes away and moves.",
    ),
    "test": Verb(
        "dev.commands", "Run the tests by layer: unit property dags spark e2e, or those named first; what follows goes to pytest."
    ),
    "lint": Verb("dev.commands", "Check style, types, the doors between the rooms, and that what is generated is fresh."),
    "lock": Verb("dev.commands", "Compile the locks: versions and hashes, no addresses."),
    "chaos": Verb("chaos.command", "Kill the processes of a fleet under load, at random moments, and account for every message."),
    "drill": Verb(
        "commands.batch.drill",
        "Judge a recording twice, once undisturbed, once while its state is moved about; the verdicts must be the same.",
    ),
    "amend": Verb(
        "commands.batch.amend",
        "Judge anew what late messages concern: take back what did not happen, add what did, correct who stands wrong.",
    ),
    "availability": Verb(
        "commands.inspect.availability",
        "Show in what share of a day devices were online, offline and so on; time in which nobody listened is left out.",
    ),
    "version": Verb("commands.run.version", "Print the version."),
    "replay": Verb("commands.run.run", "Play a recording through the whole pipeline and judge it to the end."),
    "up": Verb("commands.run.run", "Start everything and show it live; Ctrl-C stops everything in order."),
    "down": Verb("commands.run.run", "Stop the run that uses a home."),
    "job": Verb("commands.run.job", "The processes of a run.", hidden=True),
    "device": Verb("commands.fleet.device", "One device: fleet device ID; or a command about it."),
    "policy": Verb("commands.fleet.policy", "The policy: how much silence and how many errors are tolerated."),
    "map": Verb("commands.fleet.policy", "The mapping: devices that cannot speak our format."),
    "access": Verb("commands.fleet.access", "Who may speak to the embedded broker, and about what."),
    "state": Verb("commands.state.commands", "The state: look into it, copy it, change its shape, go back."),
    "stream": Verb("commands.run.stream", "The lifecycle job alone: stop it, start it, while all else goes on."),
    "quality": Verb("commands.batch.quality", "Data quality: suites over the tables and the state, and their gate."),
    "bench": Verb("dev.commands", "Measure this project beside its peers."),
}


class _Commands(Mapping[str, Any]):
    """The commands of ``VERBS``, each built when it is first looked up."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            beside = typer.Typer()
            import_module(f"cli.{VERBS[name].module}").register(beside)
            self._built.update(get_group(beside).commands)
        return self._built[name]

    def __contains__(self, name: object) -> bool:
        return name in VERBS

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


class _Verbs(TyperGroup):
    """The group ``fleet``; Click's recipe for commands that are imported on first use."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = cast("dict[str, Any]", _Commands())

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the verbs."""
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb's command; None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        return self.commands[cmd_name]  # not get(): a KeyError while the module is imported is not a missing verb

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the words of the table in place of the commands."""
        listed = copy(self)
        listed.commands = {name: TyperCommand(name, help=verb.help, hidden=verb.hidden) for name, verb in VERBS.items()}
        super(_Verbs, listed).format_help(ctx, formatter)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Verdicts about devices that can be trusted.",
)


@app.callback()
def _fleet() -> None:
    """Make a group of an application that has no command of its own yet."""
