"""What can be done to the lifecycle job's state as a whole: each makes a generation, checks it, and gives it the work.

Rule 1: each holds the state while it works, and refuses where another holds it.
Rule 2: what is planned is known before anything is changed; ``dry`` ends there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from batch.common.progress import Say
from batch.state.checkpoint_copy import copy_checkpoint, require_same
from batch.state.device_bootstrap import devices_at, rows_of_devices
from batch.state.device_filter import fitting, these
from batch.state.generation import GenerationSpec, activate, drain, make, state_of
from batch.state.handoff import hold
from batch.state.recover import go_on, require_since, where_it_stopped
from fleetpulse.columnar.codec.versions import STORED_FORM, WRITTEN_FORMS
from fleetpulse.columnar.snapshot.bootstrap import LIMIT_FIELDS
from fleetpulse.columnar.snapshot.rows import DEVICE
from fleetpulse.core.errors import FleetError
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition, partitions_of, position_after, unfinished
from fleetpulse.io.checkpoints.generations import (
    REPARTITION,
    RETIRED,
    Generation,
    begin_generation,
    checkpoint_of,
    discard_generation,
    load_generations,
)
from fleetpulse.io.home.checkpoint_ownership import require_own
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.state_reader import Rows, read_snapshot, reporting_corruption_of_snapshot, rows_as_given
from fleetpulse.io.tables.outbox import flush_outbox
from fleetpulse.io.tables.snapshots import SnapshotInfo
from fleetpulse.reports.effective_policy import world
from fleetpulse.reports.judgements import shards

Listed = Callable[[int | None], pa.Table]
_MOST_GROUPS: Final = 100_000
_MOST_PARTITIONS: Final = 10_000


@dataclass(frozen=True, slots=True)
class StateOperation:
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
    gate: Callable[["StateOperation", Generation], None] | None = None

    @property
    def spark(self) -> SparkSession:
        """The session; where it was to be started, it is."""
        return self.session if isinstance(self.session, SparkSession) else self.session()


def activate_or_hold(work: StateOperation, made: Generation, at: CheckpointPosition) -> None:
    """Give the work to a generation that was made and checked, or hold it; what does not pass the gate is removed.

    Raises:
        FleetError: it does not pass.
    """
    if work.gate is not None:
        try:
            work.say(f"looking at generation {made.number} before it gets the work")
            work.gate(work, made)
        except BaseException:
            discard_generation(work.home.lifecycle, made)
            raise
    (hold if work.holds else activate)(work.home, made, at, work.say)


def rescale(work: StateOperation, key_groups: int) -> Generation | None:
    """Go on with another number of key groups.

    Raises:
        FleetError: the number is none, or it has that already.
    """
    if not 1 <= key_groups <= _MOST_GROUPS:
        raise FleetError(
            f"a generation has 1 to {_MOST_GROUPS:,} key groups; got {key_groups}; aim at 4,000 to 32,000 devices each",
            code="key-groups-out-of-range",
        )
    current = work.home.generation()
    if key_groups == current.key_groups:
        raise FleetError(
            f"generation {current.number} has {key_groups} key groups already; nothing to do", code="key-groups-unchanged"
        )
    return _anew(work, "rescale", key_groups=key_groups)


def migrate(work: StateOperation, form: int = STORED_FORM) -> Generation | None:
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
        raise FleetError(
            f"this version writes the stored forms {' and '.join(map(str, WRITTEN_FORMS))}; got {form}",
            code="state-version-unwritable",
        )
    current = home.generation()
    if form == current.form:
        raise FleetError(
            f"generation {current.number} writes stored form {form} already; nothing to do",
            code="state-version-unchanged",
        )


def repartition_anew(work: StateOperation, partitions: int) -> Generation | None:
    """Go on with another number of partitions, by a new generation."""
    _check_partitions(work.home, partitions)
    return _anew(work, "repartition --anew", partitions=partitions)


def _check_partitions(home: Home, partitions: int) -> None:
    if not 1 <= partitions <= _MOST_PARTITIONS:
        raise FleetError(
            f"the state has 1 to {_MOST_PARTITIONS:,} partitions; got {partitions}; one or two a core are usual",
            code="partitions-out-of-range",
        )
    if partitions == position_after(home.checkpoint).partitions:
        raise FleetError(f"the state has {partitions} partitions already; nothing to do", code="partitions-unchanged")


def _anew(
    work: StateOperation, verb: str, *, key_groups: int | None = None, partitions: int | None = None, form: int | None = None
) -> Generation | None:
    """Make a generation from the state of the current one, with something changed."""
    current, before = work.home.generation(), position_after(work.home.checkpoint)
    wanted = (key_groups or current.key_groups, partitions or before.partitions, form or current.form)
    work.say(
        f"generation {current.number}: {current.key_groups} key groups, {before.partitions} partitions, stored form "
        f"{current.form}; the next: {wanted[0]} key groups, {wanted[1]} partitions, stored form {wanted[2]}"
    )
    if work.dry:
        return None
    at = drain(work.spark, work.home, work.say)
    rows = state_of(work.spark, work.home, current, at)
    source = {"generation": current.number, "batch": at.batch}
    plan = GenerationSpec(verb, source, rows, at.version, key_groups=wanted[0], partitions=wanted[1], form=wanted[2])
    made = make(work.spark, work.home, plan, at, work.say)
    activate_or_hold(work, made, at)
    return made


def repartition(work: StateOperation, partitions: int) -> Generation | None:
    """Go on with another number of partitions, by Spark's own offline repartitioning of a copy of the checkpoint.

    Raises:
        FleetError: the number is none, it has that already, or the copy differs afterwards.
    """
    home = work.home
    _check_partitions(home, partitions)
    before = position_after(home.checkpoint)
    work.say(f"the state has {before.partitions} partitions, and is to have {partitions}")
    if work.dry:
        return None
    at, current = drain(work.spark, home, work.say), home.generation()
    made = begin_generation(
        home.lifecycle, current, key_groups=current.key_groups, form=current.form, made_by=REPARTITION,
        made_from={"generation": current.number, "batch": at.batch},
    )  # fmt: skip
    copy = checkpoint_of(home.lifecycle, made.number)
    try:
        work.say(f"copying generation {current.number} to generation {made.number}")
        copy_checkpoint(home.checkpoint, copy, work.say)
        work.say("repartitioning the copy")
        work.spark._streamingCheckpointManager.repartition(str(copy), partitions)  # noqa: SLF001 - Spark has no other door yet
        after = position_after(copy)
        work.say("comparing all state and all timers with the generation that runs")
        try:
            require_same(work.spark, (home.checkpoint, at), (copy, after), work.say)
        except FleetError as error:
            raise FleetError(
                f"{error}; generation {made.number} is discarded, and nothing has changed", code="generation-discarded"
            ) from error
    except BaseException:
        discard_generation(home.lifecycle, made)
        raise
    activate_or_hold(work, made, at)
    return made


def rollback(work: StateOperation, to: int | None = None) -> Generation | None:
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
            f"to be done; to go elsewhere, name it: ./fleet state rollback --to NUMBER",
            code="rollback-already-done",
        )
    chosen = record.predecessor() if to is None else record.of(to)
    if chosen is None or chosen.status != RETIRED or not checkpoint_of(home.lifecycle, chosen.number).exists():
        kept = [str(one.number) for one in record.known.values() if one.status == RETIRED]
        raise FleetError(
            f"there is no generation {to or 'before this one'} to go back to; kept are: {', '.join(kept) or 'none'}"
            + (f"; name one: ./fleet state rollback --to {kept[-1]}" if kept else ""),
            code="rollback-generation-unknown",
        )
    require_own(home, chosen.number)
    folder = checkpoint_of(home.lifecycle, chosen.number)
    then = position_after(folder)
    work.say(
        f"generation {chosen.number} stopped after batch {then.batch}: {chosen.key_groups} key groups, {then.partitions} "
        f"partitions, stored form {chosen.form}; a new generation goes on from there"
    )
    others = _know_others(work, chosen.number, present.number)
    if work.dry:
        return None
    at = drain(work.spark, home, work.say)
    rows = state_of(work.spark, home, chosen, then)
    source = {"generation": chosen.number, "batch": then.batch}
    plan = GenerationSpec("rollback", source, rows, then.version, chosen.key_groups, then.partitions, chosen.form, chosen=others)
    made = make(work.spark, home, plan, at, work.say)
    activate_or_hold(work, made, at)
    return made


def _know_others(work: StateOperation, one: int, other: int) -> bool:
    """Whether either of two generations was made of chosen devices, and the other was not; say so."""
    record = load_generations(work.home.lifecycle)
    others = record.choices_in(one) != record.choices_in(other)
    if others:
        work.say(f"generations {one} and {other} know different devices: they are not compared")
    return others


def bootstrap(
    work: StateOperation, snapshot: SnapshotInfo, only: str | None = None, *, damaged: bool = False
) -> Generation | None:
    """Go on from a snapshot.

    Args:
        work: what to work with.
        snapshot: which.
        only: an SQL condition on the columns of `DEVICE_SNAPSHOTS`: the devices to begin with; None takes all.
        damaged: whether the current state cannot be read: then it is neither finished nor compared with. Where its logs of
            batches do not say where it stopped, what was said since the snapshot tells what is still to be said.

    Raises:
        FleetError: it cannot be read, the condition is none, no device is left, or bronze is no longer kept from there.
    """
    home = work.home
    assert snapshot.version is not None, "it was read from the table"
    if only is not None and damaged:
        raise FleetError(
            "--only takes what devices have come to from the present state, which --damaged says cannot be read: leave --only",
            code="option-conflict",
        )
    with reporting_corruption_of_snapshot(home, snapshot.version):
        return _from_rows(work, snapshot, read_snapshot(work.spark, home, snapshot.version), only, damaged=damaged)


def _from_rows(work: StateOperation, snapshot: SnapshotInfo, rows: Rows, only: str | None, *, damaged: bool) -> Generation | None:
    home = work.home
    chosen = rows.each.filter(F.col("part") == DEVICE) if only is None else fitting(rows.each, only)
    devices = chosen.count()
    if not devices and snapshot.devices:
        raise FleetError(
            f'no device of snapshot version {snapshot.version} fits "{only}"; got 0 of {snapshot.devices:,}',
            code="condition-fits-none",
        )
    current = home.generation()
    work.say(
        f"snapshot version {snapshot.version} of generation {snapshot.generation} after batch {snapshot.batch}: "
        f"{devices:,} of {snapshot.devices:,} devices; bronze is read from version {snapshot.bronze}"
    )
    others = _know_others(work, snapshot.generation, current.number)
    stopped, why = where_it_stopped(home) if damaged else (position_after(home.checkpoint), "")
    if stopped is None:
        return _by_what_was_said(work, snapshot, rows, why, others=others)
    if damaged:
        work.say(
            f"the state is not read, and nothing is compared; generation {current.number} stopped after batch {stopped.batch}"
        )
    if work.dry:
        return None
    flush_outbox(home, current.number)
    at = stopped if damaged else drain(work.spark, home, work.say)
    source = {"snapshot": snapshot.version, "generation": snapshot.generation, "batch": snapshot.batch, "only": only}
    bronze = snapshot.bronze
    if only is not None:  # the snapshot chooses; what they have come to since is the present state
        rows, bronze = rows_as_given(these(state_of(work.spark, home, current, at).each, chosen)), at.version
    plan = GenerationSpec("bootstrap", source, rows, bronze, current.key_groups, at.partitions, current.form,
                chosen=damaged or others or only is not None)  # fmt: skip
    made = make(work.spark, home, plan, at, work.say)
    activate_or_hold(work, made, at)
    return made


def _by_what_was_said(work: StateOperation, snapshot: SnapshotInfo, rows: Rows, why: str, *, others: bool) -> Generation | None:
    """Go on from a snapshot where nobody knows where the current generation stopped."""
    home, current = work.home, work.home.generation()
    work.say(
        f"where generation {current.number} stopped is not known: {why}; so all since the snapshot is judged again, and of that "
        f"is said what is not in judgements; the state is compared with nothing"
    )
    if others:
        raise FleetError(
            f"generation {current.number} knows other devices than snapshot version {snapshot.version} of generation "
            f"{snapshot.generation}: what was said since does not follow from it; name a snapshot of the devices that it knows",
            code="snapshot-devices-differ",
        )
    if work.holds or work.gate is not None:
        raise FleetError(
            "what was not said is said when the generation has the work, so it is neither held nor looked at before that: leave "
            "--hold and --gate, and look afterwards: ./fleet quality run",
            code="option-conflict",
        )
    require_since(home, snapshot)
    if work.dry:
        return None
    flush_outbox(home, current.number)
    source = {"snapshot": snapshot.version, "generation": snapshot.generation, "batch": snapshot.batch, "only": None}
    partitions = partitions_of(home.checkpoint) or int(str(work.spark.conf.get("spark.sql.shuffle.partitions")))
    plan = GenerationSpec("bootstrap", source, rows, snapshot.bronze, current.key_groups, partitions, current.form)
    return go_on(work.spark, home, plan, snapshot, work.say)


def bootstrap_devices(work: StateOperation, listed: Listed, named: str) -> Generation | None:
    """Go on with the devices of a list, none of which has been heard: they are silent from their registration on.

    What waits for its time stays, and is judged when that comes.

    Args:
        work: what to work with.
        listed: see `device_bootstrap.devices_at`.
        named: where the list is from.

    Raises:
        FleetError: the list is empty, or has faults.
    """
    home = work.home
    current, before = home.generation(), position_after(home.checkpoint)
    devices = devices_at(listed, _frontier_ms(home, before))
    work.say(f"{len(devices):,} devices of {named}; bronze is read from version {before.version}")
    if work.dry:
        return None
    at = drain(work.spark, home, work.say)
    known = world(home, at.newest_ms)
    assert known is not None, "what was judged was received"
    state = state_of(work.spark, home, current, at).each
    rows = rows_as_given(rows_of_devices(work.spark, state, listed, known, home.deployment()))
    own = any(devices[field.name].null_count < len(devices) for field in LIMIT_FIELDS)
    source = {"devices": named, "own_limits": own, "generation": current.number, "batch": at.batch}
    plan = GenerationSpec("bootstrap", source, rows, at.version, current.key_groups, at.partitions, current.form, chosen=True)
    made = make(work.spark, home, plan, at, work.say)
    activate_or_hold(work, made, at)
    return made


def _frontier_ms(home: Home, at: CheckpointPosition) -> int | None:
    """Return up to which a generation will be judged when what it has begun is finished; while it is at it, no less."""
    known = shards(home, at.newest_ms if unfinished(home.checkpoint) is None else None)
    return None if known is None else known.frontier_ms
