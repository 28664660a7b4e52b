"""Snapshots of the lifecycle job's state in Delta: each a version of one table, with what it was taken at beside it.

Rule 1: a snapshot replaces the one before in one commit; older ones are the table's history, as long as that is kept.
Rule 2: what it was taken at has a form with a number. One that is not known here is listed and needs its bronze, and nobody
begins with it or removes it: whoever took it knows what it says.
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
NOTE_FORM: Final = 1  # raise it where a reader of the form before would misread it; entries that it may pass over need not
_NUMBERS: Final = ("generation", "batch", "bronze", "devices", "key_groups")
_INSTANTS: Final = ("newest_ms", "frontier_ms", "amended_ms")
_LOGGED: Final = re.compile(rf"_delta_log/(\d{{20}})\.({re.escape(_CHECKPOINT)}|json)")


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
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
        form: of this note, see `NOTE_FORM`. Where it is not known here, of the other entries those are true that are read all
            the same; a number that is not there is 0.
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
        """Whether this version of fleetpulse knows what the snapshot says."""
        return is_known(self.form)


def is_known(form: int) -> bool:
    """Whether a form of notes is one of those that are known here."""
    return 1 <= form <= NOTE_FORM


def write_snapshot(home: Home, rows: "DataFrame", about: SnapshotInfo) -> None:
    """Replace the snapshot before; rows have the columns of `DEVICE_SNAPSHOTS`."""
    tables.create(home, DEVICE_SNAPSHOTS)
    note = json.dumps({name: value for name, value in asdict(about).items() if name not in ("version", "at_ms")})
    writer = rows.write.format("delta").mode("overwrite").partitionBy(*DEVICE_SNAPSHOTS.partitioned_by)
    writer.option("userMetadata", note).save(str(home.table(DEVICE_SNAPSHOTS.name)))


def snapshots(home: Home) -> list[SnapshotInfo]:
    """Return the snapshots that are kept, the newest first: maintenance thins them out."""
    path = home.table(DEVICE_SNAPSHOTS.name)
    if not holds_table(path):
        return []
    found: list[SnapshotInfo] = []
    there = _look(path)
    with reporting_corruption(f'the log of the table "{path}"'):
        commits = DeltaTable(str(path)).history()
    for commit in commits:
        told = note_of(commit)
        if told is not None and _is_kept(path, commit, there):
            found.append(replace(told, version=commit["version"], at_ms=commit["timestamp"]))
    return found


def shown_snapshot(home: Home) -> SnapshotInfo | None:
    """Return the snapshot that the table shows to who names no version; None where there is none, or it is not whole."""
    newest = next(iter(snapshots(home)), None)
    path = home.table(DEVICE_SNAPSHOTS.name)
    return newest if newest is not None and is_whole(path, DeltaTable(str(path)).version()) else None


def note_of(commit: Mapping[str, Any]) -> SnapshotInfo | None:
    """Return what a commit says that a snapshot was taken at; None where it says nothing of the kind.

    Further entries are passed over. A note without a form is of the first; one that lacks what the form wants has the form 0.

    Args:
        commit: an entry of the table's history.
    """
    try:
        told = json.loads(commit.get("userMetadata") or "null")
    except ValueError:
        return None
    if not isinstance(told, dict) or "generation" not in told:
        return None
    form = told.get("form", 1)
    numbers = {name: told[name] for name in _NUMBERS if isinstance(told.get(name), int)}
    instants = {name: told[name] for name in _INSTANTS if isinstance(told.get(name), int)}
    unmet = told.get("unmet", [])
    is_whole_note = len(numbers) == len(_NUMBERS) and {"newest_ms", "frontier_ms"} <= told.keys() and isinstance(unmet, list)
    if not isinstance(form, int) or (is_known(form) and not is_whole_note):
        form = 0
    return SnapshotInfo(
        **{"newest_ms": None, "frontier_ms": None, **dict.fromkeys(_NUMBERS, 0), **numbers, **instants},
        unmet=tuple(map(str, unmet)) if isinstance(unmet, list) else (),
        form=form,
    )


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


def find_snapshot(home: Home, version: int | None = None, at_ms: int | None = None) -> SnapshotInfo:
    """Return a snapshot: the newest, that of a version, or the newest that was there at an instant (epoch milliseconds).

    Raises:
        FleetError: there is none such, or another version of fleetpulse took it.
    """
    known = snapshots(home)
    if not known:
        raise FleetError(
            f'the home "{home.path}" has no snapshot; take one: ./fleet state snapshot --home {home.path}',
            code="snapshot-missing",
        )
    if version is not None:
        known = [one for one in known if one.version == version]
    elif at_ms is not None:
        known = [one for one in known if one.at_ms is not None and one.at_ms <= at_ms]
    if not known:
        kept = snapshots(home)
        asked = f"of version {version}" if version is not None else f"from before {format_instant(at_ms or 0)}"
        raise FleetError(
            f"there is no snapshot {asked}; kept are {', '.join(str(one.version) for one in reversed(kept))}, the oldest of "
            f"{format_instant(kept[-1].at_ms or 0)}; name one of these",
            code="snapshot-unknown",
        )
    if not known[0].is_known:
        ours = [str(one.version) for one in snapshots(home) if one.is_known]
        raise FleetError(
            f"snapshot version {known[0].version} was taken by {_taker(known[0])}: its note has form {known[0].form}, and "
            f"this one knows forms up to {NOTE_FORM}; use the fleetpulse that took it, or name another with --version: "
            f"this one knows {', '.join(reversed(ours)) or 'none of those that are kept'}",
            code="snapshot-version-unsupported",
        )
    return known[0]


def _taker(taken: SnapshotInfo) -> str:
    """Say in words who took a snapshot that is not known here."""
    return "a newer version of fleetpulse" if taken.form > NOTE_FORM else "another version of fleetpulse"
