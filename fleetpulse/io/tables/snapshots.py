"""Snapshots of the lifecycle job's state: versions of a Delta table with metadata.

Rule 1: a snapshot replaces the previous one in one commit. Older snapshots are older versions of
the table, until maintenance removes them.
Rule 2: the metadata of a snapshot has a format version. A snapshot with an unknown format version
is listed, and pins its version of bronze. It is neither restored nor removed, since only the
fleetpulse that took it can interpret it.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import DEVICE_SNAPSHOTS
from fleetpulse.core.times import format_instant
from fleetpulse.io.delta.corruption import reporting_corruption
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_CHECKPOINT: Final = "checkpoint.parquet"
NOTE_FORM: Final = 1  # format version; increment it for changes that older readers would misread, not for optional entries
_NUMBERS: Final = ("generation", "batch", "bronze", "devices", "key_groups")
_INSTANTS: Final = ("newest_ms", "frontier_ms", "amended_ms")
_LOGGED: Final = re.compile(rf"_delta_log/(\d{{20}})\.({re.escape(_CHECKPOINT)}|json)")


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """Metadata of a snapshot: the position of the job at which it was taken.

    Attributes:
        generation: number of the job's generation.
        batch: number of the last batch in the snapshot.
        bronze: next version of bronze to be read.
        newest_ms: ``received_at`` of the newest row read, epoch milliseconds; None before any.
        frontier_ms: frontier, epoch milliseconds; None before there is one.
        devices: number of devices.
        key_groups: number of key groups of the generation.
        amended_ms: ``received_at`` up to which amend had processed late messages, epoch
            milliseconds; None if unknown.
        version: version of the snapshot's table; None before it is written.
        at_ms: time of the commit, epoch milliseconds; None before it is written.
        unmet: devices that ``amended_ms`` excludes, because their judged and their amended history
            still differed.
        form: format version of the metadata, see `NOTE_FORM`. If it is unknown, the readable
            entries are valid, and missing numbers are 0.
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
    form: int = NOTE_FORM

    @property
    def is_known(self) -> bool:
        """Whether this version of fleetpulse supports the snapshot's format version."""
        return is_known(self.form)


def is_known(form: int) -> bool:
    """Return whether a format version of snapshot metadata is supported."""
    return 1 <= form <= NOTE_FORM


def write_snapshot(home: Home, rows: "DataFrame", about: SnapshotInfo) -> None:
    """Write a snapshot in one commit, as the newest version of its table.

    Args:
        home: home that holds the table.
        rows: rows with the columns of `DEVICE_SNAPSHOTS`.
        about: metadata of the snapshot, stored in the commit.
    """
    tables.create(home, DEVICE_SNAPSHOTS)
    note = json.dumps({name: value for name, value in asdict(about).items() if name not in ("version", "at_ms")})
    writer = rows.write.format("delta").mode("overwrite").partitionBy(*DEVICE_SNAPSHOTS.partitioned_by)
    writer.option("userMetadata", note).save(str(home.table(DEVICE_SNAPSHOTS.name)))


def snapshots(home: Home) -> list[SnapshotInfo]:
    """Return the metadata of the snapshots that maintenance has kept, newest first."""
    path = home.table(DEVICE_SNAPSHOTS.name)
    if not holds_table(path):
        return []
    found: list[SnapshotInfo] = []
    listing = _list_files(path)
    with reporting_corruption(f'the log of the table "{path}"'):
        commits = DeltaTable(str(path)).history()
    for commit in commits:
        info = note_of(commit)
        if info is not None and _is_kept(path, commit, listing):
            found.append(replace(info, version=commit["version"], at_ms=commit["timestamp"]))
    return found


def shown_snapshot(home: Home) -> SnapshotInfo | None:
    """Return the snapshot that the table's newest version holds.

    Returns:
        Metadata of the snapshot; None if there is none, or if files of it are missing.
    """
    newest = next(iter(snapshots(home)), None)
    path = home.table(DEVICE_SNAPSHOTS.name)
    return newest if newest is not None and is_whole(path, DeltaTable(str(path)).version()) else None


def note_of(commit: Mapping[str, Any]) -> SnapshotInfo | None:
    """Parse the snapshot metadata of a commit.

    Unknown entries are ignored. The format version is 1 if the metadata has none, and 0 if required
    entries are missing.

    Args:
        commit: entry of the table's history.

    Returns:
        Metadata of the snapshot; None if the commit has none.
    """
    try:
        metadata = json.loads(commit.get("userMetadata") or "null")
    except ValueError:
        return None
    if not isinstance(metadata, dict) or "generation" not in metadata:
        return None
    form = metadata.get("form", 1)
    numbers = {name: metadata[name] for name in _NUMBERS if isinstance(metadata.get(name), int)}
    instants = {name: metadata[name] for name in _INSTANTS if isinstance(metadata.get(name), int)}
    unmet = metadata.get("unmet", [])
    is_whole_note = len(numbers) == len(_NUMBERS) and {"newest_ms", "frontier_ms"} <= metadata.keys() and isinstance(unmet, list)
    if not isinstance(form, int) or (is_known(form) and not is_whole_note):
        form = 0
    return SnapshotInfo(
        **{"newest_ms": None, "frontier_ms": None, **dict.fromkeys(_NUMBERS, 0), **numbers, **instants},
        unmet=tuple(map(str, unmet)) if isinstance(unmet, list) else (),
        form=form,
    )


@dataclass(frozen=True, slots=True)
class _Listing:
    """Existing files of a table, from one listing of its folder.

    Attributes:
        files: paths of the files, relative to the folder.
        opened: versions that can be opened: the log is whole from version 0 or from a checkpoint.
    """

    files: frozenset[str]
    opened: frozenset[int]


def _list_files(table: Path) -> _Listing:
    files = frozenset(f"{folder}/{name}".removeprefix(f"{table}/") for folder, _, names in os.walk(table) for name in names)
    logged = sorted((int(named[1]), named[2]) for name in files if (named := _LOGGED.fullmatch(name)))
    opened: set[int] = set()
    for version, kind in logged:
        if kind == _CHECKPOINT or version == 0 or version - 1 in opened:
            opened.add(version)
    return _Listing(files, frozenset(opened))


def _is_kept(table: Path, commit: Mapping[str, Any], listing: _Listing) -> bool:
    """Return whether a snapshot can be opened and all its files exist.

    A commit that overwrote the whole table lists all files of its version. Reading this commit is
    much cheaper than opening the version.
    """
    parameters = commit.get("operationParameters") or {}
    if parameters.get("mode") != "Overwrite" or "predicate" in parameters or commit["version"] not in listing.opened:
        return is_whole(table, commit["version"])
    try:
        with (table / "_delta_log" / f"{commit['version']:020d}.json").open() as lines:
            actions = (json.loads(line) for line in lines if '"add"' in line)
            return all(unquote(action["add"]["path"]) in listing.files for action in actions if "add" in action)
    except FileNotFoundError:  # the version is no longer in the log
        return False


def is_whole(table: Path, version: int) -> bool:
    """Return whether a version of a table can be opened and all its files exist."""
    try:
        return all(path.exists() for path in files_of(table, version))
    except DeltaError:  # the version is no longer in the log
        return False


def files_of(table: Path, version: int) -> list[Path]:
    """Return the paths of the files of one version of a table."""
    added = DeltaTable(str(table), version=version).get_add_actions()
    return [table / unquote(str(name)) for name in added["path"].to_pylist()]


def find_snapshot(home: Home, version: int | None = None, at_ms: int | None = None) -> SnapshotInfo:
    """Return the newest snapshot, that of a version, or the newest one at an instant.

    Args:
        home: home of the snapshot.
        version: version of the snapshot's table; None selects by ``at_ms``.
        at_ms: instant, epoch milliseconds; the newest snapshot taken up to it is returned. None
            returns the newest of all.

    Raises:
        FleetError: no such snapshot exists, or its format version is not supported.
    """
    known = snapshots(home)
    if not known:
        raise FleetError(
            f'the home "{home.path}" has no snapshot; take one with: ./fleet state snapshot --home {home.path}',
            code="snapshot-missing",
        )
    if version is not None:
        known = [one for one in known if one.version == version]
    elif at_ms is not None:
        known = [one for one in known if one.at_ms is not None and one.at_ms <= at_ms]
    if not known:
        available = snapshots(home)
        selector = f"of version {version}" if version is not None else f"from before {format_instant(at_ms or 0)}"
        raise FleetError(
            f"there is no snapshot {selector}; available versions: {', '.join(str(one.version) for one in reversed(available))}, "
            f"the oldest from {format_instant(available[-1].at_ms or 0)}; choose one of them",
            code="snapshot-unknown",
        )
    if not known[0].is_known:
        usable = [str(one.version) for one in snapshots(home) if one.is_known]
        raise FleetError(
            f"snapshot version {known[0].version} was taken by {_writer_text(known[0])}: its metadata has format version "
            f"{known[0].form}, this one supports up to {NOTE_FORM}; use the fleetpulse that took it, or choose another "
            f"snapshot with --version; usable versions: {', '.join(reversed(usable)) or 'none of those that are kept'}",
            code="snapshot-version-unsupported",
        )
    return known[0]


def _writer_text(snapshot: SnapshotInfo) -> str:
    """Return text naming the writer of a snapshot with an unsupported format version."""
    return "a newer version of fleetpulse" if snapshot.form > NOTE_FORM else "another version of fleetpulse"
