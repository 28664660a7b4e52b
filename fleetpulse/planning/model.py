"""What a fleet will need, worked out from what one device and one message cost: state, batches, cores, memory, storage.

Rule 1: a plan is a function of a fleet and of figures; where the figures come from is said beside them.
Rule 2: bytes are held against real ones in the tests; times are one machine's and are only printed.

Source: docs/planning.md has every formula, in words and with its reasons.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Final

from fleetpulse.io.tables.adaptive_batching import FEW_ROWS
from fleetpulse.planning.partition_skew import busiest

DAY_MS: Final = 86_400_000
MONTH_DAYS: Final = 30
DEVICES_A_GROUP: Final = (4_000, 32_000)  # least, most
_MORE_GROUPS: Final = 3  # than the fewest, or a quarter, where that balances
ROW_GROUP: Final = 131_072  # rows of a piece that have a dictionary of their own
BUSY: Final = 0.6  # of a core at most, in the long run: the rest is for catching up
CORES_AN_EXECUTOR: Final = 4
VERSIONS: Final = 20  # of state that a checkpoint keeps (spark.sql.streaming.minBatchesToRetain)
SNAPSHOT_EVERY: Final = 10  # batches between two whole copies of the state
_REMEMBERED_CODES: Final = 16  # the most errors of a device, see core.policy.MAX_ERRORS
_PIECE_ROWS: Final = 2_000_000
SNAPSHOTS_A_DAY: Final = 24  # that the DAG fleet_snapshot takes; of days before the last one maintenance leaves one each
_CHECKPOINTS: Final = 2  # the one that runs, and that of the generation before it, the way back
_MB: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Parquet:
    """What a table's files cost.

    Attributes:
        file_bytes: a file however few rows it has: footer, dictionaries' heads.
        row_bytes: a row.
        device_bytes: a device that a file (or row group) mentions: its id and hash, once.
    """

    file_bytes: float
    row_bytes: float
    device_bytes: float = 0.0

    def size(self, rows: float, devices: float = 0.0) -> float:
        """Return the bytes of a file with so many rows of so many devices, each as likely as the others."""
        return self.file_bytes + rows * self.row_bytes + mentioned(rows, devices) * self.device_bytes


@dataclass(frozen=True, slots=True)
class Figures:
    """What things cost. The defaults come from the commands that docs/planning.md names.

    Attributes:
        source: where they come from.
        group_bytes: a key group's state without devices.
        device_bytes: a device that has always been well in its key group's state, with an id of ``id_bytes``.
        changed_bytes: one that has ever changed its mode, besides.
        id_bytes: of the ids that it was measured with; what ids have more is counted whole.
        remembered_bytes: a device that ever sent an error, besides.
        code_bytes: each of its last errors, 16 at most.
        waiting_bytes: a message that waits for its time.
        landed: files of bronze as landing writes them.
        piece: the same rows when `fleet maintain` has put them together.
        metrics_bytes: share of a metric's bytes that is left in a file.
        judgements: files of judgements.
        snapshot: a snapshot of devices.
        snapshot_waiting_bytes: a message in it that waits.
        health_bytes: a row of ``stream_health``.
        quarantined_bytes: a row of ``quarantine`` besides its payload.
        message_us: CPU of the lifecycle job a message, microseconds.
        touched_us: the same a device that is heard in a batch.
        batch_s: the same a batch, however small, in seconds.
        ingest_us: CPU of bridge and landing a message.
        write_bytes_per_s: how fast a partition's state is written.
        commit_s: what a checkpoint takes however small it is.
        heap_bytes: the JVM's heap.
        worker_bytes: a Python worker without a group.
        working_bytes: a device in a group that is being folded.
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
    """Whom it is for.

    Attributes:
        devices: how many.
        interval_ms: between two messages of a device.
        lateness_ms: how long messages wait, the allowed lateness.
        error_share: of messages that are errors.
        late_share: of messages that come too late.
        copy_share: of messages that come twice.
        refused_share: of messages that cannot be decoded.
        changes_a_day: of a device's mode.
        metrics_bytes: of a message's metrics, on average.
        id_bytes: of a device's id.
        batch_every_ms: from the begin of one batch to that of the next at least, the setting ``batch_every``.
        held_ms: for how long messages wait for their batch while fewer than `FEW_ROWS` have come, see `io.pacing`.
        tolerance: which share of a batch's time its checkpoint may take.
        keep_days: how long messages are kept; None for ever.
        keep_snapshot_days: how long a snapshot a day is kept; likewise.
        bytes_a_message: of bronze, where a running home tells; None takes the figures'.
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
        """Return how many messages come a second."""
        return self.devices * 1000 / self.interval_ms * (1 + self.copy_share)


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What it will need.

    Attributes:
        messages_per_s: that come.
        key_groups: to be fixed when a home is made.
        devices_a_group: in each.
        partitions: of the state, fixed with a checkpoint's first batch.
        cores: of the lifecycle job.
        executors: that they are shared among, where a cluster runs it.
        ingest_cores: of bridge and landing.
        bridges: that share the intake.
        state_bytes: of the newest version: devices and what waits.
        checkpoint_bytes: of all versions that are kept, before compression.
        batch_s: how long a batch takes.
        checkpoint_s: of it, how long the checkpoint does.
        checkpoint_every: batches between two, so that it stays within the tolerance.
        memory_bytes: of the lifecycle job.
        storage: bytes by table, and of checkpoints, a month out.
    """

    messages_per_s: float
    key_groups: int
    devices_a_group: float
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
        """Return it as JSON has it."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "storage"}
        rounded = {name: round(value, 3) if name.endswith("_s") else round(value) for name, value in plain.items()}
        return {**rounded, "storage_bytes": {table: round(size) for table, size in self.storage.items()}}


def mentioned(rows: float, devices: float) -> float:
    """Return how many of ``devices`` are among so many rows, each being as likely as the others."""
    return devices * -math.expm1(-rows / devices) if devices else 0.0


def key_groups(devices: int, partitions: int) -> int:
    """Return about the fewest key groups that hold no more than 32,000 devices each, and keep every partition busy.

    Each call for a group costs some milliseconds however little there is to do: fewer groups are cheaper. Up to a quarter more
    are taken, or three, where Spark shares these more evenly: a batch takes as long as its busiest partition.
    """
    least, most = DEVICES_A_GROUP
    groups = max(1, math.ceil(devices / most))
    if groups < partitions and devices >= least * partitions:
        groups = partitions
    groups = max(groups, min(partitions, 2))
    enough = range(groups, max(groups + _MORE_GROUPS, groups * 5 // 4) + 1)
    return min(enough, key=lambda count: (round(busiest(count, partitions), 1), count))


def group_bytes(devices: float, heard: float, changed: float, fleet: Fleet, figures: Figures) -> float:
    """Return the bytes of a key group's block.

    Args:
        devices: in it.
        heard: messages that each has been heard with since its life began.
        changed: share of them that have ever changed their mode.
        fleet: whose.
        figures: what things cost.
    """
    errors = fleet.error_share * heard
    remembering = -math.expm1(-errors)
    codes = _bounded_mean(errors, _REMEMBERED_CODES)
    each = figures.device_bytes + max(0.0, fleet.id_bytes - figures.id_bytes)
    each += changed * figures.changed_bytes + remembering * figures.remembered_bytes + codes * figures.code_bytes
    return figures.group_bytes + devices * each


def _bounded_mean(mean: float, most: int) -> float:
    """Return the mean of a Poisson number, cut off at ``most``."""
    if mean > 4 * most:
        return float(most)
    chance, below, found = math.exp(-mean), 0.0, 0.0
    for number in range(most):
        found += number * chance
        below += chance
        chance *= mean / (number + 1)
    return found + most * (1 - below)


def state_bytes(fleet: Fleet, figures: Figures, groups: int) -> float:
    """Return the bytes of the state's newest version, a month after the fleet began: blocks, and what waits."""
    heard = MONTH_DAYS * DAY_MS / fleet.interval_ms
    changed = -math.expm1(-fleet.changes_a_day / 2 * MONTH_DAYS)  # a change and its return are of one device
    blocks = groups * group_bytes(fleet.devices / groups, heard, changed, fleet, figures)
    return blocks + fleet.messages_per_s * fleet.lateness_ms / 1000 * figures.waiting_bytes


def batch_cpu_s(fleet: Fleet, figures: Figures, batch_s: float) -> float:
    """Return the CPU seconds of a batch that takes in what came in ``batch_s``."""
    messages = fleet.messages_per_s * batch_s
    touched = mentioned(messages, fleet.devices)
    return figures.batch_s + (messages * figures.message_us + touched * figures.touched_us) / 1e6


def batch_time_s(fleet: Fleet, figures: Figures, cores: int) -> float:
    """Return how long batches get: each takes in what came while the one before it ran; infinity where cores do not suffice."""
    least_s = batch_s = max(fleet.batch_every_ms, min(fleet.held_ms, FEW_ROWS * 1000 / max(fleet.messages_per_s, 1e-9))) / 1000
    for _ in range(500):
        wanted = max(least_s, batch_cpu_s(fleet, figures, batch_s) / cores)
        if abs(wanted - batch_s) < 1e-4:
            return wanted
        if wanted > 3_600:
            break
        batch_s = wanted
    return math.inf


def cores_needed(fleet: Fleet, figures: Figures) -> int:
    """Return the fewest cores that messages alone keep at most 60 % busy."""
    worst_us = figures.message_us + figures.touched_us  # each device once in a batch: the dearest way
    return max(2, math.ceil(fleet.messages_per_s * worst_us / 1e6 / BUSY))


def plan(fleet: Fleet, figures: Figures, days: int = MONTH_DAYS) -> CapacityPlan:
    """Return what a fleet will need; storage after so many days."""
    cores = cores_needed(fleet, figures)
    groups = key_groups(fleet.devices, cores)
    batch_s = batch_time_s(fleet, figures, cores)
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
    """Return what a message takes in a file of so many rows."""
    if fleet.bytes_a_message is not None:
        return fleet.bytes_a_message
    files, metrics = figures.landed if landed else figures.piece, fleet.metrics_bytes * figures.metrics_bytes
    of_a_dictionary = min(rows, ROW_GROUP)
    return files.size(of_a_dictionary, fleet.devices) / of_a_dictionary + metrics


def snapshot_bytes(fleet: Fleet, figures: Figures) -> float:
    """Return the bytes of one snapshot: a row for each device, and for each message that waits."""
    waiting = fleet.messages_per_s * fleet.lateness_ms / 1000
    longer_ids = max(0.0, fleet.id_bytes - figures.id_bytes)
    return figures.snapshot.size(fleet.devices) + fleet.devices * longer_ids + waiting * figures.snapshot_waiting_bytes


def snapshots_kept(fleet: Fleet, days: int) -> float:
    """Return how many snapshots there are after so many days, as `fleet maintain` leaves them."""
    kept_days = days if fleet.keep_snapshot_days is None else min(days, fleet.keep_snapshot_days)
    return SNAPSHOTS_A_DAY + max(0.0, kept_days - 1)


def storage(fleet: Fleet, figures: Figures, groups: int, batch_s: float, days: int) -> dict[str, float]:
    """Return bytes by table after so many days, as `fleet maintain` leaves them."""
    a_day = fleet.messages_per_s * 86_400
    kept_days = days if fleet.keep_days is None else min(days, fleet.keep_days)
    batches = days * 86_400 / batch_s if batch_s else 0.0
    found = fleet.devices * fleet.changes_a_day * days + a_day * days * (fleet.late_share + fleet.copy_share)
    summaries = min(fleet.devices * fleet.changes_a_day * min(days, 30), batches * groups)
    payload = 60 + fleet.metrics_bytes
    return {
        "messages": a_day * kept_days * message_bytes(fleet, figures, _PIECE_ROWS, landed=False),
        "judgements": (found + summaries) * figures.judgements.row_bytes,
        "quarantine": a_day * kept_days * fleet.refused_share * (figures.quarantined_bytes + payload),
        "device_snapshots": snapshots_kept(fleet, days) * snapshot_bytes(fleet, figures),
        "stream_health": min(batches, 7 * 86_400 / batch_s if batch_s else 0.0) * figures.health_bytes,
    }
