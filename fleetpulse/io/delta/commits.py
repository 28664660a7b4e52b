"""Commits to a Delta table, and replacement of its files in one commit.

deltalake's OPTIMIZE and DELETE are not used for bronze. OPTIMIZE puts the newest rows first, but
bronze must stay in order. DELETE marks the remaining rows as changed data.

Rule 1: a commit is created whole or not at all, under a version that no other commit has.
Rule 2: if another commit took the version, it is read before the next try. An append is ignored; a
change of the schema, or the removal of a file to be replaced, ends the operation.
"""

import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from fleetpulse.core.errors import FleetError
from fleetpulse.io.delta.corruption import open_table
from fleetpulse.io.delta.log import actions_of
from fleetpulse.io.system.fsync import sync_file, sync_folder
from fleetpulse.io.system.wall_clock import wall_clock_ms

if TYPE_CHECKING:
    from deltalake import DeltaTable

_TRIES: Final = 1_000  # landing commits a few times a second, and a try takes milliseconds
_KNOWN: Final = (1, 2)  # reader and writer version of the protocol of the tables created here


@dataclass(frozen=True, slots=True)
class Added:
    """A data file that a commit adds.

    Attributes:
        name: path of the file, relative to the table's folder.
        size_bytes: size of the file, bytes.
        stats: Delta's statistics of the file.
        partition: partition column and value; empty if the table has no partitions.
    """

    name: str
    size_bytes: int
    stats: Mapping[str, Any]
    partition: Mapping[str, str] = field(default_factory=dict[str, str])

    def action(self, now_ms: int, *, data_change: bool) -> dict[str, Any]:
        """Return the ``add`` action of the file.

        Args:
            now_ms: modification time to record, epoch milliseconds.
            data_change: whether the rows of the file are new to the table.
        """
        added = {"path": self.name, "partitionValues": {**self.partition}, "size": self.size_bytes, "modificationTime": now_ms}
        return {"add": {**added, "dataChange": data_change, "stats": json.dumps(self.stats, ensure_ascii=False)}}


def write_log_checkpoint(table: Path) -> "DeltaTable":
    """Write a checkpoint of a table's log durably, which speeds up opening the table.

    deltalake does not call fsync: after a power failure, the file could exist without its content.

    Args:
        table: folder of the table.

    Returns:
        The opened table.

    Raises:
        DeltaError: another process has written the checkpoint, or changed the log.
        OSError: the disk cannot be written.
    """
    opened, log = open_table(table), table / "_delta_log"
    opened.create_checkpoint()
    for path in (*log.glob(f"{opened.version():020d}.checkpoint*"), log / "_last_checkpoint"):
        sync_file(path)
    sync_folder(log)
    return opened


def replace_files(
    table: Path,
    out: Mapping[str, int],
    into: Sequence[Added],
    operation: str,
    *,
    data_change: bool,
    numbers: Mapping[str, int] | None = None,
    partition: Mapping[str, str] | None = None,
) -> int | None:
    """Replace files of a table by others, in one commit.

    Args:
        table: folder of the table.
        out: sizes of the files to remove, by path relative to the folder.
        into: files to add, already durable.
        operation: name of the operation in the table's history.
        data_change: whether rows are removed; False if rows are only rewritten.
        numbers: newest number by writer, recorded in the commit.
        partition: partition column and value of the removed files; None if the table has no partitions.

    Returns:
        Version of the commit; None if another commit removed one of the files or changed the table.

    Raises:
        FleetError: the table has a newer protocol than this module writes.
    """
    opened = open_known(table)
    live = {str(name) for name in opened.get_add_actions()["path"].to_pylist()}
    if not live.issuperset(out):
        return None
    recorded = {"numbers": numbers or {}, "partition": partition or {}}
    actions = [*_actions(out, into, operation, opened.version(), data_change=data_change, **recorded)]
    version = opened.version() + 1
    for _ in range(_TRIES):
        commit = table / "_delta_log" / f"{version:020d}.json"
        if put_commit(commit, actions):
            return version
        if _disturbs(actions_of(commit), out):
            return None
        version += 1
    return None


def open_known(table: Path) -> "DeltaTable":
    """Open a table, and check that this module supports its protocol.

    Raises:
        FleetError: the table has a newer protocol than this module writes.
        DamagedError: the log of the table is damaged.
    """
    opened = open_table(table)
    protocol = opened.protocol()
    if (protocol.min_reader_version, protocol.min_writer_version) > _KNOWN:
        raise FleetError(
            f'"{table}" has protocol {protocol}; supported are {_KNOWN} and older; use the software that upgraded the table',
            code="table-protocol-unsupported",
        )
    return opened


def _actions(
    out: Mapping[str, int],
    into: Iterable[Added],
    operation: str,
    read: int,
    *,
    data_change: bool,
    numbers: Mapping[str, int],
    partition: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    now_ms = wall_clock_ms()
    info = {"timestamp": now_ms, "operation": operation, "operationParameters": {}, "readVersion": read, "isBlindAppend": False}
    yield {"commitInfo": {**info, "engineInfo": "fleetpulse"}}
    yield from number_actions(numbers, now_ms)
    for name, size in out.items():
        removed = {"path": name, "deletionTimestamp": now_ms, "dataChange": data_change, "extendedFileMetadata": True}
        yield {"remove": {**removed, "partitionValues": {**partition}, "size": size}}
    yield from (file.action(now_ms, data_change=data_change) for file in into)


def number_actions(numbers: Mapping[str, int], now_ms: int) -> Iterator[dict[str, Any]]:
    """Yield a ``txn`` action for the newest number of each writer."""
    for writer, number in numbers.items():
        yield {"txn": {"appId": writer, "version": number, "lastUpdated": now_ms}}


def put_commit(path: Path, actions: Iterable[Mapping[str, Any]]) -> bool:
    """Create a commit file durably and in one step.

    Returns:
        Whether the commit was created; False if its version already exists.
    """
    text = "".join(json.dumps(action, ensure_ascii=False) + "\n" for action in actions)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, a link does not replace an existing file
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def change_the_table(actions: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether actions change a table's schema, properties or protocol."""
    return any("metaData" in action or "protocol" in action for action in actions)


def _disturbs(actions: Sequence[Mapping[str, Any]], out: Mapping[str, int]) -> bool:
    removed = {unquote(action["remove"]["path"]) for action in actions if "remove" in action}
    return bool(removed & out.keys()) or change_the_table(actions)
