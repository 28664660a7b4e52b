"""Recover from a snapshot if the checkpoint logs are lost.

A verdict is a function of the rows received. All rows since the snapshot are therefore judged
again, into a scratch table. Judgements that the table `judgements` lacks go to the outbox of the
new generation, which is flushed after the switch.

Rule 1: refuse if a judgement emitted since the snapshot does not follow from the snapshot: the
emitting job had another state.
Rule 2: refuse if maintenance may have removed judgements emitted since the snapshot.
Rule 3: a row for several messages, emitted since the snapshot, counts as that many judgements: the
first of its kind, device, kind of message and minute that have no row of their own.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import SparkSession

from batch.state.generation import GenerationSpec, ReportProgress, build, discarded_on_failure
from batch.state.transfer import pack_by_key_group
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import AMENDMENTS, COMPARED, JudgementKind
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES, literals
from fleetpulse.core.times import DAY_MS, MINUTE_MS, format_instant
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition, committed_batches, is_settled, position_after, query_id
from fleetpulse.io.checkpoints.generations import (
    Generation,
    checkpoint_of,
    load_generations,
    save_generations,
    sync_checkpoint,
)
from fleetpulse.io.delta.corruption import open_table
from fleetpulse.io.delta.log import DeltaLog, holds_table, is_committed
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms
from fleetpulse.io.system.fsync import replace_durably
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.outbox import flush_outbox, outbox_path
from fleetpulse.io.tables.snapshots import SnapshotInfo, files_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_SHOWN: Final = 5
_AT_ONCE: Final = 100_000  # judgements in one commit
_LONGEST_DELAY_MS: Final = DAY_MS  # from a batch to its snapshot while the job runs
_DURATIONS: Final = ("runtime_ms", "late_by_ms")
_SAME: Final = ", ".join(f'"{name if name in _DURATIONS else name.removesuffix("_ms")}"' for name in COMPARED)
_GROUP: Final = "kind, device_id, message_kind, minute"  # equal in a row for several messages and in its judgements
_OF_THE_JOB: Final = f"kind NOT IN ({literals((JudgementKind.SUMMARY, *AMENDMENTS))})"


def where_it_stopped(home: Home) -> tuple[CheckpointPosition | None, str]:
    """Return the stop position of the current generation, from its checkpoint logs.

    Returns:
        The position, and an empty text; None, and the reason, if the logs do not show it.
    """
    number, checkpoint = home.generation().number, home.checkpoint
    try:
        if not committed_batches(checkpoint):
            return None, "its checkpoint has no committed batch"
        at = position_after(checkpoint)
        if not is_settled(checkpoint):
            return None, f"generation {number} was stopped in the middle of a batch"
        query = query_id(checkpoint)
    except FleetError as error:
        return None, str(error).partition(";")[0]
    table = home.table(JUDGEMENTS.name)
    emitted = open_table(table).transaction_version(query) if query and holds_table(table) else None
    if query is None or (emitted is not None and emitted > at.batch):
        return None, f"its last batches are lost: the checkpoint has batches up to {at.batch}, judgements up to {emitted}"
    return at, ""


def require_judgements_since(home: Home, snapshot: SnapshotInfo) -> None:
    """Check that the table still has every judgement emitted since a snapshot.

    Raises:
        FleetError: maintenance may have removed some of them.
    """
    kept_ms = oldest_kept_ms(home, "late")
    if kept_ms is not None and kept_ms + _LONGEST_DELAY_MS > (snapshot.at_ms or 0):
        raise FleetError(
            f"the judgements since snapshot version {snapshot.version} are incomplete: the table is complete only from "
            f"{format_instant(kept_ms)} on (keep_late); name a newer snapshot with --version, restore the "
            f"checkpoint from a backup, or replay the history into another home",
            code="judgements-not-retained",
        )


def recover_from_snapshot(
    spark: SparkSession, home: Home, plan: GenerationSpec, snapshot: SnapshotInfo, report: ReportProgress
) -> Generation:
    """Build a generation from a snapshot, activate it, and emit missing judgements.

    Args:
        spark: Spark session.
        home: the home; the caller holds the lock of its state.
        plan: specification of the generation, with all rows of the snapshot.
        snapshot: the snapshot.
        report: callback for progress lines.

    Raises:
        FleetError: judgements emitted since do not follow from the snapshot; nothing has changed.
    """
    through = max(DeltaLog(home.table(MESSAGES.name)).latest() + 1, plan.bronze)
    at, scratch = CheckpointPosition(-1, through, snapshot.newest_ms, plan.partitions), home.lifecycle / "scratch-again"
    try:
        with pack_by_key_group(plan.rows, plan.key_groups) as packed:
            pending = packed.account.pending
            generation = build(spark, home, plan, packed, at, report, scratch)
        due, missing = _switched(home, generation, scratch, pending, snapshot, report)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report(f"emitting the missing judgements: {missing:,} of {due:,} that follow from the snapshot")
    flush_outbox(home, generation.number)
    return generation


def _switched(
    home: Home, new: Generation, scratch: Path, pending: Iterable[str], snapshot: SnapshotInfo, report: ReportProgress
) -> tuple[int, int]:
    """Write the outbox of a generation and activate it; return the counts of `_left`."""
    with discarded_on_failure(home, new):
        report("comparing the judgements that follow from the snapshot with those emitted since")
        counts = _left(home, new, scratch, pending, snapshot)
        sync_checkpoint(home.lifecycle, new.number)
        record = load_generations(home.lifecycle)
        position = {"damaged": True, "retired_at_ms": wall_clock_ms()}
        save_generations(home.lifecycle, record.switched(new.number, position))
    report(f"generation {new.number} is current; generation {record.current} cannot be restored: ./fleet state prune removes it")
    return counts


def _left(home: Home, generation: Generation, scratch: Path, pending: Iterable[str], snapshot: SnapshotInfo) -> tuple[int, int]:
    """Write the judgements that were not emitted yet to the outbox of a generation.

    Returns:
        Number of judgements that follow from the snapshot, and number that were not emitted yet.

    Raises:
        FleetError: some judgements were emitted that do not follow from the snapshot.
    """
    shell = {"judged_at_ms": wall_clock_ms(), "generation": generation.number}
    again = files_of(scratch, open_table(scratch).version()) if is_committed(scratch) else []
    with tables.connect() as connection:
        tables.spill_to(connection, scratch / "spilled")
        tables.open_files(connection, "again", JUDGEMENTS, again)
        tables.open_files(connection, "emitted", JUDGEMENTS, tables.paths_of(home, JUDGEMENTS))
        connection.register("pending", tables.to_table(JUDGEMENTS, [{**json.loads(one), **shell} for one in pending]))
        connection.execute(
            f"""CREATE TABLE compared AS SELECT *,
                epoch_ms(received_at) // {MINUTE_MS} AS minute,
                count(*) FILTER (side = 'emitted') OVER (PARTITION BY {_SAME}) AS emitted_count,
                count(*) FILTER (side = 'due') OVER (PARTITION BY {_SAME}) AS due,
                row_number() OVER (PARTITION BY side, {_SAME}) AS nth
            FROM (SELECT *, 'due' AS side FROM (SELECT * FROM again UNION ALL BY NAME SELECT * FROM pending)
                  UNION ALL BY NAME SELECT *, 'emitted' AS side FROM emitted WHERE messages IS NULL) WHERE {_OF_THE_JOB}"""
        )
        connection.execute(
            f"""CREATE TABLE summed AS SELECT kind, device_id, message_kind, epoch_ms(received_at) // {MINUTE_MS} AS minute,
                sum(messages)::BIGINT AS counted
            FROM emitted WHERE messages IS NOT NULL AND epoch_ms(received_until) > ? GROUP BY ALL""",
            [snapshot.newest_ms or 0],
        )
        connection.execute(
            f"""CREATE TABLE missing AS SELECT due.*, counted,
                row_number() OVER (PARTITION BY {_GROUP} ORDER BY CASE WHEN kind IN ('late', 'clock') THEN received_at
                    ELSE least(event_time, received_at) END, received_at) AS place
            FROM (SELECT * FROM compared WHERE side = 'due' AND nth > emitted_count) AS due
            LEFT JOIN summed USING ({_GROUP})"""
        )
        _require_following(connection, snapshot)
        columns = ", ".join(f'"{column.name}"' for column in JUDGEMENTS.columns)
        missing = "FROM missing WHERE place > coalesce(counted, 0)"
        left = f"SELECT {columns} {missing} ORDER BY event_time, device_id, transition_no"
        [counts] = tables.fetch(
            connection,
            f"SELECT (SELECT count(*) FROM compared WHERE side = 'due') AS due, (SELECT count(*) {missing}) AS missing",
        )
        if counts["missing"]:
            _write(connection, left, outbox_path(checkpoint_of(home.lifecycle, generation.number)))
    return int(counts["due"]), int(counts["missing"])


def _require_following(connection: "DuckDBPyConnection", snapshot: SnapshotInfo) -> None:
    since = "TRUE"
    parameters: Sequence[Any] = []
    if snapshot.newest_ms is not None:
        since = "(epoch_ms(received_at) > ? OR (received_at IS NULL AND epoch_ms(event_time) > ?))"
        parameters = [snapshot.newest_ms, snapshot.frontier_ms or snapshot.newest_ms]
    surplus = f"""SELECT kind, device_id FROM summed
        ANTI JOIN (SELECT {_GROUP} FROM missing WHERE place = counted) AS found USING ({_GROUP})"""
    unexpected = f"""FROM (SELECT kind, device_id FROM compared WHERE side = 'emitted' AND nth > due AND {since}
        UNION ALL {surplus})"""
    [counts] = tables.fetch(connection, f"SELECT count(*) AS n {unexpected}", parameters)
    if counts["n"]:
        shown = tables.fetch(connection, f"SELECT kind, device_id {unexpected} ORDER BY ALL LIMIT {_SHOWN}", parameters)
        raise FleetError(
            f"{counts['n']:,} judgements emitted since snapshot version {snapshot.version} do not follow from it ("
            + ", ".join(f"{one['kind']} of {one['device_id']}" for one in shown)
            + "): they were emitted from another state; nothing has changed; name another snapshot with --version",
            code="judgements-do-not-follow",
        )


def _write(connection: "DuckDBPyConnection", sql: str, path: Path) -> None:
    fresh = path.with_suffix(".new")
    named = str(fresh).replace("'", "''")
    connection.execute(f"COPY ({sql}) TO '{named}' (FORMAT parquet, ROW_GROUP_SIZE {_AT_ONCE})")
    replace_durably(fresh, path)
