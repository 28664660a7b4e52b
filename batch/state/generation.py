"""How a generation of the lifecycle job is made, checked, and given the work.

Rule 1: the one that runs is untouched until its successor has been checked; then one step gives the work over.
Rule 2: a successor that begins further back judges all that its predecessor read since, and says nothing: that has been said.
It is refused where the two then differ in any device, or in anything that waits.
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

from batch.common.progress import Say
from batch.common.spark_session import cause_of
from batch.state.transfer import TransferredRows, compare, pack_by_key_group, seeds, with_checksum
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.io.checkpoints.checkpoint import (
    CheckpointPosition,
    committed,
    is_settled,
    newest_begun,
    note_begin,
    position_after,
)
from fleetpulse.io.checkpoints.generations import (
    Generation,
    begin_generation,
    checkpoint_of,
    discard_generation,
    load_generations,
    made_durable,
    save_generations,
)
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import Begin, start
from fleetpulse.io.lifecycle.state_reader import Rows, state_as_rows
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables.outbox import flush_outbox

_PARTITIONS: Final = "spark.sql.shuffle.partitions"
_PATIENCE_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """What a generation is to be made of.

    Attributes:
        verb: which makes it.
        made_from: what from, for its history.
        rows: of a snapshot.
        bronze: the first version to be read.
        key_groups: how many.
        partitions: of the state.
        form: the stored form that it writes.
        chosen: whether the rows are some of the devices, or others than are known: then they are not compared.
    """

    verb: str
    made_from: dict[str, Any]
    rows: Rows
    bronze: int
    key_groups: int
    partitions: int
    form: int
    chosen: bool = False


def drain(spark: SparkSession, home: Home, say: Say, through: int = 0) -> CheckpointPosition:
    """Bring the current generation to the end of what it has begun, so that all it has read is judged and said.

    Args:
        spark: the session.
        home: the home, its state held by the caller.
        say: told each step.
        through: the version of bronze that it is to come to at the least.

    Raises:
        FleetError: it has judged nothing yet, or fails.
    """
    home.upgrade()
    checkpoint = home.checkpoint
    flush_outbox(home, home.generation().number)
    if not committed(checkpoint):
        return position_after(checkpoint)  # says that there is none
    if not is_settled(checkpoint) or newest_begun(checkpoint) < through:
        say(f"finishing what generation {home.generation().number} has begun")
        end = max(through, newest_begun(checkpoint))
        query = start(spark, home, None, through=end)
        await_end(query, lambda version: say(f"finishing it: bronze is judged up to version {version} of {end}"))
    return position_after(checkpoint)


def await_end(query: StreamingQuery, far: Callable[[int], None] = lambda _: None) -> None:
    """Wait until a query that comes to an end has.

    Args:
        query: the query.
        far: told every few seconds up to which version of bronze it has judged, once it has ended a batch.

    Raises:
        FleetError: it failed, or ended no batch for too long.
    """
    limit, reached = time.monotonic() + _PATIENCE_S, -1
    try:
        while not query.awaitTermination(5):
            if (version := judged_version(query)) is not None:
                far(version)
                if version > reached:
                    limit, reached = time.monotonic() + _PATIENCE_S, version
            if time.monotonic() > limit:
                raise FleetError(
                    f"no batch of the state was judged for {_PATIENCE_S:.0f} s; try again, or see the log", code="judging-timeout"
                )
    except FleetError:
        raise
    except Exception as error:
        raise FleetError(
            f"judging on from the state failed ({cause_of(error)}); nothing has changed", code="judging-failed"
        ) from error
    finally:
        query.stop()


def judged_version(query: StreamingQuery) -> int | None:
    """Return the version of bronze up to which a query has judged in this run; None before it has ended a batch."""
    progress = query.lastProgress
    if progress is None or not progress["sources"]:
        return None
    reached = json.loads(progress["sources"][0]["endOffset"] or "null")
    return None if reached is None else int(reached["version"])


def make(spark: SparkSession, home: Home, plan: GenerationSpec, at: CheckpointPosition, say: Say) -> Generation:
    """Make a generation that stands where the current one stopped, and compare them; the current one is current as before.

    Args:
        spark: the session.
        home: the home, its state held by the caller.
        plan: what it is made of.
        at: where the current one stopped, see `drain`.
        say: told each step.

    Raises:
        FleetError: what it is made of cannot be read, or it differs; nothing has changed then.
    """
    with pack_by_key_group(plan.rows, plan.key_groups) as given:
        made = build(spark, home, plan, given, at, say)
        if plan.chosen:
            return made
        say("comparing all devices, and all that waits, with the generation that runs")
        try:
            before = given if is_the_running(home, plan, at) else with_checksum(state_of(spark, home, home.generation(), at))
            require_emitted(before.account.pending)
            compare(before, with_checksum(state_of(spark, home, made)), made)
        except BaseException:
            discard_generation(home.lifecycle, made)
            raise
        return made


def require_emitted(pending: Iterable[str]) -> None:
    """Refuse a successor of a generation that has verdicts to emit: the successor emits summaries only.

    A batch emits all verdicts that its newest row makes due. A checkpoint of a version before that is the exception: it may have
    been stopped between a batch and the one without rows after it.

    Args:
        pending: judgements that the running generation has yet to emit, as JSON.

    Raises:
        FleetError: a verdict is among them.
    """
    verdicts = [one["device_id"] for one in map(json.loads, pending) if one["kind"] != JudgementKind.SUMMARY]
    if verdicts:
        raise FleetError(
            f'the running generation has verdicts to emit ({len(verdicts):,}; the first is of device "{verdicts[0]}"), and its '
            f"successor would leave them out; nothing has changed; let the job judge one more batch (./fleet up), then try again",
            code="generation-has-verdicts",
        )


def is_the_running(home: Home, plan: GenerationSpec, at: CheckpointPosition) -> bool:
    """Whether the rows of a plan are the state of the generation that runs, and no snapshot or other state, which may differ."""
    return plan.made_from == {"generation": home.generation().number, "batch": at.batch} and plan.bronze == at.version


def build(
    spark: SparkSession,
    home: Home,
    plan: GenerationSpec,
    given: TransferredRows,
    at: CheckpointPosition,
    say: Say,
    aside: Path | None = None,
) -> Generation:
    """Make a generation of rows, and let it judge on from them, silently, to where the current one stands.

    Args:
        spark: the session.
        home: the home, its state held by the caller.
        plan: what it is made of.
        given: the plan's rows, packed for its key groups.
        at: where the current one stopped.
        say: told each step.
        aside: a table that what it says on the way goes to; None: nobody hears it.
    """
    made = begin_generation(
        home.lifecycle,
        home.generation(),
        key_groups=plan.key_groups,
        form=plan.form,
        made_by=plan.verb,
        made_from=plan.made_from,
    )
    try:
        say(f"building generation {made.number}")
        groups = seeds(spark, given, plan.key_groups, plan.form, home.deployment())
        begin = Begin(groups, plan.bronze, alone=True)
        if at.version > plan.bronze:
            say(f"judging again what was read since, {at.version - plan.bronze} versions of bronze, and saying nothing")
        with _partitions(spark, plan.partitions):  # a new checkpoint takes them from the session
            query = start(spark, home, None, generation=made, begin=begin, through=at.version, told=aside, silent=True)
            await_end(query, lambda version: say(f"judging again: bronze up to version {version} of {at.version}"))
        note_begin(checkpoint_of(home.lifecycle, made.number), at.newest_ms)
    except BaseException:
        discard_generation(home.lifecycle, made)
        raise
    return made


@contextmanager
def _partitions(spark: SparkSession, count: int) -> Iterator[None]:
    before = str(spark.conf.get(_PARTITIONS))
    spark.conf.set(_PARTITIONS, count)
    try:
        yield
    finally:
        spark.conf.set(_PARTITIONS, before)


def activate(home: Home, made: Generation, at: CheckpointPosition, say: Say) -> None:
    """Give the work to a generation that was made: from here on it is current."""
    if not checkpoint_of(home.lifecycle, made.number).exists():
        raise FleetError(
            f"the checkpoint of generation {made.number} is gone; nothing has changed; make it again",
            code="generation-checkpoint-missing",
        )
    made_durable(home.lifecycle, made.number)
    record = load_generations(home.lifecycle)
    save_generations(home.lifecycle, record.switched(made.number, {**asdict(at), "retired_at_ms": wall_clock_ms()}))
    say(f"generation {made.number} is current; generation {record.current} is kept: ./fleet state rollback goes back")


def state_of(spark: SparkSession, home: Home, generation: Generation, at: CheckpointPosition | None = None) -> Rows:
    """Return a generation's state as the rows of a snapshot; None takes its newest batch."""
    checkpoint = checkpoint_of(home.lifecycle, generation.number)
    return state_as_rows(spark, checkpoint, at or position_after(checkpoint), home.deployment())
