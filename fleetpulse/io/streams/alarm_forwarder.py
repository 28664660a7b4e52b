"""Forwarder of alarms to the lifecycle: each row of ``vital_alarms`` becomes one error of its device.

The table is the outbox. The error is a control row, not a signal, so it does not prove the device alive; it counts
from its receipt, like every row of an operator.

Rule: an alarm is spooled once. Its file is prepared first, then the position is recorded, then the file is moved to
the spool in one step. After a crash or an error, a prepared file that the recorded position includes is moved, and any
other is removed: its alarms are prepared again.

Rule: a version whose commit or files maintenance has removed is skipped, and reported in the log. Its alarms are
older than their retention, or it was compacted long ago, and those of later versions must not wait for it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from fleetpulse.core.errors import FleetError, first_line
from fleetpulse.core.presence.identities import topic_of
from fleetpulse.core.rows import OP_ERROR, Kind
from fleetpulse.core.streams.tables import VITAL_ALARMS
from fleetpulse.io.delta.corruption import DamagedError
from fleetpulse.io.delta.log import DeltaLog, holds_table
from fleetpulse.io.home.command_spool import MAX_COMMANDS, Command, file_content, spool_file
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write

_LOG: Final = structlog.get_logger("streams")
_POSITION: Final = "position.json"


class AlarmForwarder:
    """Forwarder of one home.

    Args:
        home: home of the table and the spool.
    """

    def __init__(self, home: Home) -> None:
        self._home, self._table = home, home.table(VITAL_ALARMS.name)
        self._folder = home.path / "checkpoints" / VITAL_ALARMS.name
        self._log = DeltaLog(self._table)
        self._next: int | None = None

    def forward(self) -> int:
        """Spool the alarms of new versions of the table; return their number.

        Raises:
            FleetError: the spool cannot be written, or the position or a file of alarms is damaged.
            OSError: the disk cannot be written.
        """
        begin = self._recover() if self._next is None else self._next
        self._next = None  # if this call fails, the next one recovers
        if not holds_table(self._table) or (end := self._log.latest() + 1) <= begin:
            self._next = begin
            return 0
        alarms = self._alarms(begin, end)
        prepared = [
            self._prepare(f"{end}-{start}.json", [_command(row) for row in alarms[start : start + MAX_COMMANDS]])
            for start in range(0, len(alarms), MAX_COMMANDS)
        ]
        self._folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self._folder / _POSITION, json.dumps({"version": end}))
        for file in prepared:
            spool_file(self._home, file)
        self._next = end
        return len(alarms)

    def _alarms(self, begin: int, end: int) -> list[dict[str, Any]]:
        """Return the alarms of some versions, without those that are gone."""
        alarms: list[dict[str, Any]] = []
        gone: list[int] = []
        for version in range(begin, end):
            try:
                alarms += self._rows(version)
            except FileNotFoundError:
                gone.append(version)
            except FleetError as error:
                if error.code != "table-version-missing":
                    raise
                gone.append(version)
        if gone:
            _LOG.error(
                "alarms were removed before they were forwarded; their versions are skipped",
                table=VITAL_ALARMS.name, versions=len(gone), first=gone[0], last=gone[-1],
            )  # fmt: skip
        return alarms

    def _rows(self, version: int) -> list[dict[str, Any]]:
        tables = [_read(Path(path)) for path, _ in self._log.appended(version)]
        return pa.concat_tables(tables).to_pylist() if tables else []

    def _prepare(self, name: str, commands: Sequence[Command]) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self._folder / name, file_content(commands))
        return self._folder / name

    def _recover(self) -> int:
        """Complete or undo an interrupted call; return the first version to forward."""
        try:
            recorded = int(json.loads((self._folder / _POSITION).read_text())["version"])
        except FileNotFoundError:
            recorded = 0
        except (ValueError, LookupError, TypeError) as error:
            raise FleetError(
                f'the position of forwarded alarms in "{self._folder / _POSITION}" cannot be read ({error!r}); expected a '
                f"version of {VITAL_ALARMS.name}; restore the file from a backup: alarms wait in their table",
                code="alarm-position-damaged",
            ) from None
        for file in sorted(self._folder.glob("*-*.json")):
            if int(file.name.split("-")[0]) <= recorded:
                spool_file(self._home, file)
            else:
                file.unlink()
        return recorded


def _read(path: Path) -> pa.Table:
    """Return the rows of a file. A missing file is no damage: maintenance has removed it with its version."""
    try:
        return pq.ParquetFile(path).read()
    except pa.ArrowInvalid as error:
        raise DamagedError(f'"{path}"', first_line(error)) from error


def _command(alarm: dict[str, Any]) -> Command:
    content = {"op": OP_ERROR, "code": f"vital:{alarm['metric']}", "raised_at": alarm["raised_at"].isoformat()}
    return topic_of(alarm["device_id"], Kind.CONTROL, alarm["site"]), content
