"""Audit records in the table ``audit``: one row at the start of an action, one at its end.

Rule 1: a row is durable when `AuditTable.write` returns.
Rule 2: the user of the operating system is a fact. The requester and the address are claims of the
environment, which that user can set.
"""

import io
import json
import secrets
import socket
from dataclasses import asdict, dataclass, field
from functools import cached_property

import pyarrow as pa

from fleetpulse.core.operations.audit import Phase, recorded_text
from fleetpulse.core.tables import AUDIT
from fleetpulse.core.times import format_instant
from fleetpulse.io.delta.appender import Appender, write_files
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.locks import folder_held
from fleetpulse.io.system.process import os_user, remote_address, requester
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables


@dataclass(frozen=True, slots=True)
class AuditedAction:
    """Action of which records are written; each field is a column of ``audit``.

    Attributes:
        action: name of the action, such as the words of a command.
        arguments: JSON object of its arguments, see `recorded_arguments`.
        os_user: user of the operating system who runs this process.
        asked_by: requester that the environment names; None if it names none.
        host: name of this machine.
        address: address from which the session of the user came; None if it is local or unknown.
        id: unique id of the action.
    """

    action: str
    arguments: str
    os_user: str
    asked_by: str | None
    host: str
    address: str | None
    id: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def of_this_process(cls, action: str, arguments: str, asked_by: str | None = None) -> "AuditedAction":
        """Return an action of this process.

        Args:
            action: name of the action.
            arguments: JSON object of its arguments.
            asked_by: requester; None for the one that the environment names.
        """
        named, address = asked_by or requester(), remote_address()
        return cls(
            action,
            arguments,
            os_user(),
            None if named is None else recorded_text(named),
            socket.gethostname(),
            None if address is None else recorded_text(address),
        )


class AuditTable:
    """Writer of records, which opens the table once.

    Args:
        home: home of the table.
    """

    def __init__(self, home: Home) -> None:
        self._home = home

    @cached_property
    def _appender(self) -> Appender:
        path = self._home.table(AUDIT.name)
        if not holds_table(path):
            with folder_held(path.parent):  # two processes may run the first command at once
                tables.create(self._home, AUDIT)
        return Appender(path)

    def write(self, action: AuditedAction, phase: Phase, result: str | None = None, duration_ms: int | None = None) -> None:
        """Append a record of an action; create the table if it does not exist.

        Args:
            action: the action.
            phase: whether it starts, or has ended.
            result: ``ok`` or an error code; None at the start.
            duration_ms: duration of the action, milliseconds; None at the start.

        Raises:
            FleetError: the table cannot be opened or committed to, see `Appender`.
            OSError: the record cannot be written to the disk.
        """
        end = {"phase": phase.value, "result": result, "duration_ms": duration_ms}
        row = _as_table({"recorded_at": format_instant(wall_clock_ms()), **asdict(action), **end})
        appender = self._appender
        appender.commit(write_files(appender.path, row, with_statistics=False), {})


def _as_table(row: dict[str, str | int | None]) -> pa.Table:
    """Return a table of one row.

    Arrow's JSON reader makes it: Arrow imports pandas to make its first array of Python values.
    """
    from pyarrow import json as arrow_json

    known = {name: value for name, value in row.items() if value is not None}
    options = arrow_json.ParseOptions(explicit_schema=tables.arrow_schema(AUDIT), unexpected_field_behavior="error")
    return arrow_json.read_json(io.BytesIO(json.dumps(known).encode()), parse_options=options)
