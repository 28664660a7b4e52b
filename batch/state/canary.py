"""Canary: run a new generation beside the current one on live input, and compare.

Rule 1: the running generation is not affected, except for one stop at the end, while the two are
compared.
Rule 2: the new generation's judgements go to a scratch table. Judgements that were pending in its
initial state count as emitted by it: the running generation emits them later.
Rule 3: the scratch table has a row for each judgement. A row of the running generation for several
messages counts as that many judgements of its kind, device, kind of message and minute.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pyarrow as pa

from batch.common.progress import Paced
from batch.state.generation import (
    GenerationSpec,
    activate,
    await_termination,
    build,
    discarded_on_failure,
    drain,
    judged_version,
    state_of,
)
from batch.state.operations import StateOperation
from batch.state.transfer import compare, pack_by_key_group, with_checksum
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.core.times import MINUTE_MS
from fleetpulse.io.checkpoints.checkpoint import newest_begun, position_after, query_id
from fleetpulse.io.checkpoints.generations import Generation, checkpoint_of
from fleetpulse.io.delta.log import actions_of, appended_files, row_count
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.tables.tables import connect, fetch, open_files, spill_to
from fleetpulse.reports.operations.agreement import AS_COMPARED

_SHOWN: Final = 5
_POLL_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class CanaryPlan:
    """Parameters of a canary.

    Attributes:
        key_groups: number of key groups of the new generation.
        form: stored form of the new generation.
        for_s: time for which both generations run side by side, seconds.
        stopped: context manager that stops the running job, and holds the lock of the state, until
            it exits.
    """

    key_groups: int
    form: int
    for_s: float
    stopped: Callable[[], AbstractContextManager[None]]


def canary(work: StateOperation, verb: str, trial: CanaryPlan) -> Generation:
    """Run a new generation beside the current one; activate it if both judge alike.

    Raises:
        FleetError: judgements or states differ; the new generation is discarded.
    """
    spark, home, report = work.spark, work.home, work.report
    current, began = home.generation(), position_after(home.checkpoint)
    plan = GenerationSpec(
        f"{verb} --canary",
        {"generation": current.number, "batch": began.batch},
        state_of(spark, home, current, began),
        began.version,
        trial.key_groups,
        began.partitions,
        trial.form,
        has_other_devices=True,
    )
    with pack_by_key_group(
        plan.rows, plan.key_groups
    ) as packed:  # read first: the running job removes a batch from its checkpoint twenty batches later
        new = build(spark, home, plan, packed, began, report)
    scratch = home.lifecycle / f"scratch-{new.number:04d}"
    shutil.rmtree(scratch, ignore_errors=True)
    with discarded_on_failure(home, new), ExitStack() as ending:
        ending.callback(shutil.rmtree, scratch, ignore_errors=True)
        report(
            f"both generations judge the live input for {trial.for_s:.0f} s; generation {new.number} writes to a scratch table"
        )
        _side_by_side(work, new, scratch, trial.for_s)
        with trial.stopped():
            at = drain(spark, home, report, newest_begun(checkpoint_of(home.lifecycle, new.number)))
            query = start(spark, home, None, generation=new, through=at.version, judgements_table=scratch)
            await_termination(query, lambda version: report(f"canary: bronze is judged up to version {version} of {at.version}"))
            report("comparing the judgements of both")
            was = _files(home.table(JUDGEMENTS.name), query_id(home.checkpoint), began.batch, at.batch)
            now = _files(scratch, query_id(checkpoint_of(home.lifecycle, new.number)))
            try:
                judged = _compare_judgements(scratch / "spilled", was, now, packed.account.pending)
            except FleetError as error:
                raise FleetError(
                    f"generation {new.number} judged differently from generation {current.number}, and is discarded: "
                    f"{error}; nothing has changed",
                    code="canary-differs",
                ) from error
            report("comparing all devices and pending rows")
            compare(with_checksum(state_of(spark, home, current, at)), with_checksum(state_of(spark, home, new)), new)
            report(f"{judged:,} judgements, all equal")
            shutil.rmtree(scratch, ignore_errors=True)  # before the switch: a kill right after it leaves nothing to clean up
            activate(home, new, at, report)
    return new


def _side_by_side(work: StateOperation, new: Generation, scratch: Path, for_s: float) -> None:
    query = start(work.spark, work.home, generation=new, judgements_table=scratch)
    began, progress, counter = time.monotonic(), Paced(work.report), RowCounter(scratch)

    def watched() -> str:
        elapsed_s, judged = time.monotonic() - began, position_after(work.home.checkpoint).version
        reached = judged_version(query)
        position = "none of bronze yet" if reached is None else f"bronze up to version {reached}"
        return (
            f"canary: {elapsed_s:.0f} s of {for_s:.0f} s; generation {new.number} has judged {position}, the running one up to "
            f"{judged}; {counter.count():,} judgements in the scratch table"
        )

    try:
        while time.monotonic() < began + for_s:
            if not query.isActive:
                raise FleetError(
                    f"generation {new.number} stopped by itself: {str(query.exception()).splitlines()[0][:500]}",
                    code="canary-job-ended",
                )
            progress(watched)
            time.sleep(_POLL_S)
    finally:
        query.stop()


class RowCounter:
    """Counter of the rows that a query writes to a Delta table; reads each entry of the log once.

    Args:
        table: folder of the table, which may not exist yet.
    """

    def __init__(self, table: Path) -> None:
        self._log, self._next, self._count = table / "_delta_log", 0, 0

    def count(self) -> int:
        """Return the number of rows written so far."""
        while (entry := self._log / f"{self._next:020}.json").exists():
            try:
                self._count += sum(map(row_count, appended_files(actions_of(entry))))
            except ValueError:
                break  # an incomplete entry; the count is for display only
            self._next += 1
        return self._count


def _compare_judgements(scratch: Path, was: Iterable[Path], now: Iterable[Path], pending: Iterable[str]) -> int:
    """Compare the judgements of two generations, except summaries, in bounded memory.

    Args:
        scratch: folder for spilled data.
        was: files of the running generation's judgements.
        now: files of the new generation's judgements.
        pending: judgements pending in the new generation's initial state, as JSON; they count as
            emitted by it.

    Returns:
        Number of judgements.

    Raises:
        FleetError: the judgements differ; the text has the numbers and some examples.
    """
    with connect() as connection:
        spill_to(connection, scratch)
        for name, files in (("was", was), ("now", now)):
            open_files(connection, name, JUDGEMENTS, list(files))
        form = connection.sql(f"SELECT {AS_COMPARED} FROM was LIMIT 0").to_arrow_table().schema
        connection.register("pending", pa.Table.from_pylist([json.loads(content) for content in pending], form))
        select = f"SELECT {AS_COMPARED} FROM {{}} WHERE kind <> '{JudgementKind.SUMMARY}' AND messages IS NULL"
        connection.execute(
            "CREATE TABLE differ AS SELECT * EXCLUDE side, sum(side) AS times "
            f"FROM (SELECT *, 1 AS side FROM ({select.format('was')}) UNION ALL SELECT *, -1 FROM ({select.format('now')}) "
            "UNION ALL SELECT *, -1 FROM pending) GROUP BY ALL HAVING sum(side) <> 0"
        )
        connection.execute(
            f"""CREATE TABLE groups AS SELECT kind, device_id, greatest(extra - coalesce(n, 0), 0) AS extra,
                coalesce(missing, 0) + greatest(n - coalesce(extra, 0), 0) AS missing
            FROM (SELECT kind, device_id, message_kind, received_at_ms // {MINUTE_MS} AS minute,
                sum(greatest(times, 0)) AS missing, sum(greatest(-times, 0)) AS extra FROM differ GROUP BY ALL) AS differing
            FULL JOIN (SELECT kind, device_id, message_kind, epoch_ms(received_at) // {MINUTE_MS} AS minute, sum(messages) AS n
                FROM was WHERE messages IS NOT NULL GROUP BY ALL) AS summed USING (kind, device_id, message_kind, minute)"""
        )
        [counts] = fetch(
            connection,
            "SELECT (SELECT coalesce(sum(coalesce(messages, 1)), 0)::BIGINT FROM was WHERE kind <> ?) AS judged, "
            "coalesce(sum(missing), 0)::BIGINT AS missing, coalesce(sum(extra), 0)::BIGINT AS extra FROM groups",
            [JudgementKind.SUMMARY],
        )
        if counts["missing"] or counts["extra"]:
            differing = "FROM groups WHERE missing > 0 OR extra > 0"
            shown = fetch(connection, f"SELECT kind, device_id {differing} ORDER BY ALL LIMIT {_SHOWN}")
            raise FleetError(
                f"{counts['missing']:,} judgements are missing, {counts['extra']:,} are additional: "
                + ", ".join(f"{one['kind']} of {one['device_id']}" for one in shown),
                code="canary-differs",
            )
        return int(counts["judged"])


def _files(table: Path, query: str | None, after: int = -1, through: int | None = None) -> Iterator[Path]:
    """Yield the files that a query has written to a table.

    Args:
        table: folder of the table.
        query: id of the query.
        after: batch after which to start.
        through: last batch; None takes all.
    """
    for commit in sorted((table / "_delta_log").glob("*.json")):
        if not commit.stem.isdecimal():
            continue
        actions = actions_of(commit)
        batches = [one["txn"]["version"] for one in actions if "txn" in one and one["txn"]["appId"] == query]
        if batches and batches[0] > after and (through is None or batches[0] <= through):
            yield from (table / unquote(one["path"]) for one in appended_files(actions))
