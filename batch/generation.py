"""How a generation of the lifecycle job is made, checked, and given the work.

Rule 1: the one that runs is untouched until its successor has been checked; then one step gives the work over.
Rule 2: a successor that begins further back judges all that its predecessor read since, and says nothing: that has been said.
It is refused where the two then differ in any device, or in anything that waits.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from batch.session import told_of
from fleetpulse.columnar.snapshots import DEVICE, GROUP, OWN_ROW, SIGNAL, seed, shared_rows, the_world
from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages import EVERYONE
from fleetpulse.core.replay import Deployment
from fleetpulse.io.checkpoint import Stand, committed, is_settled, newest_begun, note_begin, stand
from fleetpulse.io.generations import (
    Generation,
    begin_generation,
    checkpoint_of,
    discard_generation,
    load_generations,
    save_generations,
)
from fleetpulse.io.home import Home
from fleetpulse.io.lifecycle_query import Begin, start
from fleetpulse.io.stored_state import snapshot_rows

Say = Callable[[str], None]
_PARTITIONS: Final = "spark.sql.shuffle.partitions"
_PATIENCE_S: Final = 3600.0
_SEEDS: Final = "key_group int, block binary, chunks array<struct<number: bigint, rows: binary>>"
_PLACE: Final = ("key_group",)  # of a row, which is not part of what it says


@dataclass(frozen=True, slots=True)
class Plan:
    """What a generation is to be made of.

    Attributes:
        verb: which makes it.
        made_from: what from, for its history.
        rows: of a snapshot, see `columnar.snapshots`.
        bronze: the first version to be read.
        key_groups: how many.
        partitions: of the state.
        form: the stored form that it writes.
        chosen: whether the rows are some of the devices, or others than are known: then they are not compared.
    """

    verb: str
    made_from: dict[str, Any]
    rows: DataFrame
    bronze: int
    key_groups: int
    partitions: int
    form: int
    chosen: bool = False


def settle(spark: SparkSession, home: Home, say: Say, through: int = 0) -> Stand:
    """Bring the current generation to the end of what it has begun, so that all it has read is judged and said.

    Args:
        spark: the session.
        home: the home, its state held by the caller.
        say: told each step.
        through: the version of bronze that it is to come to at the least.

    Raises:
        FleetError: it has judged nothing yet, or fails.
    """
    checkpoint = home.checkpoint
    if not committed(checkpoint):
        return stand(checkpoint)  # says that there is none
    if not is_settled(checkpoint) or newest_begun(checkpoint) < through:
        say(f"finishing what generation {home.generation().number} has begun")
        await_end(start(spark, home, None, through=max(through, newest_begun(checkpoint))))
    return stand(checkpoint)


def await_end(query: StreamingQuery) -> None:
    """Wait until a query that comes to an end has.

    Raises:
        FleetError: it failed, or took too long.
    """
    limit = time.monotonic() + _PATIENCE_S
    try:
        while not query.awaitTermination(5):
            if time.monotonic() > limit:
                raise FleetError(f"the state was not judged to its end within {_PATIENCE_S:.0f} s; try again, or see the log")
    except FleetError:
        raise
    except Exception as error:
        raise FleetError(f"judging on from the state failed ({told_of(error)}); nothing has changed") from error
    finally:
        query.stop()


def make(spark: SparkSession, home: Home, plan: Plan, at: Stand, say: Say) -> Generation:
    """Make a generation that stands where the current one stopped, and compare them; the current one is current as before.

    Args:
        spark: the session.
        home: the home, its state held by the caller.
        plan: what it is made of.
        at: where the current one stopped, see `settle`.
        say: told each step.

    Raises:
        FleetError: what it is made of cannot be read, or it differs; nothing has changed then.
    """
    plan = replace(plan, rows=plan.rows.persist(StorageLevel.DISK_ONLY))  # they are read several times
    try:
        made = build(spark, home, plan, at, say)
        if not plan.chosen:
            say("comparing all devices, and all that waits, with the generation that runs")
            before = plan.rows if plan.bronze == at.version else state_of(spark, home, home.generation(), at)
            try:
                compare(spark, home, before, made)
            except BaseException:
                discard_generation(home.lifecycle, made)
                raise
        return made
    finally:
        plan.rows.unpersist()


def build(spark: SparkSession, home: Home, plan: Plan, at: Stand, say: Say) -> Generation:
    """Make a generation of rows, and let it judge on from them, silently, to where the current one stands."""
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
        begin = Begin(seeds(spark, plan, home.deployment()), plan.bronze, alone=True)
        if at.version > plan.bronze:
            say(f"judging again what was read since, {at.version - plan.bronze} versions of bronze, and saying nothing")
        with _partitions(spark, plan.partitions):  # a new checkpoint takes them from the session
            await_end(start(spark, home, None, generation=made, begin=begin, through=at.version, silent=True))
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


def take_over(home: Home, made: Generation, at: Stand, say: Say) -> None:
    """Give the work to a generation that was made: from here on it is current."""
    if not checkpoint_of(home.lifecycle, made.number).exists():
        raise FleetError(f"the checkpoint of generation {made.number} is gone; nothing has changed; make it again")
    record = load_generations(home.lifecycle)
    save_generations(home.lifecycle, record.switched(made.number, asdict(at)))
    say(f"generation {made.number} is current; generation {record.current} is kept: ./fleet state rollback goes back")


def seeds(spark: SparkSession, plan: Plan, deployment: Deployment) -> DataFrame:
    """Return the key groups that rows of a snapshot make, see `Begin.groups`."""
    for_all = (F.col("part") == OWN_ROW) & (F.col("device_id") == EVERYONE)
    world, waiting = shared(plan.rows)
    of_all = shared_rows(waiting)
    form, key_groups = plan.form, plan.key_groups
    rows = plan.rows.filter(F.col("part").isin(DEVICE, SIGNAL, OWN_ROW) & ~for_all)
    rows = rows.withColumn("place", F.pmod("device_hash", F.lit(key_groups)).cast("int"))
    empty = spark.range(key_groups).select(F.col("id").cast("int").alias("place"))

    def grown(key: tuple[pa.Scalar, ...], table: pa.Table) -> pa.Table:
        return seed(key[0].as_py(), table, of_all, world, deployment, form)

    return rows.unionByName(empty, allowMissingColumns=True).groupBy("place").applyInArrow(grown, _SEEDS)


def state_of(spark: SparkSession, home: Home, generation: Generation, at: Stand | None = None) -> DataFrame:
    """Return a generation's state as the rows of a snapshot; None takes its newest batch."""
    checkpoint = checkpoint_of(home.lifecycle, generation.number)
    return snapshot_rows(spark, checkpoint, at or stand(checkpoint), home.deployment())


def compare(spark: SparkSession, home: Home, old: DataFrame, after: Generation) -> None:
    """See that a generation says the same of all devices as some rows do, and has the same waiting.

    Raises:
        FleetError: it does not; it names some that differ.
    """
    new = state_of(spark, home, after)
    was, now = fingerprint(old), fingerprint(new)
    if was == now and shared(old) == shared(new):
        return
    told = [name for name in old.columns if name not in _PLACE]
    of_devices = F.col("part").isin(DEVICE, SIGNAL, OWN_ROW)
    lost, more = (
        [row.device_id for row in one.exceptAll(other).select("device_id").distinct().limit(5).collect()]
        for one, other in ((some.filter(of_devices).select(told), rest.filter(of_devices).select(told))
                           for some, rest in ((old, new), (new, old)))
    )  # fmt: skip
    raise FleetError(
        f"generation {after.number} is not what the running one is, and is discarded: "
        f"{_counted(was)} before, {_counted(now)} after; lost or changed: {', '.join(lost) or 'none'}; "
        f"new or changed: {', '.join(more) or 'none'}; nothing has changed"
    )


def shared(rows: DataFrame) -> tuple[str, list[str]]:
    """Return what all key groups of a snapshot share: coverage, frontier and policies, and the rows that wait in each."""
    for_all = (F.col("part") == OWN_ROW) & (F.col("device_id") == EVERYONE)
    heads = rows.filter(for_all | (F.col("part") == GROUP)).select("part", "key_group", "content").collect()
    first = min((row.key_group for row in heads), default=0)
    waiting = sorted(row.content for row in heads if row.part == OWN_ROW and row.key_group == first)
    return the_world(row.content for row in heads if row.part == GROUP), waiting


Fingerprint = dict[str, tuple[int, int]]


def fingerprint(rows: DataFrame) -> Fingerprint:
    """Return how many rows there are of each part, and the sum of their hashes: the same whatever their order and group."""
    told = [name for name in rows.columns if name not in _PLACE]
    kept = rows.filter(F.col("part").isin(DEVICE, SIGNAL, OWN_ROW) & (F.col("device_id") != EVERYONE))
    hashed = F.xxhash64(*(item for name in told for item in (F.col(name), F.col(name).isNull())))  # a null alone counts nothing
    sums = kept.groupBy("part").agg(F.count("*").alias("n"), F.sum(hashed.cast("decimal(38,0)")).alias("hashes"))
    return {row.part: (row.n, int(row.hashes)) for row in sums.collect()}


def _counted(of: Fingerprint) -> str:
    return " and ".join(f"{count:,} {part}s" for part, (count, _) in sorted(of.items())) or "nothing"
