"""Snapshots of the lifecycle job's state in Delta: each a version of one table, with what it was taken at beside it.

Rule: a snapshot replaces the one before in one commit; older ones are the table's history, as long as that is kept.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import DEVICE_SNAPSHOTS
from fleetpulse.core.times import format_instant
from fleetpulse.io import delta
from fleetpulse.io.home import Home

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CHECKPOINT: Final = "checkpoint.parquet"
_LOGGED: Final = re.compile(rf"_delta_log/(\d{{20}})\.({re.escape(_CHECKPOINT)}|json)")


@dataclass(frozen=True, slots=True)
class Taken:
    """What a snapshot was taken at.

    Attributes:
        generation: of the job.
        batch: after which.
        bronze: its version, the next to be read.
        newest_ms: ``received_at`` of the newest row read, epoch milliseconds.
        frontier_ms: up to which is judged, epoch milliseconds; None before there is one.
        devices: how many.
        key_groups: of the generation.
        amended_ms: ``received_at`` up to which amend was done by then with what came late; None where it is not known.
        version: of the table; None before it is written.
        at_ms: when it was written, epoch milliseconds.
        unmet: the devices for which ``amended_ms`` does not count: their judged and amended history had not met.
    """

    generation: int
    batch: int
    bronze: int
    newest_ms: int | None
    frontier_ms: int | None
    devices: int
    key_groups: int
    amended_ms: int | None = None
    version: int | None = None
    at_ms: int | None = None
    unmet: tuple[str, ...] = ()


def write_snapshot(home: Home, rows: "DataFrame", about: Taken) -> None:
    """Replace the snapshot before; rows have the columns of `DEVICE_SNAPSHOTS`."""
    delta.create(home, DEVICE_SNAPSHOTS)
    note = json.dumps({name: value for name, value in asdict(about).items() if name not in ("version", "at_ms")})
    writer = rows.write.format("delta").mode("overwrite").partitionBy(*DEVICE_SNAPSHOTS.partitioned_by)
    writer.option("userMetadata", note).save(str(home.table(DEVICE_SNAPSHOTS.name)))


def snapshots(home: Home) -> list[Taken]:
    """Return the snapshots that are kept, the newest first: maintenance thins them out."""
    path = home.table(DEVICE_SNAPSHOTS.name)
    if not (path / "_delta_log").exists():
        return []
    found: list[Taken] = []
    there = _look(path)
    for commit in DeltaTable(str(path)).history():
        try:
            told = json.loads(commit.get("userMetadata") or "null")
        except ValueError:
            continue
        if isinstance(told, dict) and "generation" in told and _is_kept(path, commit, there):
            unmet = tuple(told.pop("unmet", ()))
            found.append(Taken(**told, version=commit["version"], at_ms=commit["timestamp"], unmet=unmet))
    return found


@dataclass(frozen=True, slots=True)
class _There:
    """What is there of a table, by one look.

    Attributes:
        files: their paths in its folder.
        opened: the versions that the log leads to, from its begin or from a checkpoint on.
    """

    files: frozenset[str]
    opened: frozenset[int]


def _look(table: Path) -> _There:
    files = frozenset(f"{folder}/{name}".removeprefix(f"{table}/") for folder, _, names in os.walk(table) for name in names)
    logged = sorted((int(named[1]), named[2]) for name in files if (named := _LOGGED.fullmatch(name)))
    opened: set[int] = set()
    for version, kind in logged:
        if kind == _CHECKPOINT or version == 0 or version - 1 in opened:
            opened.add(version)
    return _There(files, frozenset(opened))


def _is_kept(table: Path, commit: Mapping[str, Any], there: _There) -> bool:
    """Whether a snapshot can be opened, and all its files are there.

    A commit that wrote over all there was before names them all; to open the version tells the same, and costs far more.
    """
    parameters = commit.get("operationParameters") or {}
    if parameters.get("mode") != "Overwrite" or "predicate" in parameters or commit["version"] not in there.opened:
        return is_whole(table, commit["version"])
    try:
        with (table / "_delta_log" / f"{commit['version']:020d}.json").open() as lines:
            actions = (json.loads(line) for line in lines if '"add"' in line)
            return all(unquote(action["add"]["path"]) in there.files for action in actions if "add" in action)
    except FileNotFoundError:  # it is no longer in the log
        return False


def is_whole(table: Path, version: int) -> bool:
    """Whether a version of a table can be opened, and all its files are there."""
    try:
        return all(path.exists() for path in files_of(table, version))
    except DeltaError:  # it is no longer in the log
        return False


def files_of(table: Path, version: int) -> list[Path]:
    """Return the files of a version of a table."""
    added = DeltaTable(str(table), version=version).get_add_actions()
    return [table / unquote(str(name)) for name in added["path"].to_pylist()]


def find_snapshot(home: Home, version: int | None = None, at_ms: int | None = None) -> Taken:
    """Return a snapshot: the newest, that of a version, or the newest that was there at an instant (epoch milliseconds).

    Raises:
        FleetError: there is none such.
    """
    known = snapshots(home)
    if not known:
        raise FleetError(f'the home "{home.path}" has no snapshot; take one: ./fleet state snapshot --home {home.path}')
    if version is not None:
        known = [one for one in known if one.version == version]
    elif at_ms is not None:
        known = [one for one in known if one.at_ms is not None and one.at_ms <= at_ms]
    if not known:
        kept = snapshots(home)
        asked = f"of version {version}" if version is not None else f"from before {format_instant(at_ms or 0)}"
        raise FleetError(
            f"there is no snapshot {asked}; kept are {', '.join(str(one.version) for one in reversed(kept))}, the oldest of "
            f"{format_instant(kept[-1].at_ms or 0)}; name one of these"
        )
    return known[0]
