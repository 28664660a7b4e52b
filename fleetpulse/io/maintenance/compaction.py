"""Compaction and retention of bronze: merge files of one day, remove expired rows.

Rule 1: versions that a job reads one by one are not changed. No compacted file spans a version
with a reader pin.
Rule 2: a compacted file has the rows of its versions in their order. The versions are of one day,
by the first row of each.
Rule 3: retention keeps the rows that fleetpulse itself writes (registry, policies, gaps, commands)
and the first row ever. They are few, and without them the remaining rows would be judged
differently.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fleetpulse.columnar.compute import pc
from fleetpulse.core.rows import Kind
from fleetpulse.core.tables import MESSAGES
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.delta.appender import parquet_options
from fleetpulse.io.delta.commits import Added, replace_files
from fleetpulse.io.delta.compacted import FOLDER, CompactedFile, piece_of, remainder_end, remainder_name
from fleetpulse.io.delta.corruption import open_table, reporting_corruption_of_file
from fleetpulse.io.delta.log import actions_of, appended_files
from fleetpulse.io.maintenance.readers import ReaderPin, oldest_live_pin
from fleetpulse.io.system.fsync import replace_durably
from fleetpulse.io.tables.row_accounting import removal_txn
from fleetpulse.io.tables.tables import arrow_schema

TARGET_BYTES: Final = 64 * 1024 * 1024  # of a compacted file: some millions of messages in Parquet
MIN_FILES_TODAY: Final = 10  # of the current day: so each file is rewritten a few times, not at each maintenance
_ROW_GROUP: Final = 131_072
_RETAINED_KINDS: Final = pa.array(
    [Kind.REGISTRY.value, Kind.POLICY.value, Kind.GAP.value, Kind.CONTROL.value, Kind.CORRECT.value]
)
_STATS: Final = ("received_at", "event_time")


@dataclass(frozen=True, slots=True)
class BronzeFile:
    """A file of bronze.

    Attributes:
        name: path of the file, relative to the table's folder.
        size_bytes: size of the file, bytes.
        rows: number of rows.
        least_ms: smallest ``received_at``, epoch milliseconds; 0 without rows.
        greatest_ms: greatest ``received_at``, epoch milliseconds; 0 without rows.
    """

    name: str
    size_bytes: int
    rows: int
    least_ms: int
    greatest_ms: int


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Unit of compaction: a version of bronze, or several versions whose rows share files.

    Attributes:
        begin: first version.
        end: version after the last one.
        parts: files with the rows, in order; empty for a version that only rewrote files.
    """

    begin: int
    end: int
    parts: tuple[BronzeFile, ...]


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """Plan of the compaction and retention of bronze.

    Attributes:
        remainder: remainder file of an earlier retention; None before the first.
        drop: expired units, oldest first.
        merges: groups of units to be compacted, each with at least one file.
        cutoff_ms: rows received before it are expired, epoch milliseconds.
        newest_ms: ``received_at`` of the newest row, epoch milliseconds.
        held_by: reader pin from whose version on nothing is changed.
    """

    remainder: BronzeFile | None
    drop: tuple[VersionRange, ...]
    merges: tuple[tuple[VersionRange, ...], ...]
    cutoff_ms: int
    newest_ms: int
    held_by: ReaderPin


def plan(table: Path, needs: Sequence[ReaderPin], keep_ms: int | None, now_ms: int) -> CompactionPlan | None:
    """Plan the compaction and retention of bronze.

    Args:
        table: folder of the table.
        needs: reader pins of the table.
        keep_ms: retention of rows, milliseconds, counted back from the newest ``received_at``, or
            from now if that is earlier; None keeps all rows.
        now_ms: current time, epoch milliseconds.

    Returns:
        The plan; None before the first row.
    """
    live = _live(table)
    if not live:
        return None
    remainder = next((part for name, part in live.items() if remainder_end(name) is not None), None)
    newest_ms = max(part.greatest_ms for part in live.values())
    base_ms = min(newest_ms, now_ms)  # a row from a clock that was ahead must not expire all others
    cutoff_ms = 0 if keep_ms is None else (base_ms - keep_ms) // DAY_MS * DAY_MS
    held_by = oldest_live_pin(needs)
    units = [unit for unit in _units(table, live, remainder) if unit.end <= held_by.version]
    oldest = min(need.version for need in needs)
    drop = tuple(takewhile(lambda unit: unit.end <= oldest and _greatest_ms(unit) < cutoff_ms, units))
    if not any(unit.parts for unit in drop):
        drop = ()
    merges = groups(units[len(drop) :], {need.version for need in needs}, base_ms // DAY_MS)
    return CompactionPlan(remainder, drop, tuple(merges), cutoff_ms, newest_ms, held_by)


def covered(table: Path) -> tuple[int, list[tuple[int, int]]]:
    """Return the versions whose rows are in the remainder file or in compacted files.

    Args:
        table: folder of the table.

    Returns:
        End of the remainder file (0 if there is none), and first version and end of each committed
        compacted file.
    """
    names = [str(name) for name in open_table(table).get_add_actions()["path"].to_pylist()]
    found = (piece_of(name) for name in names)
    return max((remainder_end(name) or 0 for name in names), default=0), [(one.begin, one.end) for one in found if one]


def _live(table: Path) -> dict[str, BronzeFile]:
    log = open_table(table).get_add_actions(flatten=True)
    names = ("path", "size_bytes", "num_records", "min.received_at", "max.received_at")
    nothing = [None] * log.num_rows
    columns = (log[name].to_pylist() if name in log.column_names else nothing for name in names)
    return {name: _part(table, name, *rest) for name, *rest in zip(*columns, strict=True)}


def _part(table: Path, name: str, size: int, rows: int | None, least: datetime | None, greatest: datetime | None) -> BronzeFile:
    if rows is None or least is None or greatest is None:
        column = _columns_of(table / name, "received_at")["received_at"]
        rows, (least, greatest) = len(column), pc.min_max(column).as_py().values()
    if least is None or greatest is None:
        return BronzeFile(name, size, 0, 0, 0)
    return BronzeFile(name, size, rows, _ms(least), _ms(greatest))


def _ms(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _units(table: Path, live: dict[str, BronzeFile], remainder: BronzeFile | None) -> Iterator[VersionRange]:
    """Yield compacted files and single versions in order, from the remainder's end."""
    compacted = {piece.begin: piece for piece in map(piece_of, live) if piece is not None}
    log = table / "_delta_log"
    written = sorted(int(path.stem) for path in log.glob("*.json") if path.stem.isdecimal())
    version = (remainder_end(remainder.name) or 0) if remainder else 0
    appended = {each: _appended(log, each, live) for each in written if each >= version}
    known = {part.name for parts in appended.values() for part in parts}
    while version <= written[-1]:
        if version in compacted:
            yield VersionRange(version, compacted[version].end, (live[compacted[version].name],))
            version = compacted[version].end
        elif version in appended:
            yield VersionRange(version, version + 1, appended[version])
            version += 1
        else:  # the log was cleaned by age before these versions were compacted
            end = min(each for each in (*appended, *compacted) if each > version)
            rest = [part for name, part in live.items() if name not in known and FOLDER not in Path(name).parts]
            yield VersionRange(version, end, tuple(sorted(rest, key=lambda part: (part.least_ms, part.greatest_ms))))
            version = end


def _appended(log: Path, version: int, live: dict[str, BronzeFile]) -> tuple[BronzeFile, ...]:
    names = [unquote(added["path"]) for added in appended_files(actions_of(log / f"{version:020d}.json"))]
    return tuple(live[name] for name in names if name in live)


def _greatest_ms(unit: VersionRange) -> int:
    return max((part.greatest_ms for part in unit.parts), default=0)


def groups(units: Iterable[VersionRange], cuts: set[int], today: int) -> Iterator[tuple[VersionRange, ...]]:
    """Yield groups of consecutive units that are worth compacting.

    Args:
        units: units in order.
        cuts: versions at which a file must begin, because of a reader pin.
        today: day of the newest row, in days since 1970-01-01.
    """
    group: list[VersionRange] = []
    for unit in units:
        if group and (unit.begin in cuts or unit.begin != group[-1].end or _breaks(group, unit)):
            if _is_worth(group, today):
                yield tuple(group)
            group = []
        group.append(unit)
    if group and _is_worth(group, today):
        yield tuple(group)


def _breaks(group: Sequence[VersionRange], unit: VersionRange) -> bool:
    before, size = [part for one in group for part in one.parts], sum(part.size_bytes for part in unit.parts)
    if not before or not unit.parts:
        return False
    return _day(group) != unit.parts[0].least_ms // DAY_MS or sum(part.size_bytes for part in before) + size > TARGET_BYTES


def _day(group: Sequence[VersionRange]) -> int:
    return next((unit.parts[0].least_ms // DAY_MS for unit in group if unit.parts), -1)


def _is_worth(group: Sequence[VersionRange], today: int) -> bool:
    files = sum(len(unit.parts) for unit in group)
    if files < 2 or _day(group) == today:
        return files >= MIN_FILES_TODAY or (files == 1 and len(group) > 1 and _day(group) != today)
    return True


def compact(table: Path, units: Sequence[VersionRange]) -> BronzeFile | None:
    """Write the rows of units to one compacted file, and replace their files by it.

    Returns:
        The compacted file; None if another writer changed the table meanwhile.
    """
    parts = [part for unit in units for part in unit.parts]
    piece = CompactedFile(units[0].begin, units[-1].end, sum(part.rows for part in parts))
    added = _write(table, piece.name, parts, lambda rows: rows)
    data = {part.name: part.size_bytes for part in parts}
    if replace_files(table, data, [added], "OPTIMIZE", data_change=False) is None:
        return None
    return BronzeFile(piece.name, added.size_bytes, piece.rows, parts[0].least_ms, max(part.greatest_ms for part in parts))


def count_expired(table: Path, planned: CompactionPlan) -> int:
    """Return the number of rows that `drop_expired` would remove."""
    parts = [part for unit in planned.drop for part in unit.parts]
    kinds = (_columns_of(table / part.name, "kind")["kind"] for part in parts)
    retained = sum(pc.sum(pc.is_in(each.cast(pa.string()), value_set=_RETAINED_KINDS)).as_py() or 0 for each in kinds)
    first_is_a_signal = planned.remainder is None and not _starts_with_retained(table, parts)
    return sum(part.rows for part in parts) - retained - int(first_is_a_signal)


def _starts_with_retained(table: Path, parts: Sequence[BronzeFile]) -> bool:
    first = min((part for part in parts if part.rows), key=lambda part: part.least_ms)
    rows = _columns_of(table / first.name, "received_at", "kind")
    at = rows["received_at"].cast(pa.int64()).to_numpy().argmin()
    return rows["kind"][int(at)].as_py() in _RETAINED_KINDS.to_pylist()


def drop_expired(table: Path, planned: CompactionPlan) -> int | None:
    """Remove the expired rows of a plan.

    Of the expired files, rows that retention keeps are written to a new remainder file.

    Returns:
        Number of rows removed; None if another writer changed the table meanwhile.
    """
    parts = [part for unit in planned.drop for part in unit.parts]
    earlier = [planned.remainder] if planned.remainder else []
    first_ms = min(part.least_ms for part in (*earlier, *parts))
    row_filter = _RetentionFilter(first_ms, earlier[0].rows if earlier else 0)
    added = _write(table, remainder_name(planned.drop[-1].end), [*earlier, *parts], row_filter)
    out = {part.name: part.size_bytes for part in (*earlier, *parts)}
    removed = sum(part.rows for part in (*earlier, *parts)) - int(added.stats["numRecords"])
    numbers = removal_txn(open_table(table), removed)  # maintenance holds a lock: no other process removes rows
    return None if replace_files(table, out, [added], "DELETE", data_change=True, numbers=numbers) is None else removed


class _RetentionFilter:
    """Filter of rows that retention keeps: fleetpulse's own rows, and the first row.

    It is called with the rows in order.

    Args:
        first_ms: ``received_at`` of the first row ever, epoch milliseconds.
        earlier: number of rows at the beginning that an earlier retention has kept.
    """

    def __init__(self, first_ms: int, earlier: int) -> None:
        self._first_ms, self._earlier, self._found = first_ms, earlier, earlier > 0

    def __call__(self, rows: pa.Table) -> pa.Table:
        places = np.arange(rows.num_rows)
        retained = pc.is_in(rows["kind"], value_set=_RETAINED_KINDS).to_numpy() | (places < self._earlier)
        self._earlier = max(0, self._earlier - rows.num_rows)
        if not self._found:
            first = np.flatnonzero(rows["received_at"].cast(pa.int64()).to_numpy() == self._first_ms * 1000)[:1]
            self._found = bool(len(first))
            retained[first] = True
        return rows.filter(pa.array(retained))


def _write(table: Path, name: str, parts: Iterable[BronzeFile], row_filter: Callable[[pa.Table], pa.Table]) -> Added:
    """Write rows of several files durably to a new file, with one row group in memory.

    Args:
        table: folder of the table.
        name: path of the new file, relative to the folder.
        parts: files to read, in order.
        row_filter: filter of the rows to write.

    Returns:
        The new file, for a commit that adds it.
    """
    path, schema = table / name, arrow_schema(MESSAGES)
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")  # maintenance holds a lock: no other process writes it
    spans: dict[str, list[datetime]] = {column: [] for column in _STATS}
    count, held = 0, pa.Table.from_batches([], schema)
    try:
        with pq.ParquetWriter(temporary, schema, **parquet_options(schema)) as writer:
            for rows in (row_filter(rows) for part in parts for rows in _read(table / part.name, schema)):
                count += rows.num_rows
                for column, span in spans.items():
                    span += [one for one in pc.min_max(rows[column]).as_py().values() if one is not None]
                held = pa.concat_tables([held, rows])
                if held.num_rows >= _ROW_GROUP:
                    writer.write_table(held.combine_chunks())
                    held = held.slice(0, 0)
            if held.num_rows:
                writer.write_table(held.combine_chunks())
        replace_durably(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)  # on a full disk, it would keep occupying space
        raise
    return Added(name, path.stat().st_size, {"numRecords": count, **_as_stats(spans)})


def _columns_of(path: Path, *names: str) -> pa.Table:
    with reporting_corruption_of_file(path):
        return pq.read_table(path, columns=[*names])


def _read(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of a file by row group; columns that the file lacks are null."""
    with reporting_corruption_of_file(path):
        file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        with reporting_corruption_of_file(path):
            found = file.read_row_group(group)
        columns = [
            found[field.name].cast(field.type) if field.name in found.column_names else pa.nulls(found.num_rows, field.type)
            for field in schema
        ]
        yield pa.Table.from_arrays(columns, schema=schema)


def _as_stats(spans: dict[str, list[datetime]]) -> dict[str, dict[str, str]]:
    known = {column: span for column, span in spans.items() if span}
    return {
        "minValues": {column: _instant(min(span)) for column, span in known.items()},
        "maxValues": {column: _instant(max(span)) for column, span in known.items()},
    }


def _instant(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
