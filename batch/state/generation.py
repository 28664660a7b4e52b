"""Building, checking and activation of a generation of the lifecycle job.

Rule 1: the running generation is unchanged until its successor has been checked; the switch is then
one atomic step.
Rule 2: a successor built from an older state replays all rows that its predecessor has read since.
It emits nothing meanwhile, as the predecessor has emitted those judgements. It is then refused if
any device or any pending row differs from the predecessor's.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from batch.common.progress import ReportProgress
from batch.common.spark_session import cause_of
from batch.state.transfer import TransferredRows, build_key_groups, compare, pack_by_key_group, with_checksum
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.io.checkpoints.checkpoint import (
    CheckpointPosition,
    committed_batches,
    is_settled,
    newest_begun,
    position_after,
    write_start_position,
)
from fleetpulse.io.checkpoints.generations import (
    Generation,
    begin_generation,
    checkpoint_of,
    discard_generation,
    load_generations,
    save_generations,
    sync_checkpoint,
)
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import InitialState, start
from fleetpulse.io.lifecycle.state_reader import SnapshotRows, state_as_rows
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables.outbox import flush_outbox

_PARTITIONS: Final = "spark.sql.shuffle.partitions"
_PATIENCE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """Specification of a new generation.

    Attributes:
        verb: command that makes the generation, such as ``rescale``.
        made_from: source of the state, for the record of generations.
        rows: rows of a snapshot, the state to start from.
        bronze: first version of bronze to read.
        key_groups: number of key groups.
        partitions: number of partitions of the state.
        form: stored form that the generation writes.
        has_other_devices: whether the devices differ from those of the running generation on purpose;
            the two generations are then not compared.
    """

    verb: str
    made_from: dict[str, Any]
    rows: SnapshotRows
    bronze: int
    key_groups: int
    partitions: int
    form: int
    has_other_devices: bool = False


def drain(spark: SparkSession, home: Home, report: ReportProgress, through: int = 0) -> CheckpointPosition:
    """Finish the open batch of the current generation.

    All rows that it has read are then judged, and the judgements emitted.

    Args:
        spark: Spark session.
        home: the home; the caller holds the lock of its state.
        report: callback for progress lines.
        through: version of bronze to reach at least.

    Returns:
        Position after the newest batch.

    Raises:
        FleetError: the generation has no committed batch yet, or its query fails.
    """
    home.upgrade()
    checkpoint = home.checkpoint
    flush_outbox(home, home.generation().number)
    if not committed_batches(checkpoint):
        return position_after(checkpoint)  # raises: the checkpoint has no batch
    if not is_settled(checkpoint) or newest_begun(checkpoint) < through:
        report(f"finishing the open batch of generation {home.generation().number}")
        end = max(through, newest_begun(checkpoint))
        query = start(spark, home, None, through=end)
        await_termination(query, lambda version: report(f"finishing: bronze is judged up to version {version} of {end}"))
    return position_after(checkpoint)


def await_termination(query: StreamingQuery, on_progress: Callable[[int], None] = lambda _: None) -> None:
    """Wait until a bounded query has ended.

    Args:
        query: query that reads up to a fixed version of bronze.
        on_progress: callback for progress; every few seconds, from the first finished batch on, it receives
            the version of bronze that the query has reached.

    Raises:
        FleetError: the query failed, or finished no batch within an hour.
    """
    limit, reached = time.monotonic() + _PATIENCE_S, -1
    try:
        while not query.awaitTermination(5):
            if (version := judged_version(query)) is not None:
                on_progress(version)
                if version > reached:
                    limit, reached = time.monotonic() + _PATIENCE_S, version
            if time.monotonic() > limit:
                raise FleetError(
                    f"the query finished no batch for {_PATIENCE_S:.0f} s; try again, or see the log", code="judging-timeout"
                )
    except FleetError:
        raise
    except Exception as error:
        raise FleetError(
            f"judging from this state failed ({cause_of(error)}); nothing has changed", code="judging-failed"
        ) from error
    finally:
        query.stop()


def judged_version(query: StreamingQuery) -> int | None:
    """Return the version of bronze that a query has judged; None before any batch."""
    progress = query.lastProgress
    if progress is None or not progress["sources"]:
        return None
    reached = json.loads(progress["sources"][0]["endOffset"] or "null")
    return None if reached is None else int(reached["version"])


def build_and_check(
    spark: SparkSession, home: Home, plan: GenerationSpec, at: CheckpointPosition, report: ReportProgress
) -> Generation:
    """Build a generation up to the current position, and check it against the current.

    The current generation stays current.

    Args:
        spark: Spark session.
        home: the home; the caller holds the lock of its state.
        plan: specification of the generation.
        at: position at which the current generation stopped, see `drain`.
        report: callback for progress lines.

    Raises:
        FleetError: the source cannot be read, or the generations differ; nothing has changed.
    """
    with pack_by_key_group(plan.rows, plan.key_groups) as packed:
        generation = build(spark, home, plan, packed, at, report)
        if plan.has_other_devices:
            return generation
        report("comparing all devices and pending rows with the running generation")
        with discarded_on_failure(home, generation):
            before = (
                packed if starts_from_current(home, plan, at) else with_checksum(state_of(spark, home, home.generation(), at))
            )
            require_emitted(before.account.pending)
            compare(before, with_checksum(state_of(spark, home, generation)), generation)
        return generation


def require_emitted(pending: Iterable[str]) -> None:
    """Refuse a successor if the running generation has verdicts to emit.

    The successor would emit only the pending summaries. In this version of the program, a batch emits
    all verdicts due at its newest row. In older versions, a following batch without rows emitted
    them: the job may have been stopped between these two batches.

    Args:
        pending: judgements that the running generation has yet to emit, as JSON.

    Raises:
        FleetError: a verdict is among them.
    """
    verdicts = [one["device_id"] for one in map(json.loads, pending) if one["kind"] != JudgementKind.SUMMARY]
    if verdicts:
        raise FleetError(
            f'the running generation has verdicts to emit ({len(verdicts):,}; the first is of device "{verdicts[0]}"), and its '
            f"successor would omit them; nothing has changed; run the job for one more batch (./fleet up), then try again",
            code="generation-has-verdicts",
        )


def starts_from_current(home: Home, plan: GenerationSpec, at: CheckpointPosition) -> bool:
    """Return whether a plan starts from the running generation's current state."""
    return plan.made_from == {"generation": home.generation().number, "batch": at.batch} and plan.bronze == at.version


def build(
    spark: SparkSession,
    home: Home,
    plan: GenerationSpec,
    packed: TransferredRows,
    at: CheckpointPosition,
    report: ReportProgress,
    judgements_table: Path | None = None,
) -> Generation:
    """Build a generation from rows, and replay bronze up to the current position.

    Args:
        spark: Spark session.
        home: the home; the caller holds the lock of its state.
        plan: specification of the generation.
        packed: rows of the plan, packed for its key groups.
        at: position at which the current generation stopped.
        report: callback for progress lines.
        judgements_table: table for the judgements of the replay; None discards them.
    """
    generation = begin_generation(
        home.lifecycle,
        home.generation(),
        key_groups=plan.key_groups,
        form=plan.form,
        made_by=plan.verb,
        made_from=plan.made_from,
    )
    with discarded_on_failure(home, generation):
        report(f"building generation {generation.number}")
        groups = build_key_groups(spark, packed, plan.key_groups, plan.form, home.deployment())
        initial = InitialState(groups, plan.bronze, alone=True)
        if at.version > plan.bronze:
            report(f"replaying {at.version - plan.bronze} versions of bronze without emitting judgements")
        with _partitions(spark, plan.partitions):  # a new checkpoint takes the number from the session
            query = start(
                spark,
                home,
                None,
                generation=generation,
                initial=initial,
                through=at.version,
                judgements_table=judgements_table,
                silent=True,
            )
            await_termination(
                query, lambda version: report(f"replaying: bronze is judged up to version {version} of {at.version}")
            )
        write_start_position(checkpoint_of(home.lifecycle, generation.number), at.newest_ms)
    return generation


@contextmanager
def discarded_on_failure(home: Home, generation: Generation) -> Iterator[None]:
    """Discard a new generation if the context fails before that generation is current."""
    try:
        yield
    except BaseException:
        if home.generation().number != generation.number:
            discard_generation(home.lifecycle, generation)
        raise


@contextmanager
def _partitions(spark: SparkSession, count: int) -> Iterator[None]:
    before = str(spark.conf.get(_PARTITIONS))
    spark.conf.set(_PARTITIONS, count)
    try:
        yield
    finally:
        spark.conf.set(_PARTITIONS, before)


def activate(home: Home, generation: Generation, at: CheckpointPosition, report: ReportProgress) -> None:
    """Make a generation the current one."""
    if not checkpoint_of(home.lifecycle, generation.number).exists():
        raise FleetError(
            f"the checkpoint of generation {generation.number} is missing; nothing has changed; make the generation again",
            code="generation-checkpoint-missing",
        )
    sync_checkpoint(home.lifecycle, generation.number)
    record = load_generations(home.lifecycle)
    save_generations(home.lifecycle, record.switched(generation.number, {**asdict(at), "retired_at_ms": wall_clock_ms()}))
    report(
        f"generation {generation.number} is current; generation {record.current} is kept; to return to it: ./fleet state rollback"
    )


def state_of(spark: SparkSession, home: Home, generation: Generation, at: CheckpointPosition | None = None) -> SnapshotRows:
    """Return the state of a generation as snapshot rows.

    Args:
        spark: Spark session.
        home: the home.
        generation: the generation.
        at: position to read; None reads the newest batch.
    """
    checkpoint = checkpoint_of(home.lifecycle, generation.number)
    return state_as_rows(spark, checkpoint, at or position_after(checkpoint), home.deployment())
