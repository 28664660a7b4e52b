"""Commits that exchange files of a Delta table for others: what deltalake's own OPTIMIZE and DELETE do not promise.

Its OPTIMIZE puts the newest rows first, and bronze is in order; its DELETE says of the rows that stay that they are new.

Rule 1: a commit is a file that is put in place whole, or not at all, under a number that nobody has taken.
Rule 2: who came before is looked at: appends do not matter; a change of the schema, or of a file that is to go, ends the try.
"""

import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from fleetpulse.core.errors import FleetError
from fleetpulse.io.damage import open_table
from fleetpulse.io.segments import sync_folder

_TRIES: Final = 1_000  # landing commits a few times a second, and a try takes milliseconds
_KNOWN: Final = (1, 2)  # the protocol of tables that are made here


@dataclass(frozen=True, slots=True)
class Added:
    """A file that a commit brings in.

    Attributes:
        name: its path in the table's folder.
        size_bytes: its size.
        stats: Delta's statistics of it.
    """

    name: str
    size_bytes: int
    stats: Mapping[str, Any]


def exchange(
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
    opened = open_table(table)
    protocol = opened.protocol()
    if (protocol.min_reader_version, protocol.min_writer_version) > _KNOWN:
        raise FleetError(f'"{table}" has protocol {protocol}; known are {_KNOWN} and older; maintain it with what changed it')
    live = {str(name) for name in opened.get_add_actions()["path"].to_pylist()}
    if not live.issuperset(out):
        return None
    lines = _lines(out, into, operation, opened.version(), data_change=data_change, numbers=numbers or {})
    version = opened.version() + 1
    for _ in range(_TRIES):
        if _put(table / "_delta_log" / f"{version:020d}.json", lines):
            return version
        if _disturbs(table / "_delta_log" / f"{version:020d}.json", out):
            return None
        version += 1
    return None


def _lines(
    out: Mapping[str, int],
    into: Iterable[Added],
    operation: str,
    read: int,
    *,
    data_change: bool,
    numbers: Mapping[str, int],
) -> str:
    now_ms = time.time_ns() // 1_000_000
    actions: list[dict[str, Any]] = [
        {
            "commitInfo": {
                "timestamp": now_ms,
                "operation": operation,
                "operationParameters": {},
                "readVersion": read,
                "isBlindAppend": False,
                "engineInfo": "fleetpulse",
            }
        }
    ]
    for writer, number in numbers.items():
        actions.append({"txn": {"appId": writer, "version": number, "lastUpdated": now_ms}})
    for name, size in out.items():
        removed = {"path": name, "deletionTimestamp": now_ms, "dataChange": data_change, "extendedFileMetadata": True}
        actions.append({"remove": {**removed, "partitionValues": {}, "size": size}})
    for file in into:
        added = {"path": file.name, "partitionValues": {}, "size": file.size_bytes, "modificationTime": now_ms}
        actions.append({"add": {**added, "dataChange": data_change, "stats": json.dumps(file.stats)}})
    return "".join(json.dumps(action) + "\n" for action in actions)


def _put(path: Path, text: str) -> bool:
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with aside.open("w") as file:
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


def _disturbs(commit: Path, out: Mapping[str, int]) -> bool:
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    removed = {unquote(action["remove"]["path"]) for action in actions if "remove" in action}
    return bool(removed & out.keys()) or any("metaData" in action or "protocol" in action for action in actions)
