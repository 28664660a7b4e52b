"""Capacity model: resources of a fleet, computed from cost figures.

The resources are state, batches, cores, memory and storage.

Rule 1: a plan is a function of a fleet and of cost figures. The figures name their source.
Rule 2: tests compare planned bytes with real ones. Times depend on the machine and are not tested.

Source: docs/how-to/plan-capacity.md explains every formula and the reasons.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Final

from fleetpulse.core.times import DAY_MS, DAY_S
from fleetpulse.io.home.home import KEY_GROUPS
from fleetpulse.io.tables.adaptive_batching import FEW_ROWS
from fleetpulse.planning.partition_skew import busiest, most_even

MONTH_DAYS: Final = 30
DEVICES_A_GROUP: Final = (4_000, 32_000)  # least and greatest number of devices in a key group
_GROUPS_A_CORE: Final = (2, 5)  # least and greatest number of key groups per core of a new home with more than two cores
_SHARED_BY: Final = 2  # cores that share the fixed work of a batch, most of which the driver does
_MORE_GROUPS: Final = 3  # key groups that may be added for a better balance; or a quarter, if that is more
ROW_GROUP: Final = 131_072  # rows of a compacted file that share a dictionary
BUSY: Final = 0.6  # greatest long-term load of a core; the rest is for catching up
CORES_AN_EXECUTOR: Final = 4
VERSIONS: Final = 20  # state versions in a checkpoint (spark.sql.streaming.minBatchesToRetain)
SNAPSHOT_EVERY: Final = 10  # batches between two full copies of the state
_REMEMBERED_CODES: Final = 16  # maximum number of errors kept for a device, see core.policy.MAX_ERRORS
_PIECE_ROWS: Final = 2_000_000
SNAPSHOTS_A_DAY: Final = 24  # taken by the DAG fleet_snapshot; maintenance keeps one of each earlier day
_CHECKPOINTS: Final = 2  # of the active generation, and of the previous one for a rollback
_STATES_A_CHANGE: Final = 2  # counts that a mode change alters: of the mode before, and of the mode after
_MB: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Parquet:
    """Cost of a table's Parquet files.

    Attributes:
        file_bytes: fixed bytes of a file: footer and heads of dictionaries.
        row_bytes: bytes of a row.
        device_bytes: bytes of a device that a file (or row group) mentions: its id and hash, once.
    """

    file_bytes: float
    row_bytes: float
    device_bytes: float = 0.0

    def size(self, rows: float, devices: float = 0.0) -> float:
        """Return the size of a file in bytes; rows are spread evenly over devices."""
        return self.file_bytes + rows * self.row_bytes + mentioned(rows, devices) * self.device_bytes


@dataclass(frozen=True, slots=True)
class Figures:
    """Cost figures of devices, messages, batches and files.

    docs/how-to/plan-capacity.md names the commands that measured the defaults.

    Attributes:
        source: origin of the figures, for people.
        group_bytes: state of a key group without devices, bytes.
        device_bytes: state of a device without errors or mode changes, with an id of ``id_bytes``.
        changed_bytes: additional state of a device that has ever changed its mode, bytes.
        id_bytes: length of the device ids in the measurement; longer ids add their excess bytes.
        remembered_bytes: additional state of a device that ever sent an error, bytes.
        code_bytes: state of each of a device's last errors (at most 16), bytes.
        waiting_bytes: state of a pending message, bytes.
        landed: files of bronze as landing writes them.
        piece: files of bronze after compaction by `fleet maintain`.
        metrics_bytes: compressed share of the bytes of metrics.
        judgements: files of judgements.
        snapshot: files of a snapshot of devices.
        snapshot_waiting_bytes: pending message in a snapshot, bytes.
        health_bytes: row of ``stream_health``, bytes.
        quarantined_bytes: row of ``quarantine`` without its payload, bytes.
        current_bytes: row of ``device_current``, bytes.
        hourly_bytes: row of ``mode_hourly_site``, bytes.
        message_us: CPU time of the lifecycle job per message, microseconds.
        touched_us: CPU time of the lifecycle job per device heard in a batch, microseconds.
        batch_s: fixed CPU time of the lifecycle job per batch, seconds.
        ingest_us: CPU time of bridge and landing per message, microseconds.
        write_bytes_per_s: write rate of a partition's state.
        commit_s: fixed duration of a checkpoint, seconds.
        heap_bytes: JVM heap, bytes.
        worker_bytes: memory of a Python worker without a key group, bytes.
        working_bytes: memory of a device in a key group that is being folded, bytes.
    """

    source: str = "the defaults"
    group_bytes: float = 2_110
    device_bytes: float = 17.6
    changed_bytes: float = 11.4
    id_bytes: float = 15
    remembered_bytes: float = 16.8
    code_bytes: float = 0.4
    waiting_bytes: float = 28.9
    landed: Parquet = field(default_factory=lambda: Parquet(6_030, 19.2, 8.8))
    piece: Parquet = field(default_factory=lambda: Parquet(0, 22.7, 6.8))
    metrics_bytes: float = 0.17
    judgements: Parquet = field(default_factory=lambda: Parquet(6_400, 17.8))
    snapshot: Parquet = field(default_factory=lambda: Parquet(25_200, 71.1))
    snapshot_waiting_bytes: float = 30.8
    health_bytes: float = 254
    quarantined_bytes: float = 60
    current_bytes: float = 25
    hourly_bytes: float = 1.7
    message_us: float = 1.4
    touched_us: float = 1.2
    batch_s: float = 0.6
    ingest_us: float = 13.0
    write_bytes_per_s: float = 100 * _MB
    commit_s: float = 0.1
    heap_bytes: float = 1_024 * 1_024 * 1_024
    worker_bytes: float = 250 * _MB
    working_bytes: float = 1_000


@dataclass(frozen=True, slots=True)
class Fleet:
    """Load of a fleet, for which resources are planned.

    Attributes:
        devices: number of devices.
        interval_ms: time between two messages of a device, milliseconds.
        lateness_ms: allowed lateness, for which messages are pending, milliseconds.
        error_share: share of messages that are errors.
        late_share: share of messages that are late.
        copy_share: share of messages that are duplicates.
        refused_share: share of messages that cannot be decoded.
        changes_a_day: mode changes per device and day.
        metrics_bytes: average size of a message's metrics, bytes.
        id_bytes: length of a device's id, bytes.
        batch_every_ms: minimum interval between the starts of two batches, setting ``batch_every``.
        held_ms: time for which messages wait for their batch while there are fewer than `FEW_ROWS`,
            milliseconds; see `io.tables.adaptive_batching`.
        tolerance: share of a batch's time that its checkpoint may take.
        keep_days: retention of messages, days; None: no limit.
        keep_snapshot_days: retention of daily snapshots, days; None: no limit.
        bytes_a_message: bytes of bronze per message, if measured; None uses the cost figures.
    """

    devices: int
    interval_ms: int = 60_000
    lateness_ms: int = 60_000
    error_share: float = 0.01
    late_share: float = 0.002
    copy_share: float = 0.01
    refused_share: float = 0.001
    changes_a_day: float = 0.2
    metrics_bytes: float = 12
    id_bytes: float = 15
    batch_every_ms: int = 200
    held_ms: int = 6_000
    tolerance: float = 0.1
    keep_days: float | None = 90
    keep_snapshot_days: float | None = 90
    bytes_a_message: float | None = None

    @property
    def messages_per_s(self) -> float:
        """Messages per second, with duplicates."""
        return self.devices * 1000 / self.interval_ms * (1 + self.copy_share)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Resources that a fleet needs.

    Attributes:
        messages_per_s: messages per second.
        key_groups: number of key groups; a new home has `first_key_groups`.
        devices_a_group: devices per key group.
        groups_a_core: key groups per core, on a cluster per core of the executors.
        skew: key groups of the busiest partition, relative to the mean.
        partitions: state partitions, fixed with a checkpoint's first batch.
        cores: CPU cores of the lifecycle job.
        executors: executors with these cores, on a cluster.
        ingest_cores: CPU cores of bridge and landing.
        bridges: bridges that share the fleet's messages.
        state_bytes: newest version of the state: devices and pending messages.
        checkpoint_bytes: all state versions in the checkpoint, before compression.
        batch_s: duration of a batch, seconds.
        checkpoint_s: part of ``batch_s`` that the checkpoint takes, seconds.
        checkpoint_every: batches per checkpoint, to stay within the tolerance.
        memory_bytes: memory of the lifecycle job.
        storage: bytes by table, and of checkpoints, at the end of the planned period.
    """

    messages_per_s: float
    key_groups: int
    devices_a_group: float
    groups_a_core: float
    skew: float
    partitions: int
    cores: int
    executors: int
    ingest_cores: int
    bridges: int
    state_bytes: float
    checkpoint_bytes: float
    batch_s: float
    checkpoint_s: float
    checkpoint_every: int
    memory_bytes: float
    storage: dict[str, float]

    def as_rows(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "storage"}
        fractions = ("groups_a_core", "skew")
        rounded = {
            name: round(value, 3) if name.endswith("_s") or name in fractions else round(value) for name, value in plain.items()
        }
        return {**rounded, "storage_bytes": {table: round(size) for table, size in self.storage.items()}}


def mentioned(rows: float, devices: float) -> float:
    """Return the expected number of distinct devices in ``rows`` evenly spread rows."""
    return devices * -math.expm1(-rows / devices) if devices else 0.0


def first_key_groups(cores: int) -> int:
    """Return the number of key groups of a new home, whose number of devices is unknown.

    Up to two cores have 8. More cores have two to five each, by the number that Spark distributes
    most evenly among as many partitions.
    """
    if cores <= _SHARED_BY:
        return KEY_GROUPS
    least, most = _GROUPS_A_CORE
    return most_even(max(KEY_GROUPS, least * cores), most * cores, cores)


def key_groups(devices: int, partitions: int) -> int:
    """Return the number of key groups: few, but enough to keep every partition busy.

    A key group has at most 32,000 devices. Each call for a group has a fixed cost of some
    milliseconds, so fewer groups are cheaper. Up to a quarter more groups, or three, are chosen if
    Spark distributes them more evenly: a batch takes as long as its busiest partition. With more
    than two partitions there are at least as many groups as in a new home.
    """
    least, most = DEVICES_A_GROUP
    groups = max(1, math.ceil(devices / most))
    if groups < partitions and devices >= least * partitions:
        groups = partitions
    groups = max(groups, min(partitions, 2))
    chosen = most_even(groups, max(groups + _MORE_GROUPS, groups * 5 // 4), partitions)
    return max(chosen, first_key_groups(partitions)) if partitions > _SHARED_BY else chosen


def group_bytes(devices: float, heard: float, changed: float, fleet: Fleet, figures: Figures) -> float:
    """Return the size of a key group's block in bytes.

    Args:
        devices: number of devices in the group.
        heard: messages of each device since its life started.
        changed: share of the devices that have ever changed their mode.
        fleet: load of the fleet.
        figures: cost figures.
    """
    errors = fleet.error_share * heard
    remembering = -math.expm1(-errors)
    codes = _bounded_mean(errors, _REMEMBERED_CODES)
    each = figures.device_bytes + max(0.0, fleet.id_bytes - figures.id_bytes)
    each += changed * figures.changed_bytes + remembering * figures.remembered_bytes + codes * figures.code_bytes
    return figures.group_bytes + devices * each


def _bounded_mean(mean: float, most: int) -> float:
    """Return the mean of a Poisson variable that is capped at ``most``."""
    if mean > 4 * most:
        return float(most)
    chance, below, found = math.exp(-mean), 0.0, 0.0
    for number in range(most):
        found += number * chance
        below += chance
        chance *= mean / (number + 1)
    return found + most * (1 - below)


def state_bytes(fleet: Fleet, figures: Figures, groups: int) -> float:
    """Return the size of the newest state version after a month, in bytes.

    It consists of the blocks and the pending messages.
    """
    heard = MONTH_DAYS * DAY_MS / fleet.interval_ms
    changed = -math.expm1(-fleet.changes_a_day / 2 * MONTH_DAYS)  # half the changes: each is followed by a change back
    blocks = groups * group_bytes(fleet.devices / groups, heard, changed, fleet, figures)
    return blocks + fleet.messages_per_s * fleet.lateness_ms / 1000 * figures.waiting_bytes


def batch_cpu_s(fleet: Fleet, figures: Figures, batch_s: float) -> float:
    """Return the CPU seconds of a batch with the messages of ``batch_s`` seconds."""
    return figures.batch_s + _messages_cpu_s(fleet, figures, batch_s)


def _messages_cpu_s(fleet: Fleet, figures: Figures, batch_s: float) -> float:
    messages = fleet.messages_per_s * batch_s
    touched = mentioned(messages, fleet.devices)
    return (messages * figures.message_us + touched * figures.touched_us) / 1e6


def batch_time_s(fleet: Fleet, figures: Figures, cores: int, skew: float = 1.0) -> float:
    """Return the stable duration of batches; infinity if the cores do not suffice.

    Each batch reads the messages that were received during the previous batch. At most two cores
    share the fixed work of a batch. The core with the busiest partition finishes last.

    Args:
        fleet: load of the fleet.
        figures: cost figures.
        cores: cores of the lifecycle job.
        skew: work of the busiest partition, relative to the mean.
    """
    fixed_s = figures.batch_s / min(cores, _SHARED_BY)
    least_s = batch_s = max(fleet.batch_every_ms, min(fleet.held_ms, FEW_ROWS * 1000 / max(fleet.messages_per_s, 1e-9))) / 1000
    for _ in range(500):
        needed_s = max(least_s, fixed_s + _messages_cpu_s(fleet, figures, batch_s) * skew / cores)
        if abs(needed_s - batch_s) < 1e-4:
            return needed_s
        if needed_s > 3_600:
            break
        batch_s = needed_s
    return math.inf


def cores_needed(fleet: Fleet, figures: Figures) -> int:
    """Return the least number of cores that messages alone load by at most 60 %."""
    worst_us = figures.message_us + figures.touched_us  # worst case: each device once in a batch
    return max(2, math.ceil(fleet.messages_per_s * worst_us / 1e6 / BUSY))


def plan(fleet: Fleet, figures: Figures, days: int = MONTH_DAYS, cores: int | None = None) -> CapacityPlan:
    """Compute the resources that a fleet needs.

    Args:
        fleet: load of the fleet.
        figures: cost figures.
        days: planned period; the storage is that at its end.
        cores: cores of the lifecycle job; None takes the least number that suffices.
    """
    cores = cores or cores_needed(fleet, figures)
    groups = key_groups(fleet.devices, cores)
    skew = busiest(groups, cores)
    batch_s = batch_time_s(fleet, figures, cores, skew)
    state = state_bytes(fleet, figures, groups)
    waiting = fleet.messages_per_s * fleet.lateness_ms / 1000 * figures.waiting_bytes
    active = min(1.0, fleet.messages_per_s * batch_s / groups)  # share of the groups that a batch writes
    checkpoint_s = figures.commit_s + ((state - waiting) * active / cores) / figures.write_bytes_per_s
    ingest = fleet.messages_per_s * figures.ingest_us / 1e6 / BUSY
    written = (state - waiting) * active
    largest = fleet.devices / groups * figures.working_bytes
    checkpoint = state * math.ceil(VERSIONS / SNAPSHOT_EVERY + 1) + written * VERSIONS
    return CapacityPlan(
        messages_per_s=fleet.messages_per_s,
        key_groups=groups,
        devices_a_group=fleet.devices / groups,
        groups_a_core=groups / cores,
        skew=skew,
        partitions=cores,
        cores=cores,
        executors=math.ceil(cores / CORES_AN_EXECUTOR),
        ingest_cores=max(1, math.ceil(ingest)),
        bridges=max(1, math.ceil(ingest)),
        state_bytes=state,
        checkpoint_bytes=checkpoint,
        batch_s=batch_s,
        checkpoint_s=checkpoint_s,
        checkpoint_every=max(1, math.ceil(checkpoint_s / (batch_s * fleet.tolerance))),
        memory_bytes=figures.heap_bytes + cores * (figures.worker_bytes + largest) + state,
        storage={**storage(fleet, figures, groups, batch_s, days), "checkpoints": _CHECKPOINTS * checkpoint},
    )


def message_bytes(fleet: Fleet, figures: Figures, rows: float, *, landed: bool) -> float:
    """Return the bytes of a message in a file with ``rows`` rows."""
    if fleet.bytes_a_message is not None:
        return fleet.bytes_a_message
    files, metrics = figures.landed if landed else figures.piece, fleet.metrics_bytes * figures.metrics_bytes
    of_a_dictionary = min(rows, ROW_GROUP)
    return files.size(of_a_dictionary, fleet.devices) / of_a_dictionary + metrics


def snapshot_bytes(fleet: Fleet, figures: Figures) -> float:
    """Return the bytes of a snapshot: one row per device and per pending message."""
    waiting = fleet.messages_per_s * fleet.lateness_ms / 1000
    longer_ids = max(0.0, fleet.id_bytes - figures.id_bytes)
    return figures.snapshot.size(fleet.devices) + fleet.devices * longer_ids + waiting * figures.snapshot_waiting_bytes


def snapshots_kept(fleet: Fleet, days: int) -> float:
    """Return the number of snapshots after ``days``, with `fleet maintain` applied."""
    kept_days = days if fleet.keep_snapshot_days is None else min(days, fleet.keep_snapshot_days)
    return SNAPSHOTS_A_DAY + max(0.0, kept_days - 1)


def storage(fleet: Fleet, figures: Figures, groups: int, batch_s: float, days: int) -> dict[str, float]:
    """Return the bytes of each table after ``days``, with `fleet maintain` applied."""
    a_day = fleet.messages_per_s * DAY_S
    kept_days = days if fleet.keep_days is None else min(days, fleet.keep_days)
    batches = days * DAY_S / batch_s if batch_s else 0.0
    found = fleet.devices * fleet.changes_a_day * days + a_day * days * (fleet.late_share + fleet.copy_share)
    summaries = min(fleet.devices * fleet.changes_a_day * min(days, 30), batches * groups)
    payload = 60 + fleet.metrics_bytes
    return {
        "messages": a_day * kept_days * message_bytes(fleet, figures, _PIECE_ROWS, landed=False),
        "judgements": (found + summaries) * figures.judgements.row_bytes,
        "quarantine": a_day * kept_days * fleet.refused_share * (figures.quarantined_bytes + payload),
        "device_snapshots": snapshots_kept(fleet, days) * snapshot_bytes(fleet, figures),
        "device_current": fleet.devices * (figures.current_bytes + max(0.0, fleet.id_bytes - figures.id_bytes)),
        "mode_hourly_site": _STATES_A_CHANGE * fleet.devices * fleet.changes_a_day * days * figures.hourly_bytes,
        "stream_health": min(batches, 7 * DAY_S / batch_s if batch_s else 0.0) * figures.health_bytes,
    }
