"""Operations that replace the whole state of the lifecycle job.

Each builds a generation, checks it, and activates it.

Rule 1: the caller holds the lock of the state during an operation.
Rule 2: the plan is complete before anything is changed; a dry run ends there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from batch.common.progress import ReportProgress
from batch.state.checkpoint_copy import copy_checkpoint, require_same
from batch.state.device_bootstrap import devices_at, rows_of_devices
from batch.state.device_filter import keep_devices, matching_devices
from batch.state.generation import GenerationSpec, activate, build_and_check, discarded_on_failure, drain, state_of
from batch.state.handoff import hold
from batch.state.recover import recover_from_snapshot, require_judgements_since, where_it_stopped
from fleetpulse.columnar.codec.versions import STORED_FORM, WRITTEN_FORMS
from fleetpulse.columnar.snapshot.bootstrap import LIMIT_FIELDS
from fleetpulse.columnar.snapshot.rows import DEVICE
from fleetpulse.core.errors import FleetError
from fleetpulse.core.operations.device_filter import DeviceFilter
from fleetpulse.core.operations.dropped_devices import describe_dropped, require_dropped_at_most
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition, partitions_of, position_after, unfinished
from fleetpulse.io.checkpoints.generations import (
    REPARTITION,
    RETIRED,
    Generation,
    begin_generation,
    checkpoint_of,
    load_generations,
)
from fleetpulse.io.home.checkpoint_ownership import require_own
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.state_reader import SnapshotRows, read_snapshot, reporting_corruption_of_snapshot, rows_as_given
from fleetpulse.io.tables.outbox import flush_outbox
from fleetpulse.io.tables.snapshots import SnapshotInfo
from fleetpulse.reports.effective_policy import evaluation_context
from fleetpulse.reports.frontiers import shards

Listed = Callable[[int | None], pa.Table]
_MOST_GROUPS: Final = 100_000
_MOST_PARTITIONS: Final = 10_000
_SHOWN_OF_FILTER: Final = 200  # characters


@dataclass(frozen=True, slots=True)
class StateOperation:
    """Context of a state operation.

    Attributes:
        session: Spark session, or a function that starts one, as a plan may need none.
        home: the home.
        report: callback for progress lines.
        dry: whether to report the plan only and change nothing.
        holds: whether to hold the new generation for inspection; ``./fleet state switch`` activates
            it later.
        gate: check of the new generation before it is activated or held, which raises to reject it;
            None makes no further check.
    """

    session: SparkSession | Callable[[], SparkSession]
    home: Home
    report: ReportProgress
    dry: bool = False
    holds: bool = False
    gate: Callable[["StateOperation", Generation], None] | None = None

    @property
    def spark(self) -> SparkSession:
        """The Spark session, started on first use if `session` is a function."""
        return self.session if isinstance(self.session, SparkSession) else self.session()


def activate_or_hold(work: StateOperation, generation: Generation, at: CheckpointPosition) -> None:
    """Activate or hold a checked generation, or discard it if the gate rejects it.

    Raises:
        FleetError: the gate rejects the generation.
    """
    if work.gate is not None:
        with discarded_on_failure(work.home, generation):
            work.report(f"checking generation {generation.number} before the switch")
            work.gate(work, generation)
    (hold if work.holds else activate)(work.home, generation, at, work.report)


def rescale(work: StateOperation, key_groups: int) -> Generation | None:
    """Make a generation with another number of key groups.

    Raises:
        FleetError: the number is out of range, or the current one.
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
    return _rebuild(work, "rescale", key_groups=key_groups)


def migrate(work: StateOperation, form: int = STORED_FORM) -> Generation | None:
    """Make a generation that writes another stored form.

    Raises:
        FleetError: this version cannot write the form, or the current generation already does.
    """
    check_form(work.home, form)
    return _rebuild(work, "migrate", form=form)


def check_form(home: Home, form: int) -> None:
    """Check that a migration to a stored form is possible and needed.

    Raises:
        FleetError: this version cannot write the form, or the current generation already does.
    """
    if form not in WRITTEN_FORMS:
        raise FleetError(
            f"this version writes the stored forms {', '.join(map(str, WRITTEN_FORMS))}; got {form}",
            code="state-version-unwritable",
        )
    current = home.generation()
    if form == current.form:
        raise FleetError(
            f"generation {current.number} writes stored form {form} already; nothing to do",
            code="state-version-unchanged",
        )


def repartition_anew(work: StateOperation, partitions: int) -> Generation | None:
    """Make a generation with another number of partitions, from the rows of the state."""
    _check_partitions(work.home, partitions)
    return _rebuild(work, "repartition --anew", partitions=partitions)


def _check_partitions(home: Home, partitions: int) -> None:
    if not 1 <= partitions <= _MOST_PARTITIONS:
        raise FleetError(
            f"the state has 1 to {_MOST_PARTITIONS:,} partitions; got {partitions}; one or two per core are usual",
            code="partitions-out-of-range",
        )
    if partitions == position_after(home.checkpoint).partitions:
        raise FleetError(f"the state has {partitions} partitions already; nothing to do", code="partitions-unchanged")


def _rebuild(
    work: StateOperation, verb: str, *, key_groups: int | None = None, partitions: int | None = None, form: int | None = None
) -> Generation | None:
    """Make a generation from the state of the current one, with other parameters."""
    current, before = work.home.generation(), position_after(work.home.checkpoint)
    parameters = (key_groups or current.key_groups, partitions or before.partitions, form or current.form)
    work.report(
        f"generation {current.number}: {current.key_groups} key groups, {before.partitions} partitions, stored form "
        f"{current.form}; the next: {parameters[0]} key groups, {parameters[1]} partitions, stored form {parameters[2]}"
    )
    if work.dry:
        return None
    at = drain(work.spark, work.home, work.report)
    rows = state_of(work.spark, work.home, current, at)
    source = {"generation": current.number, "batch": at.batch}
    plan = GenerationSpec(verb, source, rows, at.version, key_groups=parameters[0], partitions=parameters[1], form=parameters[2])
    generation = build_and_check(work.spark, work.home, plan, at, work.report)
    activate_or_hold(work, generation, at)
    return generation


def repartition(work: StateOperation, partitions: int) -> Generation | None:
    """Repartition a copy of the checkpoint, and make it a generation.

    Spark's offline repartitioning works on the copy, which is then compared with the original.

    Raises:
        FleetError: the number is out of range, or the current one, or the copy differs.
    """
    home = work.home
    _check_partitions(home, partitions)
    before = position_after(home.checkpoint)
    work.report(f"partitions of the state: {before.partitions} before, {partitions} after")
    if work.dry:
        return None
    at, current = drain(work.spark, home, work.report), home.generation()
    generation = begin_generation(
        home.lifecycle, current, key_groups=current.key_groups, form=current.form, made_by=REPARTITION,
        made_from={"generation": current.number, "batch": at.batch},
    )  # fmt: skip
    copy = checkpoint_of(home.lifecycle, generation.number)
    with discarded_on_failure(home, generation):
        work.report(f"copying generation {current.number} to generation {generation.number}")
        copy_checkpoint(home.checkpoint, copy, work.report)
        work.report("repartitioning the copy")
        work.spark._streamingCheckpointManager.repartition(str(copy), partitions)  # noqa: SLF001 - Spark has no public API yet
        after = position_after(copy)
        work.report("comparing all state and all timers with the running generation")
        try:
            require_same(work.spark, (home.checkpoint, at), (copy, after), work.report)
        except FleetError as error:
            raise FleetError(
                f"{error}; generation {generation.number} is discarded, and nothing has changed", code="generation-discarded"
            ) from error
    activate_or_hold(work, generation, at)
    return generation


def rollback(work: StateOperation, to: int | None = None) -> Generation | None:
    """Roll back: make a generation from the state of a retired one.

    The new generation has the parameters of the retired one, and starts at the position at which
    that one stopped. It is not compared with the current one if the two were made of different
    devices.

    Args:
        work: context of the operation.
        to: number of the retired generation; None takes the predecessor of the current one.

    Raises:
        FleetError: the generation does not exist or was pruned, or the current one is the result of
            a rollback and `to` is None.
    """
    home = work.home
    record = load_generations(home.lifecycle)
    present = home.generation()
    if to is None and present.made_by == "rollback":
        raise FleetError(
            f"generation {present.number} already results from a rollback to generation {present.made_from.get('generation')}; "
            f"nothing to do; for another generation, name it: ./fleet state rollback --to NUMBER",
            code="rollback-already-done",
        )
    chosen = record.predecessor() if to is None else record.of(to)
    if chosen is None or chosen.status != RETIRED or not checkpoint_of(home.lifecycle, chosen.number).exists():
        retired = [str(one.number) for one in record.known.values() if one.status == RETIRED]
        raise FleetError(
            f"there is no generation {to or 'before this one'} to roll back to; kept are: {', '.join(retired) or 'none'}"
            + (f"; name one: ./fleet state rollback --to {retired[-1]}" if retired else ""),
            code="rollback-generation-unknown",
        )
    require_own(home, chosen.number)
    folder = checkpoint_of(home.lifecycle, chosen.number)
    then = position_after(folder)
    work.report(
        f"generation {chosen.number} stopped after batch {then.batch}: {chosen.key_groups} key groups, {then.partitions} "
        f"partitions, stored form {chosen.form}; a new generation continues from there"
    )
    others = _have_other_devices(work, chosen.number, present.number)
    if work.dry:
        return None
    at = drain(work.spark, home, work.report)
    rows = state_of(work.spark, home, chosen, then)
    source = {"generation": chosen.number, "batch": then.batch}
    plan = GenerationSpec(
        "rollback", source, rows, then.version, chosen.key_groups, then.partitions, chosen.form, has_other_devices=others
    )
    generation = build_and_check(work.spark, home, plan, at, work.report)
    activate_or_hold(work, generation, at)
    return generation


def _have_other_devices(work: StateOperation, one: int, other: int) -> bool:
    """Return whether two generations were made of different devices, and report it."""
    record = load_generations(work.home.lifecycle)
    others = record.with_chosen_devices(one) != record.with_chosen_devices(other)
    if others:
        work.report(f"generations {one} and {other} have different devices; they are not compared")
    return others


def bootstrap(
    work: StateOperation,
    snapshot: SnapshotInfo,
    only: DeviceFilter | None = None,
    *,
    damaged: bool = False,
    drops_at_most: int | None = None,
) -> Generation | None:
    """Make a generation from a snapshot.

    Args:
        work: context of the operation.
        snapshot: snapshot to start from.
        only: filter that selects the devices, taken in their current state; None takes all devices
            as in the snapshot.
        damaged: whether the current state cannot be read. It is then neither drained nor compared.
            If its checkpoint logs are lost, too, the judgements emitted since the snapshot show
            which judgements are missing, see `recover`.
        drops_at_most: largest permitted number of dropped devices; None for any number.

    Raises:
        FleetError: the snapshot cannot be read, no device fits the filter, too many devices would
            be dropped, or bronze is no longer complete from the snapshot on.
    """
    home = work.home
    assert snapshot.version is not None, "a snapshot in the table has a version"
    if only is not None and damaged:
        raise FleetError(
            "--only needs the present state of the devices, and --damaged declares that state unreadable; omit --only",
            code="option-conflict",
        )
    with reporting_corruption_of_snapshot(home, snapshot.version):
        rows = read_snapshot(work.spark, home, snapshot.version)
        return _from_rows(work, snapshot, rows, only, damaged=damaged, drops_at_most=drops_at_most)


def _from_rows(
    work: StateOperation,
    snapshot: SnapshotInfo,
    rows: SnapshotRows,
    only: DeviceFilter | None,
    *,
    damaged: bool,
    drops_at_most: int | None,
) -> Generation | None:
    home = work.home
    chosen = rows.each.filter(F.col("part") == DEVICE) if only is None else matching_devices(rows.each, only)
    devices = chosen.count()
    if not devices and snapshot.devices:
        wanted = "true" if only is None else only.text[:_SHOWN_OF_FILTER]
        raise FleetError(
            f'no device of snapshot version {snapshot.version} fits "{wanted}"; got 0 of {snapshot.devices:,}; '
            f"correct the filter",
            code="filter-fits-none",
        )
    current = home.generation()
    work.report(
        f"snapshot version {snapshot.version} of generation {snapshot.generation} after batch {snapshot.batch}: "
        f"{devices:,} of {snapshot.devices:,} devices; bronze is read from version {snapshot.bronze}"
    )
    others = _have_other_devices(work, snapshot.generation, current.number)
    stopped, why = where_it_stopped(home) if damaged else (position_after(home.checkpoint), "")
    if stopped is None:
        return _recover_from_judgements(work, snapshot, rows, why, others=others)
    if damaged:
        work.report(f"the state is neither read nor compared; generation {current.number} stopped after batch {stopped.batch}")
    if work.dry or drops_at_most is not None:
        dropped = _count_dropped(work, chosen, damaged=damaged) if others or only is not None else 0
        if drops_at_most is not None:
            require_dropped_at_most(dropped, drops_at_most)
        if work.dry:
            work.report(describe_dropped(dropped))
            return None
    flush_outbox(home, current.number)
    at = stopped if damaged else drain(work.spark, home, work.report)
    text = None if only is None else only.text
    source = {"snapshot": snapshot.version, "generation": snapshot.generation, "batch": snapshot.batch, "only": text}
    bronze = snapshot.bronze
    if only is not None:  # the snapshot only selects the devices; their state is the present one
        rows, bronze = rows_as_given(keep_devices(state_of(work.spark, home, current, at).each, chosen)), at.version
    plan = GenerationSpec("bootstrap", source, rows, bronze, current.key_groups, at.partitions, current.form,
                has_other_devices=damaged or others or only is not None)  # fmt: skip
    generation = build_and_check(work.spark, home, plan, at, work.report)
    activate_or_hold(work, generation, at)
    return generation


def _count_dropped(work: StateOperation, chosen: DataFrame, *, damaged: bool) -> int | None:
    """Count the devices of the current generation that are not chosen; None if its state is damaged.

    Without a filter, such a device comes back if it has sent messages since the snapshot.
    """
    if damaged:
        return None
    present = state_of(work.spark, work.home, work.home.generation()).each.filter(F.col("part") == DEVICE)
    return present.select("device_id").join(chosen.select("device_id"), "device_id", "left_anti").count()


def _recover_from_judgements(
    work: StateOperation, snapshot: SnapshotInfo, rows: SnapshotRows, why: str, *, others: bool
) -> Generation | None:
    """Make a generation from a snapshot if the current stop position is unknown."""
    home, current = work.home, work.home.generation()
    work.report(
        f"the stop position of generation {current.number} is unknown: {why}; replaying all messages since the snapshot and "
        f"emitting only the missing judgements; state comparison is skipped"
    )
    if others:
        raise FleetError(
            f"generation {current.number} has other devices than snapshot version {snapshot.version} of generation "
            f"{snapshot.generation}: the judgements since do not follow from it; name a snapshot with the same devices",
            code="snapshot-devices-differ",
        )
    if work.holds or work.gate is not None:
        raise FleetError(
            "the missing judgements are emitted right after the switch, so it can be neither held nor checked before; "
            "omit --hold and --gate, and check afterwards: ./fleet quality run",
            code="option-conflict",
        )
    require_judgements_since(home, snapshot)
    if work.dry:
        return None
    flush_outbox(home, current.number)
    source = {"snapshot": snapshot.version, "generation": snapshot.generation, "batch": snapshot.batch, "only": None}
    partitions = partitions_of(home.checkpoint) or int(str(work.spark.conf.get("spark.sql.shuffle.partitions")))
    plan = GenerationSpec("bootstrap", source, rows, snapshot.bronze, current.key_groups, partitions, current.form)
    return recover_from_snapshot(work.spark, home, plan, snapshot, work.report)


def bootstrap_devices(work: StateOperation, listed: Listed, named: str) -> Generation | None:
    """Make a generation with the devices of a list, as if none had sent a message yet.

    The silence of a device starts at its registration. Pending rows stay.

    Args:
        work: context of the operation.
        listed: list of devices, see `device_bootstrap.devices_at`.
        named: source of the list, for messages and the record of generations.

    Raises:
        FleetError: the list is empty, or has faults.
    """
    home = work.home
    current, before = home.generation(), position_after(home.checkpoint)
    devices = devices_at(listed, _frontier_ms(home, before))
    work.report(f"{len(devices):,} devices of {named}; bronze is read from version {before.version}")
    if work.dry:
        return None
    at = drain(work.spark, home, work.report)
    known = evaluation_context(home, at.newest_ms)
    assert known is not None, "a judged home has received rows"
    state = state_of(work.spark, home, current, at).each
    rows = rows_as_given(rows_of_devices(work.spark, state, listed, known, home.deployment()))
    own = any(devices[field.name].null_count < len(devices) for field in LIMIT_FIELDS)
    source = {"devices": named, "own_limits": own, "generation": current.number, "batch": at.batch}
    plan = GenerationSpec(
        "bootstrap", source, rows, at.version, current.key_groups, at.partitions, current.form, has_other_devices=True
    )
    generation = build_and_check(work.spark, home, plan, at, work.report)
    activate_or_hold(work, generation, at)
    return generation


def _frontier_ms(home: Home, at: CheckpointPosition) -> int | None:
    """Return the frontier of the current generation after a drain.

    If the newest batch is unfinished, return the frontier of all rows received, which is not earlier.
    """
    known = shards(home, at.newest_ms if unfinished(home.checkpoint) is None else None)
    return None if known is None else known.frontier_ms
