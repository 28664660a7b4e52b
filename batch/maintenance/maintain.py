"""Maintenance of tables and logs while the jobs run, within reader pins.

Rule 1: the retention floor is raised (`retention_floor.raise_floor`) before the first row is removed.
Rule 2: every step can be killed and repeated; the next run removes leftovers.
Rule 3: a step that conflicts with another writer is postponed to the next run: the jobs have
priority.
Rule 4: a full disk stops the steps that write, but not those that delete.
Rule 5: the age of rows is relative to the newest row, or to now if a fast clock stamped that row in
the future.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from batch.maintenance.plan import AHEAD_MS, BUSY, Keep, Step, ahead, since, unless_disk_full
from batch.maintenance.retention import remove_aged
from batch.state.prune import prunable, prune
from fleetpulse.core.catalog import TABLES
from fleetpulse.core.tables import DEVICE_CURRENT, DEVICE_SNAPSHOTS, JUDGEMENTS, MESSAGES, MODE_HOURLY_SITE
from fleetpulse.core.times import HOUR_MS, format_instant
from fleetpulse.io.checkpoints.generations import checkpoint_of, left_over, load_generations
from fleetpulse.io.delta.compacted import FOLDER
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.exclusive import exclusive_maintenance, pause_state_changes
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import raise_floor
from fleetpulse.io.maintenance import compaction, disk_cleanup, vacuum
from fleetpulse.io.maintenance.readers import ReaderPin, newest_job_commit, oldest_live_pin, reader_pins
from fleetpulse.io.maintenance.sorted_join import join_sorted
from fleetpulse.io.spark import scratch
from fleetpulse.io.tables.tables import files_of
from fleetpulse.reports.frontiers import judged_frontier_ms
from fleetpulse.reports.present.kept import keep_present

_RETIRED_KEPT: Final = 1  # retired generations to keep, regardless of age
_COMMITTED_MS: Final = 600_000  # least age of an abandoned commit file; landing writes one in milliseconds
_TEMPORARY_COMMIT: Final = re.compile(r"\.\d{20}\.json\.[0-9a-f]{32}\.tmp")
_BY_DEVICE: Final = ("transition", "retract", "add")  # partitions of `judgements` in which reports search for one device
_COMMITS: Final = ("remove", "join", "keep")  # steps that commit to their table
_REPLACED_MS: Final = {JUDGEMENTS.name: HOUR_MS}  # its readers open the newest version each time


def maintain(
    home: Home, keep: Keep, *, dry_run: bool, now_s: float | None = None, report: Callable[[str], None] = lambda _: None
) -> Iterator[Step]:
    """Run all maintenance steps that are needed; yield each one after it is done.

    Args:
        home: the home; its jobs may run.
        keep: retention times.
        dry_run: whether to report the steps only and change nothing.
        now_s: present time, in seconds as in file times; None takes the system clock.
        report: callback for lines about waiting and about pruned generations.

    Raises:
        FleetError: another maintenance runs for too long, see `exclusive.exclusive_maintenance`, or
            a reader pin cannot be read.
    """
    with exclusive_maintenance(home, report):
        now_s = time.time() if now_s is None else now_s
        now_ms = int(now_s * 1000)
        existing = [path for path in sorted((home.path / "tables").glob("*")) if holds_table(path)]
        if not dry_run:
            _remove_aside(existing, now_s)
        planned = Counter[str]()  # commits that a dry run leaves out, by table
        for step in _until_deletion(home, keep, existing, now_ms, report, dry_run=dry_run):
            if dry_run and step.did in _COMMITS:
                planned[step.table] += 1
            yield step
        pins = reader_pins(home)
        for path in existing:
            yield from _delete(home, path, keep, pins, now_s, planned[path.name], dry_run=dry_run)
        yield from _clean_other_files(home, keep, now_s, dry_run=dry_run)


def _until_deletion(
    home: Home, keep: Keep, existing: list[Path], now_ms: int, report: Callable[[str], None], *, dry_run: bool
) -> Iterator[Step]:
    """Run the steps before the deletion of replaced files."""
    yield from unless_disk_full("checkpoints", _generations(home, keep, now_ms, report, dry_run=dry_run))
    if home.table(DEVICE_SNAPSHOTS.name) in existing:
        yield from _delete_snapshots(home, keep, now_ms, dry_run=dry_run)
    if home.table(MESSAGES.name) in existing:
        yield from unless_disk_full(MESSAGES.name, _bronze(home, keep, reader_pins(home), now_ms, dry_run=dry_run))
    yield from remove_aged(home, keep, existing, now_ms, dry_run=dry_run)
    known = {table.name for table in TABLES} - {MESSAGES.name, DEVICE_SNAPSHOTS.name}
    for path in existing:
        if path.name in known:
            yield from unless_disk_full(path.name, _join(path, dry_run=dry_run))
    # Before files are deleted: the kept facts name the newest versions that they include.
    yield from unless_disk_full(DEVICE_CURRENT.name, _keep_present(home, dry_run=dry_run))


def _remove_aside(tables: list[Path], now_s: float) -> None:
    """Remove temporary files of a killed maintenance, and abandoned commit files.

    No other maintenance runs at this time.
    """
    for path in tables:
        abandoned = disk_cleanup.old_files(path / "_delta_log", _COMMITTED_MS, now_s)
        for leftover in [
            *(path / FOLDER).glob(".*.tmp"),
            *path.glob(".part-*.tmp"),
            *path.glob("*/.part-*.tmp"),
            *(each for each in abandoned if _TEMPORARY_COMMIT.fullmatch(each.name)),
        ]:
            leftover.unlink(missing_ok=True)
        scratch.remove_folders([*path.glob("*/.part-*.sort")])


def _generations(home: Home, keep: Keep, now_ms: int, report: Callable[[str], None], *, dry_run: bool) -> Iterator[Step]:
    """Prune old retired generations, each of which pins a version of bronze.

    The job may run meanwhile.
    """
    if keep.generations_ms is None:
        return
    before_ms = now_ms - keep.generations_ms
    record = load_generations(home.lifecycle)
    if not prunable(record, _RETIRED_KEPT, before_ms) and not left_over(home.lifecycle, record):
        return
    with pause_state_changes(home, "fleet maintain") as other:
        if other:
            yield Step("checkpoints", "hold", note=f"old generations stay until the next maintenance: {other} is running")
            return
        record = load_generations(home.lifecycle)
        to_prune = [
            (number, *_size(checkpoint_of(home.lifecycle, number))) for number in prunable(record, _RETIRED_KEPT, before_ms)
        ]
        prune(home, _RETIRED_KEPT, report, dry=dry_run, before_ms=before_ms)
    for number, files, size in to_prune:
        retired = format_instant(record.retired_at_ms(number) or 0)
        yield Step("checkpoints", "delete", files, size, note=f"of generation {number}, retired {retired}")


def _size(folder: Path) -> tuple[int, int]:
    """Return the number of files in a folder and their total size in bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


def _bronze(home: Home, keep: Keep, pins: list[ReaderPin], now_ms: int, *, dry_run: bool) -> Iterator[Step]:
    table = home.table(MESSAGES.name)
    planned = compaction.plan(table, pins, keep.messages_ms, now_ms)
    if planned is None:
        return
    first, oldest = planned.held_by, min(pins, key=lambda need: need.version)
    yield Step(MESSAGES.name, "hold", note=f"{first.reader} needs version {first.version} and later ones unchanged")
    if oldest.version < first.version:
        yield Step(MESSAGES.name, "hold", note=f"{oldest.reader} needs the rows of version {oldest.version} and later ones")
    if planned.newest_ms > now_ms + AHEAD_MS and keep.messages_ms is not None:
        note = f"{ahead(planned.newest_ms)}; rows landed with that row or after it stay until then"
        yield Step(MESSAGES.name, "hold", note=note)
    if planned.drop:
        yield _drop(home, table, planned, now_ms, dry_run=dry_run)
    for group in planned.merges:
        parts = [part for unit in group for part in unit.parts]
        note = f"versions {group[0].begin} to {group[-1].end - 1}"
        if not dry_run and compaction.compact(table, group) is None:
            note = BUSY
        yield Step(MESSAGES.name, "join", len(parts), sum(one.size_bytes for one in parts), sum(one.rows for one in parts), note)


def _drop(home: Home, table: Path, planned: compaction.CompactionPlan, now_ms: int, *, dry_run: bool) -> Step:
    parts = [part for unit in planned.drop for part in unit.parts]
    note = since(f"received before {format_instant(planned.cutoff_ms)}", planned.newest_ms, now_ms)
    rows = compaction.count_expired(table, planned)
    if not dry_run:
        raise_floor(home, MESSAGES.name, planned.cutoff_ms)
        if compaction.drop_expired(table, planned) is None:
            note, rows = BUSY, 0
    return Step(MESSAGES.name, "remove", len(parts), sum(part.size_bytes for part in parts), rows, note)


def _join(table: Path, *, dry_run: bool) -> Iterator[Step]:
    for small in vacuum.small_files(table):
        note = " ".join(f"{column} {value}" for column, _, value in small.partition)
        if not dry_run and not _joined(table, small):
            note = BUSY
        yield Step(table.name, "join", small.files, small.size_bytes, small.rows, note)


def _joined(table: Path, small: vacuum.SmallFiles) -> bool:
    """Join small files; return False if another writer changed the table."""
    if table.name == JUDGEMENTS.name and any(value in _BY_DEVICE for _, _, value in small.partition):
        return join_sorted(table, JUDGEMENTS, small, ("device_id", "event_time"))
    return vacuum.compact_small_files(table, small)


def _keep_present(home: Home, *, dry_run: bool) -> Iterator[Step]:
    """Write the facts of the devices at present, and the modes by hour, to which reports add newer rows."""
    devices = keep_present(home, judged_frontier_ms(home), dry_run=dry_run)
    if devices is not None:
        yield Step(DEVICE_CURRENT.name, "keep", rows=devices, note="one row for each device at present")
        differences = sum(file.rows or 0 for file in files_of(home, MODE_HOURLY_SITE, "hour"))
        yield Step(MODE_HOURLY_SITE.name, "keep", rows=differences, note="differences by hour, site, class and mode")


def _delete_snapshots(home: Home, keep: Keep, now_ms: int, *, dry_run: bool) -> Iterator[Step]:
    """Delete the files of snapshots beyond retention; each version of the table is a full snapshot."""
    table = home.table(DEVICE_SNAPSHOTS.name)
    retained = vacuum.kept_versions(table, keep.device_snapshots_ms, now_ms)
    files = vacuum.unneeded_files(table, keep.replaced_ms, retained)
    if not files:
        return
    yield Step(
        DEVICE_SNAPSHOTS.name, "delete", *vacuum.remove_files(files, dry_run=dry_run), note=f"{len(retained)} snapshots stay"
    )


def _delete(
    home: Home, table: Path, keep: Keep, pins: list[ReaderPin], now_s: float, planned: int, *, dry_run: bool
) -> Iterator[Step]:
    """Delete replaced files, and old versions of the Delta log."""
    snapshots, bronze = table.name == DEVICE_SNAPSHOTS.name, table.name == MESSAGES.name
    if not snapshots:
        files = vacuum.unneeded_files(table, min(keep.replaced_ms, _REPLACED_MS.get(table.name, keep.replaced_ms)))
        if files:
            count, size = vacuum.remove_files(files, dry_run=dry_run)
            yield Step(table.name, "delete", count, size, note="files that were replaced, or never committed")
    if vacuum.write_checkpoint(table, planned, dry_run=dry_run):
        yield Step(table.name, "checkpoint")
    below = min(vacuum.kept_versions(table, keep.device_snapshots_ms, int(now_s * 1000))) if snapshots else None
    if table.name == JUDGEMENTS.name:
        below = newest_job_commit(home)
    is_still_read = _StillRead(table, oldest_live_pin(pins).version) if bronze else _keep_none
    log = vacuum.outdated_log(table, keep.replaced_ms, now_s, below, is_still_read)
    if log:
        yield Step(table.name, "delete", *vacuum.remove_files(log, dry_run=dry_run), note="old versions of the log")


class _StillRead:
    """Predicate: whether a version of bronze is still read from its log entry.

    It is if a job continues at this version or an earlier one, or if no compacted piece contains it.
    """

    def __init__(self, table: Path, held_from: int) -> None:
        self._held_from = held_from
        self._removed_below, self._spans = compaction.covered(table)

    def __call__(self, version: int) -> bool:
        if version >= self._held_from:
            return True
        return version >= self._removed_below and not any(start <= version < end for start, end in self._spans)


def _keep_none(_: int) -> bool:
    return False


def _clean_other_files(home: Home, keep: Keep, now_s: float, *, dry_run: bool) -> Iterator[Step]:
    """Delete old logs, backtest pages, approvals and remains of killed runs; rotate long logs."""
    old = disk_cleanup.old_logs(home, keep.logs_ms, now_s)
    if old:
        yield Step("logs", "delete", *vacuum.remove_files(old, dry_run=dry_run))
    of_airflow = disk_cleanup.old_files(disk_cleanup.airflow_logs(home), keep.logs_ms, now_s)
    if of_airflow:
        yield Step("logs", "delete", *vacuum.remove_files(of_airflow, dry_run=dry_run), note="of Airflow")
    approvals = disk_cleanup.old_approvals(home, now_s)
    if approvals:
        yield Step("approvals", "delete", *vacuum.remove_files(approvals, dry_run=dry_run), note="of Airflow")
    if not dry_run:
        disk_cleanup.remove_empty(disk_cleanup.airflow_logs(home), now_s)
    yield from _folders("backtests", disk_cleanup.old_backtests(home, keep.logs_ms, now_s), "of Airflow", dry_run=dry_run)
    yield from _folders("spark", disk_cleanup.spark_remains(home, now_s), "of a run that was killed", dry_run=dry_run)
    for path in disk_cleanup.long_logs(home):
        yield from unless_disk_full("logs", _put_aside(path, dry_run=dry_run))


def _put_aside(log: Path, *, dry_run: bool) -> Iterator[Step]:
    size = log.stat().st_size
    if not dry_run:
        disk_cleanup.rotate_log(log)
    yield Step("logs", "aside", 1, size, note=f"{log.name} is rotated; older lines are in {log.name}.1")


def _folders(table: str, folders: list[Path], note: str, *, dry_run: bool) -> Iterator[Step]:
    """Remove folders with their contents."""
    if not folders:
        return
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    count, size = vacuum.remove_files(files, dry_run=dry_run)
    if not dry_run:
        scratch.remove_folders(folders)
    yield Step(table, "delete", count, size, note=note)
