"""Declarations of the Delta tables: columns, units, meanings, keys, partitioning.

docs/reference/tables.md is generated from them. The types are those that every reader supports:
string, long, int, double, timestamp (UTC, microseconds), binary.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fleetpulse.core.rows import KEPT_BYTES, REASONS


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        name: stored name.
        type: string, long, int, double, timestamp, boolean or binary.
        meaning: description with the unit.
        required: whether every row has a value.
    """

    name: str
    type: str
    meaning: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """One Delta table.

    Attributes:
        name: name of the table, and of its folder below ``tables`` in the home.
        meaning: description of a row.
        key: columns that identify a row.
        columns: columns in stored order.
        partitioned_by: partition columns.
        properties: Delta table properties.
    """

    name: str
    meaning: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    partitioned_by: tuple[str, ...] = ()
    properties: tuple[tuple[str, str], ...] = ()


_ARRIVAL: Final = (
    Column("origin", "string", "source of the row: mqtt, replay, command or bridge", required=True),
    Column("recording", "string", "id of the recording that the row was replayed from"),
    Column("line", "long", "line of the recording, from 0"),
    Column("bridge", "string", "bridge that received the message", required=True),
    Column("segment", "long", "number of the bridge's segment with the row", required=True),
)

INDEXED_COLUMNS: Final = 4  # columns with min/max statistics in the log of a table

MESSAGES: Final = Table(
    "messages",
    "Bronze: all decoded messages, with rows of bridges, operators and the registry, in the order of received_at.",
    ("bridge", "segment", "device_id", "kind", "event_time", "digest"),
    (
        Column("received_at", "timestamp", "time at which the bridge received the message", required=True),
        Column("event_time", "timestamp", "event time, by the clock of the device; null if it is not a time"),
        Column(
            "kind",
            "string",
            "heartbeat, telemetry, error, birth, death, ack; control, registry, policy, gap, tick, correct",
            True,
        ),
        Column("device_id", "string", "id of the device; _ for the whole fleet", required=True),
        Column("site", "string", "site in the topic", required=True),
        Column("clock", "string", "source of event_time: device, received, invalid", required=True),
        Column("boot", "string", "name of the run of the device since its last start"),
        Column("session", "string", "name of the connection of the device to the broker"),
        Column("seq", "long", "message counter of the device"),
        Column("uptime_s", "long", "seconds since the last start of the device"),
        Column("code", "string", "error code"),
        Column("firmware", "string", "firmware version"),
        Column("gateway", "string", "gateway that delivered the message"),
        Column("metrics", "string", "JSON object of measured values"),
        Column("body", "string", "JSON object of a control, registry, policy, gap, tick, correct or ack row"),
        Column("note", "string", "warning about the message, with a hint"),
        Column("digest", "long", "64 bits of BLAKE2b over the payload's bytes", required=True),
        Column(
            "position",
            "long",
            "place in delivery order among the rows of its bridge with the same received_at; null in older rows",
        ),
        Column("gateway_event", "string", "event for the devices behind this gateway: its death or return"),
        Column(
            "device_hash",
            "long",
            "64 bits of BLAKE2b over the device id, which determine the key group",
            required=True,
        ),
        Column(
            "stamped_at", "timestamp", "time of receipt, if rows of other bridges had landed beyond it; received_at is then later"
        ),
        *_ARRIVAL,
    ),
    # The job reads it by version, so only `fleet maintain` may clear its log, not Delta by time.
    properties=(("delta.enableExpiredLogCleanup", "false"),),
)

QUARANTINE: Final = Table(
    "quarantine",
    "Messages that could not be decoded, or exceeded a limit of their device, with the beginning of their payload.",
    ("bridge", "place"),
    (
        Column("received_at", "timestamp", "time at which the bridge received the message", required=True),
        Column("topic", "string", "topic as published; escaped if not printable, and truncated if too long", required=True),
        Column(
            "payload",
            "binary",
            f"first bytes of the payload: at most {KEPT_BYTES:,}, of a flood fewer; empty in further rows of one message",
        ),
        Column(
            "reason",
            "string",
            f"reason, one of {', '.join(REASONS)}",
            required=True,
        ),
        Column("detail", "string", "rule, value found, and remedy", required=True),
        *_ARRIVAL,
        Column("place", "long", "place among the rows of the bridge: segment times 2^20, plus row; null in older rows"),
        Column("payload_bytes", "long", "size of the payload as received, in bytes; above that of payload if it was cut"),
        Column("payload_digest", "long", "64 bits of BLAKE2b over the payload as received"),
        Column("messages", "long", "number of messages that the row stands for: of a flood, a segment has only some rows"),
    ),
)

COVERAGE: Final = Table(
    "coverage",
    "Coverage gaps: spans in which a bridge was not listening; each is two rows, open and close.",
    ("bridge", "received_at"),
    (
        Column("received_at", "timestamp", "time at which the row was written", required=True),
        Column("op", "string", "open or close", required=True),
        Column("at", "timestamp", "start of the gap, or its end: the instant from which the bridge listens again", required=True),
        Column(
            "why",
            "string",
            "start (no bridge listened before), broker (closed the connection), network (broker unreachable), disk (full), "
            "bridge (no lease)",
        ),
        *_ARRIVAL,
    ),
)

DEVICES: Final = Table(
    "devices",
    "Entries of the registry; the newest entry of a device is in force.",
    ("device_id", "effective_from"),
    (
        Column("received_at", "timestamp", "time at which the entry was received", required=True),
        Column("effective_from", "timestamp", "instant from which the entry is in force", required=True),
        Column("device_id", "string", "id of the device", required=True),
        Column("site", "string", "site of the device", required=True),
        Column("op", "string", "add or decommission", required=True),
        Column("device_class", "string", "class of the device, which determines its rules"),
        Column("gateway", "string", "gateway of the device"),
        *_ARRIVAL,
        Column("timeout_ms", "long", "timeout of this device, in milliseconds; null: that of its class"),
        Column("death_grace_ms", "long", "grace period of this device after a will, in milliseconds; null: that of its class"),
    ),
)

GATEWAYS: Final = Table(
    "gateways",
    "Deaths, returns and sessions of gateways, one row each. Landing restores its memory from the newest row of each gateway; "
    "of the rows older than `keep_messages`, `fleet maintain` keeps the newest of each gateway.",
    ("device_id", "received_at", "place"),
    (
        Column("received_at", "timestamp", "time at which the message was received", required=True),
        Column("device_id", "string", "device id of the gateway", required=True),
        Column("event", "string", "death, return, or session (the gateway named another session or boot)", required=True),
        Column("dead_since", "timestamp", "time of its death; null while it is alive"),
        Column("session", "string", "newest session of the gateway"),
        Column("boot", "string", "newest boot of the gateway"),
        Column("site", "string", "site of the signal that first named this session and boot"),
        Column("seq", "long", "message counter of that signal"),
        Column("event_time", "timestamp", "event time of that signal; null if it is not a time"),
        *_ARRIVAL,
        Column("place", "long", "place among the rows of the bridge: segment times 2^20, plus row", required=True),
    ),
)

JUDGEMENTS: Final = Table(
    "judgements",
    "Judgements of the lifecycle job and of amendments, one row each; `transitions` and other views read them. Of many "
    "judgements about messages of a device, the newest have a row each, and the others share some.",
    ("kind", "device_id", "life", "transition_no", "amendment_no"),
    (
        Column(
            "kind",
            "string",
            "transition, late, clock (start of a clock fault), identity_conflict (one id at two sites in turn), "
            "duplicate, after_decommission, unknown_device, refused, summary; by amend: retract, add",
        ),
        Column("device_id", "string", "id of the device"),
        Column("site", "string", "site of the device"),
        Column("event_time", "timestamp", "event time of the message, or instant of the deadline"),
        Column("device_class", "string", "class of the device at that time"),
        Column("life", "timestamp", "event time of the first row of the life"),
        Column("transition_no", "long", "number of the transition in that life, from 1; of a retract: the retracted transition"),
        Column("from_mode", "string", "mode before"),
        Column("to_mode", "string", "mode after"),
        Column("trigger", "string", "cause of the transition, a trigger of the lifecycle"),
        Column("last_seen", "timestamp", "presence time of the last signal judged"),
        Column("runtime_ms", "long", "cumulative runtime, in milliseconds of covered time"),
        Column("last_errors", "string", "JSON array of the last error codes, oldest first"),
        Column("gateway", "string", "gateway that delivered the last signal"),
        Column("policy_version", "string", "digest of the policy in force"),
        Column("received_at", "timestamp", "time at which the message was received; null for a deadline"),
        Column("message_kind", "string", "kind of the message"),
        Column("boot", "string", "boot of the message"),
        Column("seq", "long", "seq of the message"),
        Column("reason", "string", "reason, for people"),
        Column("late_by_ms", "long", "distance of a late message behind the frontier, in milliseconds"),
        Column("key_group", "int", "key group of a summary"),
        Column("counts", "string", "JSON object: number of devices by mode in the key group"),
        Column("judged_at", "timestamp", "time of judging; excluded from comparisons"),
        Column("generation", "int", "generation of the job; excluded from comparisons"),
        Column("amendment_no", "long", "number of a retract or add among those of its device, from 1"),
        Column("takes_back", "long", "of a retract: amendment_no of the retracted add; null if it retracts transition_no"),
        Column(
            "messages",
            "long",
            "number of messages that the row stands for, of one kind and one minute of received_at; null: one, "
            "named by the row. Of such a row, event_time and received_at are the least, late_by_ms is the greatest",
        ),
        Column("event_time_until", "timestamp", "greatest event time of these messages"),
        Column("received_until", "timestamp", "received_at up to which the job had read when it wrote such a row"),
    ),
    ("kind",),
    # Readers load replaced files into their snapshot while the log names them: keep them briefly.
    (("delta.dataSkippingNumIndexedCols", str(INDEXED_COLUMNS)), ("delta.deletedFileRetentionDuration", "interval 3 hours")),
)

STREAM_HEALTH: Final = Table(
    "stream_health",
    "Metrics of the lifecycle job, one row for each micro-batch; core/monitoring/health.py rates some of them.",
    ("run_id", "batch_id"),
    (
        Column("began_at", "timestamp", "start of the batch", required=True),
        Column("query_id", "string", "id of the checkpoint: one for each generation", required=True),
        Column("run_id", "string", "run id of the job, which changes with each start", required=True),
        Column("batch_id", "long", "number of the batch in the checkpoint, from 0", required=True),
        Column("generation", "int", "generation of the job", required=True),
        Column("input_rows", "long", "rows of bronze read; null if the offsets do not determine them"),
        Column("input_blocks", "long", "blocks read, one for each key group; Spark counts them as rows", required=True),
        Column(
            "input_rows_per_s", "double", "rows of bronze a second since the previous batch; null in the first batch of a run"
        ),
        Column("processed_rows_per_s", "double", "rows of bronze read a second, over the time of the batch"),
        Column("judgements", "string", "JSON object: number of judgements that the batch wrote, by kind"),
        Column("rows_late", "long", "number of judgements of kind late among them"),
        Column("rows_dropped", "long", "blocks that Spark dropped behind its watermark; must be 0", required=True),
        Column("batch_ms", "long", "time of the batch, in milliseconds; the next six columns are parts of it", required=True),
        Column("latest_offset_ms", "long", "finding new versions of bronze, in milliseconds"),
        Column("get_batch_ms", "long", "getting the batch from the source, in milliseconds"),
        Column("query_planning_ms", "long", "planning, in milliseconds"),
        Column("wal_commit_ms", "long", "writing the offsets of the batch, in milliseconds"),
        Column("add_batch_ms", "long", "running the batch (read, fold, state and sink), in milliseconds"),
        Column("commit_offsets_ms", "long", "writing the commit of the batch, in milliseconds"),
        Column("updates_ms", "long", "run time of the stateful tasks, summed, in milliseconds; includes Python and the sink"),
        Column("state_commit_ms", "long", "committing the state, summed over partitions, in milliseconds"),
        Column("newest_received_at", "timestamp", "received_at of the newest row read in this run"),
        Column("watermark", "timestamp", "Spark's watermark in this batch; null before the first"),
        Column(
            "watermark_delay_ms",
            "long",
            "distance of the watermark from the newest row of the batch, in milliseconds: advance of received_at in the batch",
        ),
        Column(
            "watermark_age_ms",
            "long",
            "distance of the watermark from the clock at the end of the batch, in milliseconds; years in a replay",
        ),
        Column("devices", "string", "JSON object: number of devices by mode, from the newest summary of each key group"),
        Column("partitions", "int", "state partitions"),
        Column(
            "state_rows",
            "long",
            "values in the state: two for each key group, and one for each chunk of pending rows; timers are not counted",
            required=True,
        ),
        Column("state_rows_updated", "long", "values written", required=True),
        Column("state_rows_removed", "long", "values removed", required=True),
        Column("state_bytes", "long", "size of the files of RocksDB; rated as state size", required=True),
        Column("state_memory_bytes", "long", "memory of RocksDB (memtables, cache, indexes); rated as memory", required=True),
        Column(
            "checkpoint_ms",
            "long",
            "offsets, commit, and mean state commit of a partition, in milliseconds; rated as checkpoint",
            required=True,
        ),
        Column(
            "state_update_us", "long", "time of RocksDB to read and write one value, in microseconds; null if none was; rated"
        ),
        Column(
            "clean_up_ms",
            "long",
            "removals, timers, and compactions of RocksDB, in milliseconds; rated as clean-up",
            required=True,
        ),
        Column("rocksdb_gets", "long", "reads"),
        Column("rocksdb_puts", "long", "writes"),
        Column("rocksdb_written_bytes", "long", "bytes written to RocksDB, about the growth of the changelog before compression"),
        Column("rocksdb_snapshot_bytes", "long", "bytes that the newest snapshot of each partition copied to the checkpoint"),
        Column("rocksdb_stall_ms", "long", "time of writes stalled by compaction, summed, in milliseconds"),
        Column(
            "rocksdb_load_ms",
            "long",
            "loading the version of the state, summed, in milliseconds; this is the recovery after a start",
        ),
        Column("rocksdb_cache_misses", "long", "block reads that missed the cache"),
        Column("source_offset", "string", "JSON: end offset of the batch in bronze"),
    ),
    properties=(("delta.logRetentionDuration", "interval 1 days"), ("delta.deletedFileRetentionDuration", "interval 3 hours")),
)

DEVICE_SNAPSHOTS: Final = Table(
    "device_snapshots",
    "Snapshot of the whole state of the lifecycle job after one batch. Each snapshot is a version of the table.",
    ("part", "key_group", "device_id"),
    (
        Column(
            "part",
            "string",
            "device; signal and row (pending rows); pending (judgements not emitted yet); group (position of a key group)",
            required=True,
        ),
        Column("key_group", "int", "key group of the row", required=True),
        Column("device_id", "string", "id of the device; _ for the whole fleet", required=True),
        Column("device_hash", "long", "64 bits of BLAKE2b over the device id, which determine the key group", required=True),
        Column("site", "string", "site of the device"),
        Column("device_class", "string", "class of the device"),
        Column("gateway", "string", "gateway that delivered the last signal"),
        Column("mode", "string", "mode of the device"),
        Column("mode_since", "timestamp", "instant since which it has that mode"),
        Column("life", "timestamp", "event time of the first row of its life"),
        Column("transition_no", "long", "number of the last transition in that life"),
        Column("class_since", "timestamp", "instant since which its class and its own limits are in force"),
        Column("last_seen", "timestamp", "presence time of the last signal judged"),
        Column("quiet_since", "timestamp", "instant from which silence counts"),
        Column("quiet_covered_ms", "long", "covered time at quiet_since, in milliseconds"),
        Column("runtime_ms", "long", "cumulative runtime, in milliseconds of covered time"),
        Column("boot", "string", "last boot named; of a signal: its boot"),
        Column("seq", "long", "last counter named; of a signal: its counter"),
        Column("reboots", "long", "number of reboots"),
        Column("degraded_until", "timestamp", "instant until which errors keep it degraded"),
        Column("flagged_until", "timestamp", "instant until which it is flagged, unless it is released or confirmed before"),
        Column("held_until", "timestamp", "announced end of maintenance or update"),
        Column("death", "timestamp", "received_at of the newest will; null if a signal has voided it"),
        Column("death_covered_ms", "long", "covered time at death, in milliseconds"),
        Column("outage", "timestamp", "instant of the death of its gateway; null unless the gateway is dead"),
        Column("outage_covered_ms", "long", "covered time at outage, in milliseconds"),
        Column("excused_ms", "long", "covered time since the last signal in which its gateway was dead, in milliseconds"),
        Column("heard_arrival", "long", "place in arrival order of the newest signal, while an earlier row may still be judged"),
        Column("proved_arrival", "long", "place in arrival order of the newest birth or direct signal, kept like heard_arrival"),
        Column("session", "long", "hash of the name of its newest session"),
        Column(
            "clock",
            "string",
            "class of the event time of the newest signal: on_time, late, or a clock fault (invalid, ahead, behind); "
            "of a signal: its class",
        ),
        Column("clock_offset_ms", "long", "event time less received_at, in milliseconds, if clock is late, ahead or behind"),
        Column("timeout_ms", "long", "timeout of this device, in milliseconds; null: that of its class"),
        Column("death_grace_ms", "long", "grace period of this device after a will, in milliseconds; null: that of its class"),
        Column("firmware", "string", "last firmware version named; of a signal: its firmware version"),
        Column("speaks_from", "string", "site of the newest signal; null: same as site"),
        Column("spoke_from", "string", "site of the signals before the last move; null: no other site"),
        Column("moved", "timestamp", "instant of the last move between sites"),
        Column("conflict", "timestamp", "instant of the last reported identity conflict"),
        Column("errors", "string", "JSON object: errors and events that still count, and its review; null if there are none"),
        Column("received_at", "timestamp", "of a signal: time at which it was received"),
        Column("presence", "timestamp", "of a signal: instant at which it is judged"),
        Column("event_time", "timestamp", "of a signal: its event time; null if invalid"),
        Column("position", "long", "of a signal: place among the rows of its bridge with the same received_at"),
        Column("connection", "string", "of a signal: its session"),
        Column("message_kind", "int", "of a signal: number of its kind, see columnar/codec/arrow.py"),
        Column("device_clock", "int", "of a signal: 1 if event_time is from the device's clock"),
        Column("code", "string", "of a signal: its error code"),
        Column("digest", "long", "of a signal: 64 bits over its payload; 0 if it has a seq"),
        Column("content", "string", "JSON object: a row, a judgement, or the position of a key group"),
    ),
    ("part",),
    (("delta.enableExpiredLogCleanup", "false"),),  # maintenance clears it by its own setting
)

QUALITY_RESULTS: Final = Table(
    "quality_results",
    "Results of the expectations in each data-quality run, see docs/how-to/data-quality.md.",
    ("run_id", "suite", "expectation"),
    (
        Column("run_id", "string", "id of the data-quality run; later runs sort later", required=True),
        Column("began_at", "timestamp", "start of the run", required=True),
        Column("subject", "string", "checked data: tables, generation N, or snapshot N", required=True),
        Column("suite", "string", "name of the suite", required=True),
        Column("expectation", "string", "name of the expectation", required=True),
        Column("severity", "string", "critical (a gate fails) or warning", required=True),
        Column("outcome", "string", "passed, failed, skipped (the retained rows cannot decide) or fault", required=True),
        Column("rows", "long", "number of rows of the suite"),
        Column("failed", "long", "number of rows that fail"),
        Column("engine", "string", "pandas or spark"),
        Column("took_ms", "long", "time of evaluating the suite, in milliseconds"),
        Column("why", "string", "reason why it was skipped, or could not be evaluated"),
    ),
)

QUALITY_FAILURES: Final = Table(
    "quality_failures",
    "Rows that fail an expectation, with their keys: the first hundred of each. `quality_results` has their number.",
    ("run_id", "suite", "expectation", "row_key"),
    (
        Column("run_id", "string", "id of the data-quality run", required=True),
        Column("began_at", "timestamp", "start of the run", required=True),
        Column("suite", "string", "name of the suite", required=True),
        Column("expectation", "string", "name of the expectation", required=True),
        Column("severity", "string", "critical or warning", required=True),
        Column("row_key", "string", "JSON object: key of the row", required=True),
        Column("detail", "string", "JSON object: values of the row", required=True),
    ),
)

AUDIT: Final = Table(
    "audit",
    "Audit: who changed what, one row at the start of an action and one at its end; a killed action has no end.",
    ("id", "phase"),
    (
        Column("recorded_at", "timestamp", "time of the record", required=True),
        Column("id", "string", "id of the action, the same in both rows", required=True),
        Column("phase", "string", "started or finished; an approval has only finished", required=True),
        Column(
            "action", "string", "words of the command, such as access grant; approval for an answer in Airflow", required=True
        ),
        Column("arguments", "string", "JSON object of its arguments; *** for secrets", required=True),
        Column("os_user", "string", "user of the operating system", required=True),
        Column(
            "asked_by",
            "string",
            "requester by the environment: user and run of Airflow, or user of sudo; os_user could set it at will",
        ),
        Column("host", "string", "name of the machine", required=True),
        Column("address", "string", "address of the SSH client by the environment; null if there is none"),
        Column("result", "string", "ok, the code of the error, interrupted, or unexpected-error; null at the start"),
        Column("duration_ms", "long", "duration of the action, in milliseconds; null at the start, and of an approval"),
    ),
)

DEVICE_CURRENT: Final = Table(
    "device_current",
    "Facts of each device as of the last maintenance; `fleet status`, `devices` and `device` fold newer rows into them. "
    "The footer of its file names the versions that it includes.",
    ("device_id",),
    (
        Column("device_id", "string", "id of the device", required=True),
        Column("mode", "string", "mode; null if the device has not been judged yet"),
        Column("since", "timestamp", "instant of the newest transition, or of the registration that began this life"),
        Column("trigger", "string", "cause of the newest transition; null after a registration"),
        Column("site", "string", "site at the newest transition, or of the registration"),
        Column("device_class", "string", "class at the newest transition, or of the registration"),
        Column("gateway", "string", "gateway at the newest transition, or of the registration"),
        Column("last_seen", "timestamp", "presence time of the last signal before the newest transition"),
        Column("never_seen", "boolean", "whether the device is offline and was never heard", required=True),
        Column("runtime_ms", "long", "cumulative runtime at the newest transition, in milliseconds of covered time"),
        Column("life", "timestamp", "event time of the first row of the life"),
        Column("transition_no", "long", "number of the newest transition in that life"),
        Column("amendment_no", "long", "amendment number of the newest transition; null if the job judged it"),
        Column("judged_at", "timestamp", "time of judging of the newest transition"),
        Column("transitions", "long", "number of transitions in that life, after amendments", required=True),
        Column("entry_from", "timestamp", "instant from which the newest registry entry in force applies"),
        Column("entry_site", "string", "site of that entry"),
        Column("entry_class", "string", "class of that entry"),
        Column("entry_gateway", "string", "gateway of that entry"),
        Column("begins", "timestamp", "earliest instant of an entry that is not in force yet"),
        Column("planned_site", "string", "site of the newest entry, in force or not"),
        Column("planned_class", "string", "class of the newest entry, in force or not"),
        Column("is_known", "boolean", "whether the device was judged or registered", required=True),
        Column("messages", "long", "number of signals", required=True),
        Column("last_received", "timestamp", "received_at of the newest signal; the next columns describe that signal"),
        Column("last_heard", "timestamp", "newest presence time of the signals"),
        Column("signal_kind", "string", "kind"),
        Column("signal_clock", "string", "source of its event time: device, received, invalid"),
        Column("signal_event_time", "timestamp", "event time; null if it is not a time"),
        Column("signal_position", "long", "place in delivery order among the rows of its bridge with the same received_at"),
        Column("signal_bridge", "string", "bridge that received it"),
        Column("signal_direct", "boolean", "whether the device sent it itself, not through a gateway"),
        Column("signal_site", "string", "site in its topic"),
        Column("signal_late", "boolean", "whether it was listed as late", required=True),
        Column(
            "doubt", "string", "reason of the newest message that was late, refused, or from an unknown device or wrong clock"
        ),
        Column("doubt_received_at", "timestamp", "received_at of that message"),
    ),
)

MODE_HOURLY_SITE: Final = Table(
    "mode_hourly_site",
    "Differences of the number of devices by hour, site, class and mode, as of the last maintenance. Their sum up to an hour "
    "is the number of devices at its end. The footer of its file names the versions that it includes.",
    ("hour", "site", "device_class", "mode"),
    (
        Column("hour", "timestamp", "start of the hour, UTC", required=True),
        Column("site", "string", "site of the devices at their newest transition, or of their registration"),
        Column("device_class", "string", "class of the devices at their newest transition, or of their registration"),
        Column("mode", "string", "mode; forgotten devices stay in that mode", required=True),
        Column("devices_delta", "long", "number of devices at the end of the hour less that at its start", required=True),
    ),
)


def literals(words: Iterable[str]) -> str:
    """Return words as a list of SQL strings, sorted."""
    return ", ".join(f"'{word}'" for word in sorted(words))
