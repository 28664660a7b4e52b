"""Metrics of each batch of the lifecycle job, written to table ``stream_health``.

Rule 1: this module must not delay or fail the stream. One thread reads the query's recent progress
every few seconds, and logs a warning if rows cannot be written. A `StreamingQueryListener`, which
the JVM calls for each batch, costs ten times as much.
Rule 2: each row is written once: the commit that appends it records the run's newest batch.
"""

import json
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow.parquet as pq
import structlog
from deltalake import DeltaTable
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.monitoring.health import BatchContext, Progress, to_row
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES, STREAM_HEALTH
from fleetpulse.core.times import DAY_MS, format_instant
from fleetpulse.io.checkpoints.generations import load_generations
from fleetpulse.io.delta.appender import Appender
from fleetpulse.io.delta.log import DeltaLog, actions_of, appended_files, holds_table, row_count
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables

_LOG: Final = structlog.get_logger("stream_health")
KEPT_MS: Final = 7 * DAY_MS
_MODES: Final = frozenset(mode.value for mode in Mode)
_QUEUED: Final = 1_000  # rows kept in memory while the table cannot be written
_EVERY_S: Final = 5.0  # interval between appends: one commit per batch would be five a second
_COMMITS: Final = 200  # commits between two runs of `tidy`


def _progress_since(query: StreamingQuery, batch_id: int) -> list[Progress]:
    """Return the progress of the batches after ``batch_id``, as far as the query still has it.

    The JVM takes milliseconds to serialize the progress of one batch to JSON, so that of earlier
    batches is read only if several are new.
    """
    newest = query.lastProgress
    if newest is None or newest["batchId"] <= batch_id:
        return []
    found = [newest] if newest["batchId"] == batch_id + 1 else query.recentProgress
    return [Progress(json.loads(one.json)) for one in found if one["batchId"] > batch_id]


class Commits:
    """Reader of commits to ``judgements``: row counts by kind, and summaries.

    Args:
        home: home that holds the table.
        generation: generation of the job whose summaries are read.
    """

    def __init__(self, home: Home, generation: int) -> None:
        self.home, self.generation = home, generation
        self.path = home.table(JUDGEMENTS.name)
        self.next = tables.version(self.path) + 1 if holds_table(self.path) else 0
        self._of_group: dict[int, Mapping[str, int]] | None = None

    def through(self, query_id: str, batch_id: int) -> dict[str, int] | None:
        """Read the log through the commit of a batch.

        Returns:
            Number of rows that the batch wrote, by kind; None if its commit is not in the log.
        """
        if self._of_group is None:
            self._of_group = self._newest_summaries()
        while self._commit().exists() or self._skip_removed():
            actions = actions_of(self._commit())
            batches = [one["txn"]["version"] for one in actions if one.get("txn", {}).get("appId") == query_id]
            if batches and batches[0] > batch_id:
                return None
            self.next += 1
            if batches:
                added = appended_files(actions)
                self._take_summaries(added)
                if batches[0] == batch_id:
                    return _by_kind(added)
        return None

    def _commit(self) -> Path:
        return self.path / "_delta_log" / f"{self.next:020d}.json"

    def _skip_removed(self) -> bool:
        """Skip to the newest version if the next one was removed from the log.

        Returns:
            Whether the log has a version to read.
        """
        newest = DeltaLog(self.path).latest()
        if newest >= self.next and not self._commit().exists():
            self.next, self._of_group = newest, self._newest_summaries()
        return newest >= self.next

    def devices(self) -> dict[str, int] | None:
        """Return the number of devices by mode, from the newest summary of each key group.

        Returns:
            Number of devices by mode; None before the first summary.
        """
        if not self._of_group:
            return None
        modes: dict[str, int] = {}
        for counts in self._of_group.values():
            for mode, count in counts.items():
                if mode in _MODES:  # a summary also counts other facts than modes
                    modes[mode] = modes.get(mode, 0) + count
        return modes

    def _newest_summaries(self) -> dict[int, Mapping[str, int]]:
        found = tables.query(
            self.home,
            """SELECT key_group, arg_max(counts, (generation, judged_at, event_time)) AS counts FROM judgements
               WHERE kind = ? AND list_contains(?, generation) GROUP BY key_group""",
            [JudgementKind.SUMMARY.value, load_generations(self.home.lifecycle).repartitioned_from(self.generation)],
        )
        return {row["key_group"]: json.loads(row["counts"]) for row in found}

    def _take_summaries(self, added: Iterable[Mapping[str, Any]]) -> None:
        assert self._of_group is not None
        for file in added:
            if file["partitionValues"].get("kind") == JudgementKind.SUMMARY.value:
                rows = pq.ParquetFile(self.path / unquote(file["path"])).read(columns=["key_group", "counts"])
                for row in rows.to_pylist():  # in the order in which the group emitted them
                    self._of_group[row["key_group"]] = json.loads(row["counts"])


def _by_kind(added: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    kinds: dict[str, int] = {}
    for file in added:
        kind = file["partitionValues"]["kind"]
        kinds[kind] = kinds.get(kind, 0) + row_count(file)
    return kinds


def rows_between(table: Path, versions: tuple[int, int] | None) -> int | None:
    """Return the number of rows that versions of a table appended.

    Args:
        table: folder of the table.
        versions: first version, and the version after the last; None if unknown.

    Returns:
        Number of rows; None if ``versions`` is None or a version is no longer in the log.
    """
    if versions is None:
        return None
    log = DeltaLog(table)
    try:
        return sum(rows for version in range(*versions) for _, rows in log.appended(version))
    except FleetError:
        return None


class StreamHealth:
    """Writer of ``stream_health`` rows for one run of a query.

    Create it before the query starts, call `follow` after the start, and `stop` after the query
    ends.

    Args:
        home: home that holds the table.
        generation: generation of the job.
        kept_ms: retention of rows, milliseconds; None keeps all rows.
    """

    def __init__(self, home: Home, generation: int, kept_ms: int | None = KEPT_MS) -> None:
        self.home, self.generation, self._kept_ms = home, generation, kept_ms
        self._commits = Commits(home, generation)
        self._query: StreamingQuery | None = None
        self._appender: Appender | None = None
        self._landed = 0
        self._rows: list[dict[str, Any]] = []
        self._newest_received_ms: int | None = None
        self._last_batch = -1
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream-health", daemon=True)

    def follow(self, query: StreamingQuery) -> None:
        """Start the thread for a query that has just started, including its first batches."""
        self._run_id, self._query = str(query.runId), query
        self._thread.start()

    def stop(self, limit_s: float = 5.0) -> None:
        """Write the remaining rows within a time limit; no effect before `follow`."""
        self._closing.set()
        if self._query is None:
            return
        self._thread.join(limit_s)
        if self._thread.is_alive():
            _LOG.warning("stream_health is incomplete: the last rows were not written in time", limit_s=limit_s)

    def _run(self) -> None:
        """Append new rows every few seconds, and a last time after `stop` was called."""
        version = -1
        while True:
            closing = self._closing.wait(_EVERY_S)
            try:
                self._take()
            except Exception as error:  # noqa: BLE001 - the JVM may have ended, which loses metrics only
                _LOG.warning("the newest batches are missing in stream_health: progress cannot be read", reason=str(error))
            try:
                if self._rows:
                    self._append()
                    version = self._tidy(version)
            except Exception as error:  # noqa: BLE001 - metrics must not end the stream; the next append retries the rows
                _LOG.warning("stream_health cannot be written; the next append retries", rows=len(self._rows), reason=str(error))
                self._appender = None
                del self._rows[:-_QUEUED]
            if closing:
                return

    def _take(self) -> None:
        assert self._query is not None, "`follow` sets the query before it starts the thread"
        for progress in _progress_since(self._query, self._last_batch):
            if 0 <= self._last_batch < progress.batch_id - 1:
                missed = progress.batch_id - self._last_batch - 1
                _LOG.warning("batches are missing in stream_health: the query no longer has their progress", batches=missed)
            self._last_batch = progress.batch_id
            try:
                self._rows.append(to_row(progress, self._context(progress)))
            except Exception as error:  # noqa: BLE001 - one unreadable batch must not block the others
                _LOG.warning(
                    "a batch is missing in stream_health: its metrics cannot be read", batch=progress.batch_id, reason=repr(error)
                )
            self._newest_received_ms = progress.newest_received_ms or self._newest_received_ms

    def _context(self, progress: Progress) -> BatchContext:
        judgements = self._commits.through(str(progress.content["id"]), progress.batch_id)
        return BatchContext(
            self.generation,
            rows_between(self.home.table(MESSAGES.name), progress.versions),
            self._newest_received_ms,
            judgements,
            self._commits.devices(),
        )

    def _append(self) -> None:
        if self._appender is None:
            tables.create(self.home, STREAM_HEALTH)
            self._landed = tables.landed(self.home, STREAM_HEALTH, self._run_id)  # batch id + 1: the first batch is 0
            self._appender = Appender(self.home.table(STREAM_HEALTH.name))
        fresh = [row for row in self._rows if row["batch_id"] >= self._landed]
        if fresh:
            numbers = {self._run_id: fresh[-1]["batch_id"] + 1}
            tables.append_of(self.home, STREAM_HEALTH, tables.to_table(STREAM_HEALTH, fresh), numbers, self._appender)
            self._landed = numbers[self._run_id]
        self._rows.clear()

    def _tidy(self, before: int) -> int:
        """Run `tidy` once every `_COMMITS` versions; return the newest version."""
        path = self.home.table(STREAM_HEALTH.name)
        log = DeltaLog(path)
        version = log.latest()
        if before >= 0 and version // _COMMITS > before // _COMMITS:
            self._appender = None  # its cached version of the table is outdated
            tidy(path, None if self._kept_ms is None else wall_clock_ms() - self._kept_ms)
            version = log.latest()
        return version


def tidy(path: Path, before_ms: int | None) -> None:
    """Delete old rows, compact small files, vacuum, and clean up the log of a table.

    Args:
        path: folder of the table.
        before_ms: rows of batches that started before it are deleted, epoch milliseconds; None
            deletes no rows.
    """
    table = DeltaTable(str(path))
    if before_ms is not None:
        table.delete(f"began_at < '{format_instant(before_ms)}'")
    table.optimize.compact()
    table.vacuum(retention_hours=1, dry_run=False, enforce_retention_duration=False)  # queries finish within seconds
    table.create_checkpoint()
    table.cleanup_metadata()
