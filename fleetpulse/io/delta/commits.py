"""Commits to a Delta table, and such as exchange its files for others: what deltalake's OPTIMIZE and DELETE do not promise.

Its OPTIMIZE puts the newest rows first, and bronze is in order; its DELETE says of the rows that stay that they are new.

Rule 1: a commit is a file that is put in place whole, or not at all, under a number that nobody has taken.
Rule 2: who came before is looked at: appends do not matter; a change of the schema, or of a file that is to go, ends the try.
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
_KNOWN: Final = (1, 2)  # the protocol of tables that are made here


@dataclass(frozen=True, slots=True)
class Added:
    """A file that a commit brings in.

    Attributes:
        name: its path in the table's folder.
        size_bytes: its size.
        stats: Delta's statistics of it.
        partition: the partition's column and value; empty where the table has no partitions.
    """

    name: str
    size_bytes: int
    stats: Mapping[str, Any]
    partition: Mapping[str, str] = field(default_factory=dict[str, str])

    def action(self, now_ms: int, *, data_change: bool) -> dict[str, Any]:
        """Return the action that adds it."""
        added = {"path": self.name, "partitionValues": {**self.partition}, "size": self.size_bytes, "modificationTime": now_ms}
        return {"add": {**added, "dataChange": data_change, "stats": json.dumps(self.stats, ensure_ascii=False)}}


def write_log_checkpoint(table: Path) -> "DeltaTable":
    """Leave a checkpoint in a table's log, for who opens it, and put it on the disk.

    deltalake syncs nothing: of its file the name could survive a loss of power, and not the content.

    Returns:
        The table, as it was opened.

    Raises:
        DeltaError: another has written it, or the log.
        OSError: the disk refuses.
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
) -> int | None:
    """Exchange files of a table for others, in one commit; return its version.

    Args:
        table: the table's folder; it has no partitions.
        out: paths in the folder, and sizes, of the files that go.
        into: what comes in their place, durable already.
        operation: as the table's history shows it.
        data_change: whether rows are lost by it; False where it only rewrites.
        numbers: to which number each of several writers has come by it.

    Returns:
        The version; None where another was there first and took one of the files, or changed the table.

    Raises:
        FleetError: the table's protocol is not the one that is written here.
    """
    opened = open_known(table)
    live = {str(name) for name in opened.get_add_actions()["path"].to_pylist()}
    if not live.issuperset(out):
        return None
    actions = [*_actions(out, into, operation, opened.version(), data_change=data_change, numbers=numbers or {})]
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
    """Open a table to which commits are made from here.

    Raises:
        FleetError: its protocol is not the one that is written here.
        DamagedError: its log is damaged.
    """
    opened = open_table(table)
    protocol = opened.protocol()
    if (protocol.min_reader_version, protocol.min_writer_version) > _KNOWN:
        raise FleetError(
            f'"{table}" has protocol {protocol}; known are {_KNOWN} and older; go on with what changed it',
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
) -> Iterator[dict[str, Any]]:
    now_ms = wall_clock_ms()
    info = {"timestamp": now_ms, "operation": operation, "operationParameters": {}, "readVersion": read, "isBlindAppend": False}
    yield {"commitInfo": {**info, "engineInfo": "fleetpulse"}}
    yield from numbers_said(numbers, now_ms)
    for name, size in out.items():
        removed = {"path": name, "deletionTimestamp": now_ms, "dataChange": data_change, "extendedFileMetadata": True}
        yield {"remove": {**removed, "partitionValues": {}, "size": size}}
    yield from (file.action(now_ms, data_change=data_change) for file in into)


def numbers_said(numbers: Mapping[str, int], now_ms: int) -> Iterator[dict[str, Any]]:
    """Yield the actions that say to which number each writer has come."""
    for writer, number in numbers.items():
        yield {"txn": {"appId": writer, "version": number, "lastUpdated": now_ms}}


def put_commit(path: Path, actions: Iterable[Mapping[str, Any]]) -> bool:
    """Put a commit in place, durable and whole; return False where there is one of that number."""
    text = "".join(json.dumps(action, ensure_ascii=False) + "\n" for action in actions)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.link(aside, path)  # unlike a rename it does not replace what is there
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def change_the_table(actions: Iterable[Mapping[str, Any]]) -> bool:
    """Whether actions change a table's schema, properties or protocol."""
    return any("metaData" in action or "protocol" in action for action in actions)


def _disturbs(actions: Sequence[Mapping[str, Any]], out: Mapping[str, int]) -> bool:
    removed = {unquote(action["remove"]["path"]) for action in actions if "remove" in action}
    return bool(removed & out.keys()) or change_the_table(actions)
