"""What can be done to the lifecycle job's state as a whole: each makes a generation, checks it, and gives it the work.

Rule 1: each holds the state while it works, and refuses where another holds it.
Rule 2: what is planned is known before anything is changed; ``dry`` ends there.
"""

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batch.generation import Plan, Say, make, settle, state_of, take_over
from batch.holding import hold
from batch.registered import rows_of_devices
from fleetpulse.columnar.forms import STORED_FORM, WRITTEN_FORMS
from fleetpulse.columnar.snapshots import DEVICE
from fleetpulse.core.errors import FleetError
from fleetpulse.io.belonging import require_own
from fleetpulse.io.checkpoint import Stand, is_settled, relocate, stand
from fleetpulse.io.generations import (
    REPARTITION,
    RETIRED,
    Generation,
    begin_generation,
    checkpoint_of,
    discard_generation,
    load_generations,
)
from fleetpulse.io.home import Home
from fleetpulse.io.snapshot_table import Taken
from fleetpulse.io.stored_state import VARIABLES, Rows, blaming_snapshot, read_snapshot, rows_as_given, state_rows, timers
from fleetpulse.ops.reports import listening

Listed = Callable[[int | None], pa.Table]
_MOST_GROUPS: Final = 100_000
_MOST_PARTITIONS: Final = 10_000
_CALLS_JAVA: Final = re.compile(r"\b(?:try_)?reflect\b|\bjava_method\b", re.IGNORECASE)  # however it is quoted or spaced


@dataclass(frozen=True, slots=True)
class Work:
    """What a verb works with.

    Attributes:
        session: of Spark, or what starts one: a plan may need none.
        home: the home.
        say: told each step.
        dry: whether to end where everything is known and nothing is changed.
        holds: whether what is made is held, to be looked at, and gets the work by a word of its own.
        gate: looks at what was made, before that; it raises where nothing may be built on it. None looks at nothing more.
    """

    session: SparkSession | Callable[[], SparkSession]
    home: Home
    say: Say
    dry: bool = False
    holds: bool = False
    gate: Callable[["Work", Generation], None] | None = None

    @property
    def spark(self) -> SparkSession:
        """The session; where it was to be started, it is."""
        return self.session if isinstance(self.session, SparkSession) else self.session()


def give(work: Work, made: Generation, at: Stand) -> None:
    """Give the work to a generation that was made and checked, or hold it; what does not pass the gate is removed.

    Raises:
        FleetError: it does not pass.
    """
    if work.gate is not None:
        try:
            work.gate(work, made)
        except BaseException:
            discard_generation(work.home.lifecycle, made)
            raise
    (hold if work.holds else take_over)(work.home, made, at, work.say)


def rescale(work: Work, key_groups: int) -> Generation | None:
    """Go on with another number of key groups.

    Raises:
        FleetError: the number is none, or it has that already.
    """
    if not 1 <= key_groups <= _MOST_GROUPS:
        raise FleetError(
            f"a generation has 1 to {_MOST_GROUPS:,} key groups; got {key_groups}; aim at 4,000 to 32,000 devices each"
        )
    current = work.home.generation()
    if key_groups == current.key_groups:
        raise FleetError(f"generation {current.number} has {key_groups} key groups already; nothing is to be done")
    return _anew(work, "rescale", key_groups=key_groups)


def migrate(work: Work, form: int = STORED_FORM) -> Generation | None:
    """Go on in another stored form.

    Raises:
        FleetError: it cannot be written, or it is the present one.
    """
    check_form(work.home, form)
    return _anew(work, "migrate", form=form)


def check_form(home: Home, form: int) -> None:
    """See that a stored form can be gone on in.

    Raises:
        FleetError: it cannot.
    """
    if form not in WRITTEN_FORMS:
        raise FleetError(f"this version writes the stored forms {' and '.join(map(str, WRITTEN_FORMS))}; got {form}")
    current = home.generation()
    if form == current.form:
        raise FleetError(f"generation {current.number} writes stored form {form} already; nothing is to be done")


def repartition_anew(work: Work, partitions: int) -> Generation | None:
    """Go on with another number of partitions, by a new generation."""
    _check_partitions(work.home, partitions)
    return _anew(work, "repartition --anew", partitions=partitions)


def _check_partitions(home: Home, partitions: int) -> None:
    if not 1 <= partitions <= _MOST_PARTITIONS:
        raise FleetError(f"the state has 1 to {_MOST_PARTITIONS:,} partitions; got {partitions}; one or two a core are usual")
    if partitions == stand(home.checkpoint).partitions:
        raise FleetError(f"the state has {partitions} partitions already; nothing is to be done")


def _anew(
    work: Work, verb: str, *, key_groups: int | None = None, partitions: int | None = None, form: int | None = None
) -> Generation | None:
    """Make a generation from the state of the current one, with something changed."""
    current, before = work.home.generation(), stand(work.home.checkpoint)
    wanted = (key_groups or current.key_groups, partitions or before.partitions, form or current.form)
    work.say(
        f"generation {current.number}: {current.key_groups} key groups, {before.partitions} partitions, stored form "
        f"{current.form}; the next: {wanted[0]} key groups, {wanted[1]} partitions, stored form {wanted[2]}"
    )
    if work.dry:
        return None
    at = settle(work.spark, work.home, work.say)
    rows = state_of(work.spark, work.home, current, at)
    source = {"generation": current.number, "batch": at.batch}
    plan = Plan(verb, source, rows, at.version, key_groups=wanted[0], partitions=wanted[1], form=wanted[2])
    made = make(work.spark, work.home, plan, at, work.say)
    give(work, made, at)
    return made


def repartition(work: Work, partitions: int) -> Generation | None:
    """Go on with another number of partitions, by Spark's own offline repartitioning of a copy of the checkpoint.

    Raises:
        FleetError: the number is none, it has that already, or the copy differs afterwards.
    """
    home = work.home
    _check_partitions(home, partitions)
    before = stand(home.checkpoint)
    work.say(f"the state has {before.partitions} partitions, and is to have {partitions}")
    if work.dry:
        return None
    at, current = settle(work.spark, home, work.say), home.generation()
    made = begin_generation(
        home.lifecycle, current, key_groups=current.key_groups, form=current.form, made_by=REPARTITION,
        made_from={"generation": current.number, "batch": at.batch},
    )  # fmt: skip
    copy = checkpoint_of(home.lifecycle, made.number)
    try:
        work.say(f"copying generation {current.number} to generation {made.number}")
        shutil.copytree(home.checkpoint, copy)
        relocate(copy)
        work.say("repartitioning the copy")
        work.spark._streamingCheckpointManager.repartition(str(copy), partitions)  # noqa: SLF001 - Spark has no other door yet
        after = stand(copy)
        work.say("comparing all state and all timers with the generation that runs")
        for name in (*VARIABLES, "timers"):
            was, now = (_all_of(work.spark, folder, one, name) for folder, one in ((home.checkpoint, at), (copy, after)))
            if was != now:
                raise FleetError(f'the state "{name}" differs after repartitioning: {was[0]} rows before, {now[0]} after; '
                                 f"generation {made.number} is discarded, and nothing has changed")  # fmt: skip
    except BaseException:
        discard_generation(home.lifecycle, made)
        raise
    give(work, made, at)
    return made


def _all_of(spark: SparkSession, checkpoint: Any, at: Stand, name: str) -> tuple[int, int]:
    rows = timers(spark, checkpoint, at.batch) if name == "timers" else state_rows(spark, checkpoint, at.batch, name)
    told = [F.to_json(F.struct(column)) for column in rows.columns if column != "partition_id"]
    [found] = rows.agg(F.count("*").alias("n"), F.sum(F.xxhash64(*told).cast("decimal(38,0)")).alias("hashes")).collect()
    return found.n, int(found.hashes or 0)


def rollback(work: Work, to: int | None = None) -> Generation | None:
    """Go back to what an earlier generation was, by a new one that begins where that one stopped.

    Where either was made of chosen devices, and the other was not, they know different ones, and are not compared.

    Raises:
        FleetError: there is none, or it has been pruned.
    """
    home = work.home
    record = load_generations(home.lifecycle)
    present = home.generation()
    if to is None and present.made_by == "rollback":
        raise FleetError(
            f"generation {present.number} is a way back already, to generation {present.made_from.get('generation')}; nothing is "
            f"to be done; to go elsewhere, name it: ./fleet state rollback --to NUMBER"
        )
    chosen = record.predecessor() if to is None else record.of(to)
    if chosen is None or chosen.status != RETIRED or not checkpoint_of(home.lifecycle, chosen.number).exists():
        kept = [str(one.number) for one in record.known.values() if one.status == RETIRED]
        raise FleetError(
            f"there is no generation {to or 'before this one'} to go back to; kept are: {', '.join(kept) or 'none'}"
            + (f"; name one: ./fleet state rollback --to {kept[-1]}" if kept else "")
        )
    require_own(home, chosen.number)
    folder = checkpoint_of(home.lifecycle, chosen.number)
    then = stand(folder)
    work.say(
        f"generation {chosen.number} stopped after batch {then.batch}: {chosen.key_groups} key groups, {then.partitions} "
        f"partitions, stored form {chosen.form}; a new generation goes on from there"
    )
    others = record.choices_in(chosen.number) != record.choices_in(present.number)
    if others:
        work.say(f"generations {chosen.number} and {present.number} know different devices: they are not compared")
    if work.dry:
        return None
    at = settle(work.spark, home, work.say)
    rows = state_of(work.spark, home, chosen, then)
    source = {"generation": chosen.number, "batch": then.batch}
    plan = Plan("rollback", source, rows, then.version, chosen.key_groups, then.partitions, chosen.form, chosen=others)
    made = make(work.spark, home, plan, at, work.say)
    give(work, made, at)
    return made


def bootstrap(work: Work, snapshot: Taken, only: str | None = None, *, damaged: bool = False) -> Generation | None:
    """Go on from a snapshot.

    Args:
        work: what to work with.
        snapshot: which.
        only: an SQL condition on the columns of `DEVICE_SNAPSHOTS`: the devices to begin with; None takes all.
        damaged: whether the current state cannot be read: then it is neither finished nor compared with.

    Raises:
        FleetError: it cannot be read, the condition is none, no device is left, or bronze is no longer kept from there.
    """
    home = work.home
    assert snapshot.version is not None, "it was read from the table"
    if only is not None and damaged:
        raise FleetError(
            "--only takes what devices have come to from the present state, which --damaged says cannot be read: leave --only"
        )
    with blaming_snapshot(home, snapshot.version):
        return _from_rows(work, snapshot, read_snapshot(work.spark, home, snapshot.version), only, damaged=damaged)


def _from_rows(work: Work, snapshot: Taken, rows: Rows, only: str | None, *, damaged: bool) -> Generation | None:
    home = work.home
    fitting = rows.each.filter(F.col("part") == DEVICE) if only is None else _fitting(rows.each, only)
    devices = fitting.count()
    if not devices and snapshot.devices:
        raise FleetError(f'no device of snapshot version {snapshot.version} fits "{only}"; got 0 of {snapshot.devices:,}')
    current, before = home.generation(), stand(home.checkpoint)
    work.say(
        f"snapshot version {snapshot.version} of generation {snapshot.generation} after batch {snapshot.batch}: "
        f"{devices:,} of {snapshot.devices:,} devices; bronze is read from version {snapshot.bronze}"
    )
    if work.dry:
        return None
    at = _as_it_stopped(home) if damaged else settle(work.spark, home, work.say)
    source = {"snapshot": snapshot.version, "generation": snapshot.generation, "batch": snapshot.batch, "only": only}
    bronze = snapshot.bronze
    if only is not None:  # the snapshot chooses; what they have come to since is the present state
        rows, bronze = rows_as_given(_these(state_of(work.spark, home, current, at).each, fitting)), at.version
    plan = Plan("bootstrap", source, rows, bronze, current.key_groups, before.partitions, current.form,
                chosen=damaged or only is not None)  # fmt: skip
    made = make(work.spark, home, plan, at, work.say)
    give(work, made, at)
    return made


def _as_it_stopped(home: Home) -> Stand:
    """Return where a generation stopped whose state is damaged, and whose logs of batches are not."""
    if not is_settled(home.checkpoint):
        raise FleetError(
            f"generation {home.generation().number} was stopped in the middle of a batch, and with damaged state nobody knows "
            f"which of its verdicts were said; restore the checkpoint from a backup, or play the history into another home"
        )
    return stand(home.checkpoint)


def check_condition(only: str) -> None:
    """See that a condition asks for values alone: whoever may fill in a form may not call Java.

    Raises:
        FleetError: it names a function that does.
    """
    if found := _CALLS_JAVA.search(only):
        raise FleetError(
            f'"{only}" is no condition on a device: it may not contain the word {found[0]}, which calls Java; '
            f"write one over the columns of device_snapshots, such as: site = 'north'"
        )


def _fitting(rows: DataFrame, only: str) -> DataFrame:
    """Return the devices that fit a condition."""
    check_condition(only)
    try:
        chosen = rows.filter((F.col("part") == DEVICE) & F.expr(f"({only})"))
        chosen.limit(1).collect()
    except PySparkException as error:
        raise FleetError(f'"{only}" is no condition on a device ({str(error).splitlines()[0][:200]}); write one in SQL over the '
                         f"columns of device_snapshots, such as: site = 'north'") from error  # fmt: skip
    return chosen


def _these(rows: DataFrame, fitting: DataFrame) -> DataFrame:
    """Return a state without the devices that do not fit; what waits of devices that have no state yet stays."""
    devices = rows.filter(F.col("part") == DEVICE).select("device_id")
    others = devices.join(fitting.select("device_id"), "device_id", "left_anti")
    return rows.join(others, "device_id", "left_anti").select(rows.columns)


def bootstrap_devices(work: Work, listed: Listed, named: str) -> Generation | None:
    """Go on with the devices of a list, none of which has been heard: they are silent from their registration on.

    What waits for its time stays, and is judged when that comes.

    Args:
        work: what to work with.
        listed: see `registered.rows_of_devices`.
        named: where the list is from.

    Raises:
        FleetError: the list is empty, or has faults.
    """
    home = work.home
    current, before = home.generation(), stand(home.checkpoint)
    work.say(f"the devices of {named}; bronze is read from version {before.version}")
    if work.dry:
        return None
    at = settle(work.spark, home, work.say)
    known = listening(home, at.newest_ms)
    assert known is not None, "what was judged was received"
    state = state_of(work.spark, home, current, at).each
    rows = rows_as_given(rows_of_devices(work.spark, state, listed, known.coverage, home.deployment()))
    source = {"devices": named, "generation": current.number, "batch": at.batch}
    plan = Plan("bootstrap", source, rows, at.version, current.key_groups, at.partitions, current.form, chosen=True)
    made = make(work.spark, home, plan, at, work.say)
    give(work, made, at)
    return made
