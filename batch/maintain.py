"""Maintenance: tables and logs are kept small while everything runs, and nothing goes that somebody still needs.

Rule 1: rows are promised to be gone (`kept.promise`) before the first one goes.
Rule 2: every step may be broken off by kill -9 and done again; the next maintenance takes away what it left.
Rule 3: a step that others are in the way of is left for the next time: the jobs go first.
Rule 4: ages of rows count back from the newest one, or from now where a clock that was ahead has stamped that one.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from batch import amend
from batch.pruning import going, prune
from fleetpulse.core.judgements import AMENDMENTS, Verdict
from fleetpulse.core.tables import (
    DEVICE_SNAPSHOTS,
    JUDGEMENTS,
    MESSAGES,
    QUALITY_FAILURES,
    QUALITY_RESULTS,
    QUARANTINE,
    STREAM_HEALTH,
    TABLES,
)
from fleetpulse.core.times import format_instant
from fleetpulse.io import compaction, delta, leftovers, tidying
from fleetpulse.io.counted import removing
from fleetpulse.io.damage import open_table
from fleetpulse.io.generations import checkpoint_of, left_over, load_generations
from fleetpulse.io.history import FOLDER
from fleetpulse.io.home import Home
from fleetpulse.io.kept import oldest_kept_ms, promise
from fleetpulse.io.making import keeping_makers_out, maintaining
from fleetpulse.io.needs import Need, floor, judged_through, needs
from fleetpulse.ops.beginnings import CAME_LATE, DONE, LATE

_AHEAD_MS: Final = 3_600_000  # rows land while it works, and clocks differ a little: that is not worth a word
_WAYS_BACK: Final = 1  # generations that no longer run and stay, however old
_BUSY: Final = "left for the next time: others were writing"
_COMMITTED_MS: Final = 600_000  # landing makes one in milliseconds, beside this
_OURS_ASIDE: Final = re.compile(r"\.\d{20}\.json\.[0-9a-f]{32}\.tmp")
_REPLACED_MS: Final = {JUDGEMENTS.name: tidying.HOUR_MS}  # each batch reads what was replaced for as long as the log tells of it
_SUMMARIES: Final = f"kind = '{Verdict.SUMMARY.value}'"
_OF_MESSAGES: Final = tuple(kind for kind in Verdict if kind not in (Verdict.TRANSITION, Verdict.SUMMARY, *AMENDMENTS))


@dataclass(frozen=True, slots=True)
class Keep:
    """For how long what is kept, in milliseconds; None for ever. See the settings ``keep_...``."""

    messages_ms: int | None
    quarantine_ms: int | None
    stream_health_ms: int | None
    summaries_ms: int | None
    late_ms: int | None
    device_snapshots_ms: int | None
    quality_ms: int | None
    logs_ms: int | None
    replaced_ms: int
    generations_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that was done, or that a dry run would do.

    Attributes:
        table: or what else it was done to.
        did: remove (rows), join (small files), checkpoint (the log), delete (files, and the log's old versions), hold.
        files: how many went, or were joined.
        size_bytes: of them.
        rows: that were removed, or written again.
        note: what is worth knowing of it.
    """

    table: str
    did: str
    files: int = 0
    size_bytes: int = 0
    rows: int = 0
    note: str = ""


def maintain(
    home: Home, keep: Keep, *, dry_run: bool, now_s: float | None = None, say: Callable[[str], None] = lambda _: None
) -> Iterator[Step]:
    """Do, step by step, what is to be done; each step is yielded when it is done.

    Args:
        home: the home; its jobs may run.
        keep: for how long what is kept.
        dry_run: change nothing, and say what would be done.
        now_s: the time, as files have it.
        say: told what is waited for.

    Raises:
        FleetError: another is at work for too long, see `making.maintaining`, or it is not known what somebody needs.
    """
    with maintaining(home, say):
        now_s = time.time() if now_s is None else now_s
        now_ms = int(now_s * 1000)
        there = [path for path in sorted((home.path / "tables").glob("*")) if (path / "_delta_log").exists()]
        if not dry_run:
            _remove_aside(there, now_s)
        yield from _generations(home, keep, now_ms, say, dry_run=dry_run)
        wanted = needs(home)
        if home.table(DEVICE_SNAPSHOTS.name) in there:
            yield from _thin_out(home, keep, now_ms, dry_run=dry_run)
            wanted = needs(home)
        if home.table(MESSAGES.name) in there:
            yield from _bronze(home, keep, wanted, now_ms, dry_run=dry_run)
        yield from _rows(home, keep, there, now_ms, dry_run=dry_run)
        known = {table.name for table in TABLES} - {MESSAGES.name, DEVICE_SNAPSHOTS.name}
        for path in there:
            if path.name in known:
                yield from _join(path, dry_run=dry_run)
        for path in there:
            yield from _delete(home, path, keep, wanted, now_s, dry_run=dry_run)
        yield from _beside(home, keep, now_s, dry_run=dry_run)


def _remove_aside(there: list[Path], now_s: float) -> None:
    """Remove what a maintenance that was killed was still writing, for there is no other, and commits nobody makes any more."""
    for path in there:
        begun = leftovers.old_files(path / "_delta_log", _COMMITTED_MS, now_s)
        for leftover in [*(path / FOLDER).glob(".*.tmp"), *(each for each in begun if _OURS_ASIDE.fullmatch(each.name))]:
            leftover.unlink(missing_ok=True)


def _generations(home: Home, keep: Keep, now_ms: int, say: Callable[[str], None], *, dry_run: bool) -> Iterator[Step]:
    """Prune old generations that no longer run: each holds bronze back. The job's hold on its own is not in the way of that."""
    if keep.generations_ms is None:
        return
    before_ms = now_ms - keep.generations_ms
    record = load_generations(home.lifecycle)
    if not going(record, _WAYS_BACK, before_ms) and not left_over(home.lifecycle, record):
        return
    with keeping_makers_out(home, "fleet maintain") as other:
        if other:
            yield Step("checkpoints", "hold", note=f"old generations stay until the next maintenance: {other} is at work")
            return
        record = load_generations(home.lifecycle)
        doomed = [(number, *_size(checkpoint_of(home.lifecycle, number))) for number in going(record, _WAYS_BACK, before_ms)]
        prune(home, _WAYS_BACK, say, dry=dry_run, before_ms=before_ms)
    for number, files, size in doomed:
        retired = format_instant(record.retired_at_ms(number) or 0)
        yield Step("checkpoints", "delete", files, size, note=f"of generation {number}, retired {retired}")


def _size(folder: Path) -> tuple[int, int]:
    """Return how many files a folder has, and how large they are together."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


def _bronze(home: Home, keep: Keep, wanted: list[Need], now_ms: int, *, dry_run: bool) -> Iterator[Step]:
    table = home.table(MESSAGES.name)
    planned = compaction.plan(table, wanted, keep.messages_ms, now_ms)
    if planned is None:
        return
    first, oldest = planned.held_by, min(wanted, key=lambda need: need.version)
    yield Step(MESSAGES.name, "hold", note=f"{first.who} needs version {first.version} and those after it as they are")
    if oldest.version < first.version:
        yield Step(MESSAGES.name, "hold", note=f"{oldest.who} needs the rows of version {oldest.version} and those after it")
    if planned.newest_ms > now_ms + _AHEAD_MS and keep.messages_ms is not None:
        note = f"{_ahead(planned.newest_ms)}; what landed with that row and after it stays until then"
        yield Step(MESSAGES.name, "hold", note=note)
    if planned.drop:
        yield _drop(home, table, planned, now_ms, dry_run=dry_run)
    for group in planned.merges:
        parts = [part for unit in group for part in unit.parts]
        note = f"versions {group[0].begin} to {group[-1].end - 1}"
        if not dry_run and compaction.put_together(table, group) is None:
            note = _BUSY
        yield Step(MESSAGES.name, "join", len(parts), sum(one.size_bytes for one in parts), sum(one.rows for one in parts), note)


def _drop(home: Home, table: Path, planned: compaction.Plan, now_ms: int, *, dry_run: bool) -> Step:
    parts = [part for unit in planned.drop for part in unit.parts]
    note = _since(f"received before {format_instant(planned.cutoff_ms)}", planned.newest_ms, now_ms)
    rows = compaction.doomed(table, planned)
    if not dry_run:
        promise(home, MESSAGES.name, planned.cutoff_ms)
        if compaction.cut_off(table, planned) is None:
            note, rows = _BUSY, 0
    return Step(MESSAGES.name, "remove", len(parts), sum(part.size_bytes for part in parts), rows, note)


def _ahead(newest_ms: int) -> str:
    return f"the newest is of {format_instant(newest_ms)}, which lies ahead, so ages count back from now"


def _since(note: str, newest_ms: int, now_ms: int) -> str:
    return f"{note}; {_ahead(newest_ms)}" if newest_ms > now_ms + _AHEAD_MS else note


@dataclass(frozen=True, slots=True)
class _Aged:
    """Rows of a table that go when they are old.

    Attributes:
        table: its name.
        column: their age is told by.
        keep_ms: for how long they stay; None for ever.
        promised: what `kept` calls them.
        such: which rows, as SQL says it; empty: all.
        but: of those, given the instant before which they are old, which stay; empty: none.
    """

    table: str
    column: str
    keep_ms: int | None
    promised: str
    such: str = ""
    but: Callable[[Home, int], str] = lambda _home, _cutoff_ms: ""


def _aged(keep: Keep) -> tuple[_Aged, ...]:
    kinds = ", ".join(f"'{kind.value}'" for kind in _OF_MESSAGES)
    return (
        _Aged(QUARANTINE.name, "received_at", keep.quarantine_ms, QUARANTINE.name),
        _Aged(STREAM_HEALTH.name, "began_at", keep.stream_health_ms, STREAM_HEALTH.name),
        _Aged(QUALITY_RESULTS.name, "began_at", keep.quality_ms, QUALITY_RESULTS.name),
        _Aged(QUALITY_FAILURES.name, "began_at", keep.quality_ms, QUALITY_FAILURES.name),
        _Aged(JUDGEMENTS.name, "judged_at", keep.summaries_ms, "summaries", _SUMMARIES, _newest_summaries),
        _Aged(JUDGEMENTS.name, "judged_at", keep.late_ms, "late", f"kind IN ({kinds})", _not_amended),
    )


def _rows(home: Home, keep: Keep, there: list[Path], now_ms: int, *, dry_run: bool) -> Iterator[Step]:
    """Remove old rows of the other tables."""
    for aged in _aged(keep):
        if aged.keep_ms is None or home.table(aged.table) not in there:
            continue
        newest_ms = _newest_ms(home, aged)
        if newest_ms is None:
            continue
        cutoff_ms = (min(newest_ms, now_ms) - aged.keep_ms) // tidying.DAY_MS * tidying.DAY_MS
        old = " AND ".join(one for one in (f"{aged.column} < {tidying.cutoff_text(cutoff_ms)}", aged.such) if one)
        but = aged.but(home, cutoff_ms) if _count(home, aged.table, old) else ""
        gone = f"{old} AND NOT ({but})" if but else old
        doomed = _count(home, aged.table, gone)
        if aged.but is _not_amended and (left := _count(home, aged.table, old) - doomed):
            yield Step(aged.table, "hold", rows=left, note="what came late and fleet amend has not done with stays: run it")
        if not doomed:
            continue
        note = f"{aged.column} before {format_instant(cutoff_ms)}" + (f", {aged.promised}" if aged.such else "")
        note = _since(note, newest_ms, now_ms)
        if not dry_run:
            if aged.but is _not_amended:
                _promise_late(home, gone)
            promise(home, aged.promised, cutoff_ms)
            table = home.table(aged.table)
            counted = removing(open_table(table), doomed) if aged.table == QUARANTINE.name else None
            if tidying.remove_rows(table, gone, counted) is None:
                doomed, note = 0, _BUSY
        yield Step(aged.table, "remove", rows=doomed, note=note)


def _newest_ms(home: Home, aged: _Aged) -> int | None:
    such = f"WHERE {aged.such}" if aged.such else ""
    sql = f"SELECT epoch_ms(max({aged.column})) AS newest FROM {aged.table} {such}"
    return delta.query(home, sql, tables=[aged.table])[0]["newest"]


def _count(home: Home, table: str, such: str) -> int:
    return int(delta.query(home, f"SELECT count(*) AS n FROM {table} WHERE {such}", tables=[table])[0]["n"])


def _not_amended(home: Home, _: int) -> str:
    """Return which old judgements of messages stay: those that amend is still to look at, where it is used at all."""
    reached_ms = delta.landed(home, JUDGEMENTS, DONE)
    return f"{amend.LOOKED_AT} AND received_at > {tidying.cutoff_text(reached_ms)}" if reached_ms else ""


def _promise_late(home: Home, gone: str) -> None:
    """Write down from when on all that came late is listed: other judgements of messages may go without moving that."""
    if oldest_kept_ms(home, CAME_LATE) is None:
        promise(home, CAME_LATE, oldest_kept_ms(home, "late") or 0)
    sql = f"SELECT epoch_ms(max(received_at)) AS newest FROM judgements WHERE {gone} AND {LATE}"
    if (newest_ms := delta.query(home, sql)[0]["newest"]) is not None:
        promise(home, CAME_LATE, newest_ms + 1)


def _newest_summaries(home: Home, cutoff_ms: int) -> str:
    """Return which old summaries stay: each key group's newest, since reports count by it.

    They are said by the current generation, or by one that it is a copy of, and so goes on counting from; where these have said
    none yet, by the newest one that has. What others said may go: their groups say nothing more, and may not even be groups now.
    """
    record, current = load_generations(home.lifecycle), home.generation().number
    spoke = delta.query(home, f"SELECT DISTINCT generation FROM judgements WHERE {_SUMMARIES} ORDER BY 1 DESC NULLS LAST")
    newest: list[int | None] = [one["generation"] for one in spoke]
    copied = record.of_the_same_groups(current)
    if not {*copied} & {*newest}:
        copied = [] if newest[0] is None else record.of_the_same_groups(newest[0])
    of_them = "generation IS NULL" if not copied else f"generation IN ({', '.join(map(str, copied))})"
    found = delta.query(
        home,
        f"""SELECT key_group, epoch_ms(judged_at) AS newest_ms, generation FROM judgements WHERE {_SUMMARIES} AND {of_them}
            QUALIFY 1 = row_number() OVER (PARTITION BY key_group ORDER BY generation DESC, judged_at DESC)
                AND newest_ms < ? ORDER BY key_group""",
        [cutoff_ms],
    )
    stay: list[str] = []
    for one in found:
        generation = "IS NULL" if one["generation"] is None else f"= {one['generation']}"
        since = tidying.cutoff_text(one["newest_ms"])
        stay.append(f"(key_group = {one['key_group']} AND generation {generation} AND judged_at >= {since})")
    return " OR ".join(stay)


def _join(table: Path, *, dry_run: bool) -> Iterator[Step]:
    for small in tidying.small_files(table):
        note = " ".join(f"{column} {value}" for column, _, value in small.partition)
        if not dry_run and not tidying.join(table, small):
            note = _BUSY
        yield Step(table.name, "join", small.files, small.size_bytes, small.rows, note)


def _thin_out(home: Home, keep: Keep, now_ms: int, *, dry_run: bool) -> Iterator[Step]:
    """Delete the files of snapshots that are not kept: every version is a whole, and readable while its files are there."""
    table = home.table(DEVICE_SNAPSHOTS.name)
    kept = tidying.kept_versions(table, keep.device_snapshots_ms, now_ms)
    files = tidying.unneeded(table, keep.replaced_ms, kept)
    if not files:
        return
    yield Step(DEVICE_SNAPSHOTS.name, "delete", *tidying.remove_files(files, dry_run=dry_run), note=f"{len(kept)} snapshots stay")


def _delete(home: Home, table: Path, keep: Keep, wanted: list[Need], now_s: float, *, dry_run: bool) -> Iterator[Step]:
    """Delete files that were replaced, and old versions of the log."""
    snapshots, bronze = table.name == DEVICE_SNAPSHOTS.name, table.name == MESSAGES.name
    if not snapshots:
        files = tidying.unneeded(table, min(keep.replaced_ms, _REPLACED_MS.get(table.name, keep.replaced_ms)))
        if files:
            count, size = tidying.remove_files(files, dry_run=dry_run)
            yield Step(table.name, "delete", count, size, note="files that others replaced, or nobody committed")
    if tidying.write_checkpoint(table, dry_run=dry_run):
        yield Step(table.name, "checkpoint")
    below = min(tidying.kept_versions(table, keep.device_snapshots_ms, int(now_s * 1000))) if snapshots else None
    if table.name == JUDGEMENTS.name:
        below = judged_through(home)
    spared = _StillRead(table, floor(wanted).version) if bronze else _none
    log = tidying.outdated_log(table, keep.replaced_ms, now_s, below, spared)
    if log:
        yield Step(table.name, "delete", *tidying.remove_files(log, dry_run=dry_run), note="old versions of the log")


class _StillRead:
    """Whether a version of bronze is still read from its log: it is in no piece, or a job goes on there."""

    def __init__(self, table: Path, held_from: int) -> None:
        self._held_from = held_from
        self._removed_below, self._spans = compaction.covered(table)

    def __call__(self, version: int) -> bool:
        if version >= self._held_from:
            return True
        return version >= self._removed_below and not any(begin <= version < end for begin, end in self._spans)


def _none(_: int) -> bool:
    return False


def _beside(home: Home, keep: Keep, now_s: float, *, dry_run: bool) -> Iterator[Step]:
    """Delete old logs and pages of backtests, put long logs aside, and remove what a killed Spark left."""
    old = leftovers.old_logs(home, keep.logs_ms, now_s)
    if old:
        yield Step("logs", "delete", *tidying.remove_files(old, dry_run=dry_run))
    of_airflow = leftovers.old_files(leftovers.airflow_logs(home), keep.logs_ms, now_s)
    if of_airflow:
        yield Step("logs", "delete", *tidying.remove_files(of_airflow, dry_run=dry_run), note="of Airflow")
    if not dry_run:
        leftovers.remove_empty(leftovers.airflow_logs(home), now_s)
    yield from _folders("backtests", leftovers.old_backtests(home, keep.logs_ms, now_s), "of Airflow", dry_run=dry_run)
    for path in leftovers.long_logs(home):
        size = path.stat().st_size
        if not dry_run:
            leftovers.put_aside(path)
        yield Step("logs", "aside", 1, size, note=f"{path.name} begins anew, the rest is in {path.name}.1")
    yield from _folders("spark", leftovers.spark_remains(home, now_s), "of a run that was killed", dry_run=dry_run)


def _folders(what: str, folders: list[Path], note: str, *, dry_run: bool) -> Iterator[Step]:
    """Remove folders with all that is in them."""
    if not folders:
        return
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    count, size = tidying.remove_files(files, dry_run=dry_run)
    if not dry_run:
        leftovers.remove_folders(folders)
    yield Step(what, "delete", count, size, note=note)
