"""Audit records of commands: the declaration of each command, and the writing of its records.

Rule 1: each command is in one of `AUDITED`, `READ_ONLY` and `NOT_AUDITED`; a test compares them with
the registered commands.
Rule 2: the first record is written before the command acts, so that a killed command is visible.
Rule 3: read-only commands and dry runs import no module for audit records.
"""

import os
import time
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from fleetpulse.core.errors import FleetError, first_line

if TYPE_CHECKING:
    from fleetpulse.io.tables.audit import AuditedAction, AuditTable


class IfUnwritable(Enum):
    """Handling of a command whose first record cannot be written."""

    REFUSE = "refuse"
    WARN = "warn"


# No access is granted without a record. All other commands may be needed in an emergency.
AUDITED: Final[Mapping[str, IfUnwritable]] = {
    "access grant": IfUnwritable.REFUSE,
    "access login": IfUnwritable.REFUSE,
    **dict.fromkeys(
        (
            "access reload",
            "access revoke",
            "amend",
            "device add",
            "device command",
            "device confirm",
            "device bulk",
            "device correct",
            "device decommission",
            "device import",
            "device maintain",
            "device release",
            "maintain",
            "map add",
            "policy apply",
            "rollout advance",
            "rollout start",
            "rollout stop",
            "state bootstrap",
            "state discard",
            "state migrate",
            "state prune",
            "state repartition",
            "state rescale",
            "state rollback",
            "state snapshot",
            "state switch",
            "stream rebuild",
            "stream start",
            "stream stop",
        ),
        IfUnwritable.WARN,
    ),
}
READ_ONLY: Final = frozenset(
    {
        "access list",
        "access rules",
        "access takeovers",
        "audit",
        "availability",
        "backtest",  # writes only the requested page
        "commands",
        "device show",
        "devices",
        "doctor",
        "late",
        "listen",
        "map list",
        "map test",
        "map watch",
        "plan",
        "policy check",
        "quality results",
        "quality suites",
        "quarantine",
        "rewind",
        "rollout plan",
        "rollout status",
        "sessions",
        "state generations",
        "state inspect",
        "state snapshots",
        "status",
        "stream wanted",
        "transitions",
        "twin",
        "version",
        "vitals",
        "why",
    }
)
NOT_AUDITED: Final[Mapping[str, str]] = {  # command, or its first word -> reason
    "up": "starts processes, which have logs; a policy given to it is a row of messages",
    "down": "stops the processes of up",
    "replay": "judges a recording, normally in a home of its own",
    "serve": "changes nothing; logins that others need are printed by access login, which is audited",
    "service": "is run by a supervisor, which has logs",
    "job": "is run by other commands",
    "stream supervise": "runs every minute and only restores the desired state, which is audited",
    "rollout check": "runs often, and a final verdict is in the record of the rollout, with its requester and its time",
    "quality run": "writes only results, each with its run",
    "quality gate": "writes only results, each with its run",
    "quality docs": "writes only pages",
    "chaos": "works on a home of its own",
    "drill": "works on homes of its own",
    "bench": "works on homes of its own",
    "fetch": "fills the cache of the project",
    "test": "is for developers",
    "lint": "is for developers",
    "lock": "is for developers",
    "sbom": "is for developers",
}
_NOT_ARGUMENTS: Final = frozenset({"home", "as_json", "json_lines", "dry_run"})


def audit_commands(commands: Mapping[str, Any], above: str = "") -> None:
    """Wrap each audited command of a group, so that it writes its records.

    Args:
        commands: commands, or groups of commands, by name.
        above: words before the names, each with a space after it.
    """
    for name, command in commands.items():
        path = above + name
        if (children := getattr(command, "commands", None)) is not None:
            audit_commands(children, f"{path} ")
        elif path in AUDITED:
            command.callback = _audited(path, AUDITED[path], command.callback)


def _audited(path: str, if_unwritable: IfUnwritable, command: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(command)
    def run(**parameters: Any) -> Any:
        home = parameters.get("home")
        if parameters.get("dry_run") or not isinstance(home, Path) or not os.access(home / "home.json", os.R_OK):
            return command(**parameters)  # without a home, the command is refused, and there is no table
        records = _Records(home, path, {name: value for name, value in parameters.items() if name not in _NOT_ARGUMENTS})
        records.start(if_unwritable)
        result = "ok"
        try:
            return command(**parameters)
        except BaseException as error:
            result = _result(error)
            raise
        finally:
            records.finish(result)

    return run


def _result(error: BaseException) -> str:
    from cli.common.errors import expected_error

    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted"
    if isinstance(error, typer.Exit):
        return f"exit-{error.exit_code}" if error.exit_code else "ok"
    found = expected_error(error)
    return "unexpected-error" if found is None else found.code


class _Records:
    """Writer of the two records of a command.

    Args:
        home: folder of the home.
        path: words of the command.
        arguments: its arguments by name.
    """

    def __init__(self, home: Path, path: str, arguments: Mapping[str, Any]) -> None:
        self._home, self._path, self._arguments = home, path, arguments
        self._began_s = time.monotonic()

    @cached_property
    def _action(self) -> "AuditedAction":
        from fleetpulse.core.operations.audit import recorded_arguments
        from fleetpulse.io.tables.audit import AuditedAction

        return AuditedAction.of_this_process(self._path, recorded_arguments(self._arguments))

    @cached_property
    def _table(self) -> "AuditTable":
        from fleetpulse.io.home.home import Home
        from fleetpulse.io.tables.audit import AuditTable

        return AuditTable(Home(self._home))

    def start(self, if_unwritable: IfUnwritable) -> None:
        """Write the first record.

        Raises:
            FleetError: the record cannot be written, and the command must not run without it.
        """
        from fleetpulse.core.operations.audit import Phase

        try:
            self._table.write(self._action, Phase.STARTED)
        except Exception as error:  # no fault of the audit may prevent an emergency command
            why = f'the audit record of "{self._path}" cannot be written to the home "{self._home}" ({first_line(error)})'
            if if_unwritable is IfUnwritable.REFUSE:
                raise FleetError(
                    f"{why}; the command is not run without a record; free disk space, or make the table audit writable for "
                    f"this user",
                    code="audit-unwritable",
                ) from error
            typer.echo(f"warning: {why}; the command runs without it", err=True)

    def finish(self, result: str) -> None:
        """Write the last record; print a warning if it cannot be written."""
        from fleetpulse.core.operations.audit import Phase

        try:
            self._table.write(self._action, Phase.FINISHED, result, round((time.monotonic() - self._began_s) * 1000))
        except Exception as error:  # noqa: BLE001 - the command has ended, and its own result counts
            typer.echo(
                f'warning: the result of "{self._path}" ({result}) cannot be written to the audit of the home "{self._home}" '
                f"({first_line(error)})",
                err=True,
            )
