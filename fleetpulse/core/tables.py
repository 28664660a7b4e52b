"""The tables as data: columns, units, meaning, key and partitioning. The data dictionary is generated from here.

Types are those that every reader has: string, long, int, double, timestamp (UTC, microseconds), binary.
"""

from dataclasses import dataclass
from typing import Final

from fleetpulse.core.rows import REASONS


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: as stored.
        type: string, long, int, double, timestamp or binary.
        meaning: what it says, with its unit.
        required: whether every row has it.
    """

    name: str
    type: str
    meaning: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """One Delta table.

    Attributes:
        name: folder below the home's ``tables``.
        meaning: what a row is.
        key: the columns that identify a row.
        columns: in stored order.
        partitioned_by: partition columns.
        properties: Delta's own settings of it.
    """

    name: str
    meaning: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    partitioned_by: tuple[str, ...] = ()
    properties: tuple[tuple[str, str], ...] = ()


_ARRIVAL: Final = (
    Column("origin", "string", "the door: mqtt, replay, command or bridge", required=True),
    Column("recording", "string", "id of the recording a row was played from"),
    Column("line", "long", "its line there, from 0"),
    Column("bridge", "string", "the bridge that had it", required=True),
    Column("segment", "long", "number of the bridge's segment that carried it", required=True),
)

INDEXED_COLUMNS: Final = 4  # of a table that Spark writes: of how many Delta keeps the least and greatest value of a file

MESSAGES: Final = Table(
    "messages",
    "Bronze: every message that could be decoded, and our own rows, in order of received_at.",
    ("bridge", "segment", "device_id", "kind", "event_time", "digest"),
    (
        Column("received_at", "timestamp", "when the bridge had it in its hands", required=True),
        Column("event_time", "timestamp", "when it happened, on the device's clock; null where that is no time"),
        Column(
            "kind", "string", "heartbeat, telemetry, error, birth, death; control, registry, policy, gap, tick, correct", True
        ),
        Column("device_id", "string", "the device; _ for everybody", required=True),
        Column("site", "string", "the topic's site", required=True),
        Column("clock", "string", "where event_time comes from: device, received, invalid", required=True),
        Column("boot", "string", "names the device's run since its last start"),
        Column("session", "string", "names the device's connection to the broker"),
        Column("seq", "long", "the device's message counter"),
        Column("uptime_s", "long", "seconds since the device's last start"),
        Column("code", "string", "error code"),
        Column("firmware", "string", "firmware version"),
        Column("gateway", "string", "through whom it came"),
        Column("metrics", "string", "JSON object of measured values"),
        Column("body", "string", "JSON object of our own rows"),
        Column("note", "string", "what is odd about it, with a hint"),
        Column("digest", "long", "64 bits of BLAKE2b over the payload's bytes", required=True),
        Column("position", "long", "its place among its bridge's rows of one received_at, as they came; null in older rows"),
        Column("gateway_event", "string", "event for the devices behind its device: death or return of their gateway"),
        Column(
            "device_hash",
            "long",
            "64 bits of BLAKE2b over the device id: its place among the key groups",
            required=True,
        ),
        Column("stamped_at", "timestamp", "when its bridge had it, where others had landed past that: received_at is later"),
        *_ARRIVAL,
    ),
    # A job reads it by version: what is cleared from its log is for `fleet maintain` to say, and not for time.
    properties=(("delta.enableExpiredLogCleanup", "false"),),
)

QUARANTINE: Final = Table(
    "quarantine",
    "Messages that could not be decoded, or were beyond what their device may send, with their raw bytes.",
    ("bridge", "place"),
    (
        Column("received_at", "timestamp", "when the bridge had it in its hands", required=True),
        Column("topic", "string", "as published; escaped and cut where it is too long or not printable", required=True),
        Column("payload", "binary", "its raw bytes"),
        Column(
            "reason",
            "string",
            f"one word: {', '.join(REASONS)}",
            required=True,
        ),
        Column("detail", "string", "the rule, what was got, what to do", required=True),
        *_ARRIVAL,
        Column("place", "long", "its place among the bridge's rows: segment times 2^20, and the row in it; null in older rows"),
    ),
)

COVERAGE: Final = Table(
    "coverage",
    "Spans in which we were not listening; a span is two rows, open and close.",
    ("bridge", "received_at"),
    (
        Column("received_at", "timestamp", "when the row was written", required=True),
        Column("op", "string", "open or close", required=True),
        Column("at", "timestamp", "the span's first instant, or the one from which we listen again", required=True),
        Column(
            "why",
            "string",
            "start (nobody listened before), broker (it closed), network (no way to it), disk (full), bridge (not heard of)",
        ),
        *_ARRIVAL,
    ),
)

DEVICES: Final = Table(
    "devices",
    "Changes of the registry; the newest change of a device is in force.",
    ("device_id", "effective_from"),
    (
        Column("received_at", "timestamp", "when the change was received", required=True),
        Column("effective_from", "timestamp", "from when it is in effect", required=True),
        Column("device_id", "string", "the device", required=True),
        Column("site", "string", "its site", required=True),
        Column("op", "string", "add or decommission", required=True),
        Column("device_class", "string", "its class, which chooses its rules"),
        Column("gateway", "string", "through whom it comes"),
        *_ARRIVAL,
        Column("timeout_ms", "long", "its own timeout, in milliseconds; null: that of its class"),
        Column("death_grace_ms", "long", "its own grace after a will, in milliseconds; null: that of its class"),
    ),
)

GATEWAYS: Final = Table(
    "gateways",
    "Deaths, returns and sessions of gateways, one row each; landing restores its records from the newest row of each gateway.",
    ("device_id", "received_at", "place"),
    (
        Column("received_at", "timestamp", "when the message was received", required=True),
        Column("device_id", "string", "the gateway", required=True),
        Column("event", "string", "death, return, or session: it named another session or boot", required=True),
        Column("dead_since", "timestamp", "since when it is dead; null while it is alive"),
        Column("session", "string", "its newest session"),
        Column("boot", "string", "its newest boot"),
        *_ARRIVAL,
        Column("place", "long", "its place among the bridge's rows: segment times 2^20, and the row in it", required=True),
    ),
)

JUDGEMENTS: Final = Table(
    "judgements",
    "Judgements of the lifecycle job and of amendments, one row each; `transitions` and other views read them.",
    ("kind", "device_id", "life", "transition_no", "amendment_no"),
    (
        Column(
            "kind",
            "string",
            "transition, late, clock (a clock fault begins), identity_conflict (one id speaks from two sites in turn), "
            "duplicate, after_decommission, unknown_device, refused, summary; by amend: retract, add",
        ),
        Column("device_id", "string", "the device"),
        Column("site", "string", "its site"),
        Column("event_time", "timestamp", "when it happened: of the message, or of the deadline"),
        Column("device_class", "string", "its class then"),
        Column("life", "timestamp", "event time of the first row of the device's life"),
        Column("transition_no", "long", "number of the transition in that life, from 1; of a retract that which it takes back"),
        Column("from_mode", "string", "mode before"),
        Column("to_mode", "string", "mode after"),
        Column("trigger", "string", "what moved it"),
        Column("last_seen", "timestamp", "event time of the last signal judged"),
        Column("runtime_ms", "long", "cumulative runtime, in milliseconds of covered time"),
        Column("last_errors", "string", "JSON array of the last error codes, oldest first"),
        Column("gateway", "string", "through whom it came last"),
        Column("policy_version", "string", "digest of the policy in force"),
        Column("received_at", "timestamp", "when the message was received that it is about; null for a deadline"),
        Column("message_kind", "string", "kind of that message"),
        Column("boot", "string", "boot of that message"),
        Column("seq", "long", "seq of that message"),
        Column("reason", "string", "why, in words"),
        Column("late_by_ms", "long", "how far behind the frontier the message lay, in milliseconds"),
        Column("key_group", "int", "the key group of a summary"),
        Column("counts", "string", "JSON object: devices by mode in that key group"),
        Column("judged_at", "timestamp", "when it was judged; not part of a comparison"),
        Column("generation", "int", "generation of the job; not part of a comparison"),
        Column("amendment_no", "long", "of a retract or an add: its number among those of its device, from 1"),
        Column(
            "takes_back", "long", "of a retract: the amendment_no of the add that it takes back; null where transition_no says"
        ),
    ),
    ("kind",),
    # Replaced files are part of the state that every reader builds, for as long as the log names them.
    (("delta.dataSkippingNumIndexedCols", str(INDEXED_COLUMNS)), ("delta.deletedFileRetentionDuration", "interval 3 hours")),
)

STREAM_HEALTH: Final = Table(
    "stream_health",
    "Metrics of the lifecycle job, one row for each micro-batch; core/monitoring/health.py rates some of them.",
    ("run_id", "batch_id"),
    (
        Column("began_at", "timestamp", "when the batch began", required=True),
        Column("query_id", "string", "the checkpoint's id: one a generation", required=True),
        Column("run_id", "string", "the job's id since its last start", required=True),
        Column("batch_id", "long", "number of the batch in the checkpoint, from 0", required=True),
        Column("generation", "int", "generation of the job", required=True),
        Column("input_rows", "long", "rows of bronze read; null where the offsets do not tell"),
        Column("input_blocks", "long", "blocks read, a key group each: what the JVM counts as rows", required=True),
        Column("input_rows_per_s", "double", "rows of bronze that came a second since the batch before; null in a run's first"),
        Column("processed_rows_per_s", "double", "rows of bronze read a second of the batch's time"),
        Column("judgements", "string", "JSON object: rows that the batch wrote, by kind"),
        Column("rows_late", "long", "judgements of kind late among them"),
        Column(
            "rows_dropped", "long", "blocks that Spark dropped behind its watermark; anything but 0 is a fault", required=True
        ),
        Column("batch_ms", "long", "time of the batch, in milliseconds; the next six are parts of it", required=True),
        Column("latest_offset_ms", "long", "looking for new versions of bronze, in milliseconds"),
        Column("get_batch_ms", "long", "asking the source for the batch, in milliseconds"),
        Column("query_planning_ms", "long", "planning, in milliseconds"),
        Column("wal_commit_ms", "long", "writing the batch's offsets, in milliseconds"),
        Column("add_batch_ms", "long", "running it: read, fold, state and sink, in milliseconds"),
        Column("commit_offsets_ms", "long", "writing that it is done, in milliseconds"),
        Column("updates_ms", "long", "life of its stateful tasks, summed, in milliseconds: Python and sink included"),
        Column("state_commit_ms", "long", "committing the state, summed over partitions, in milliseconds"),
        Column("newest_received_at", "timestamp", "received_at of the newest row read in this run"),
        Column("watermark", "timestamp", "Spark's watermark in this batch; null before the first"),
        Column(
            "watermark_delay_ms",
            "long",
            "how far it lay behind the newest row of this batch, in milliseconds: the advance of received_at in the batch",
        ),
        Column(
            "watermark_age_ms", "long", "how far it lay behind the clock at the batch's end, in milliseconds; years in a replay"
        ),
        Column("devices", "string", "JSON object: devices by mode, from each key group's newest summary"),
        Column("partitions", "int", "state partitions"),
        Column(
            "state_rows",
            "long",
            "values in the state: a key group has two, and one more for each chunk of rows that wait; timers are not counted",
            required=True,
        ),
        Column("state_rows_updated", "long", "values written", required=True),
        Column("state_rows_removed", "long", "values removed", required=True),
        Column("state_bytes", "long", "size of RocksDB's files; rated as state size", required=True),
        Column("state_memory_bytes", "long", "RocksDB's memory: memtables, cache, indexes; rated as memory", required=True),
        Column(
            "checkpoint_ms",
            "long",
            "offsets, commit and the mean partition's state commit, in milliseconds; rated",
            required=True,
        ),
        Column(
            "state_update_us", "long", "RocksDB's time to read and write one value, in microseconds; rated; null where none was"
        ),
        Column("clean_up_ms", "long", "removals, timers and RocksDB's compactions, in milliseconds; rated", required=True),
        Column("rocksdb_gets", "long", "reads"),
        Column("rocksdb_puts", "long", "writes"),
        Column("rocksdb_written_bytes", "long", "bytes written to RocksDB: about what the changelog grew by, before compression"),
        Column("rocksdb_snapshot_bytes", "long", "bytes copied to the checkpoint by the newest snapshot of each partition"),
        Column("rocksdb_stall_ms", "long", "writes held up by compaction, summed, in milliseconds"),
        Column("rocksdb_load_ms", "long", "loading the state's version, summed, in milliseconds: the recovery after a start"),
        Column("rocksdb_cache_misses", "long", "block reads that the cache did not have"),
        Column("source_offset", "string", "JSON: where the batch ended in bronze"),
    ),
    properties=(("delta.logRetentionDuration", "interval 1 days"), ("delta.deletedFileRetentionDuration", "interval 3 hours")),
)

DEVICE_SNAPSHOTS: Final = Table(
    "device_snapshots",
    "The lifecycle job's state at one batch, all of it; a snapshot is a version of the table, older ones are its history.",
    ("part", "key_group", "device_id"),
    (
        Column(
            "part",
            "string",
            "device; signal and row (what waits for its time); pending (judged, and to be said next); group (how far it is)",
            required=True,
        ),
        Column("key_group", "int", "the key group that it was in", required=True),
        Column("device_id", "string", "the device; _ for everybody", required=True),
        Column("device_hash", "long", "64 bits of BLAKE2b over the device id: its place among the key groups", required=True),
        Column("site", "string", "its site"),
        Column("device_class", "string", "its class"),
        Column("gateway", "string", "through whom it came last"),
        Column("mode", "string", "its mode"),
        Column("mode_since", "timestamp", "since when"),
        Column("life", "timestamp", "event time of the first row of its life"),
        Column("transition_no", "long", "number of its last transition in that life"),
        Column("class_since", "timestamp", "since when it is of its class, with the limits of its own that it has"),
        Column("last_seen", "timestamp", "event time of the last signal judged"),
        Column("quiet_since", "timestamp", "since when silence counts"),
        Column("quiet_covered_ms", "long", "covered time then, in milliseconds"),
        Column("runtime_ms", "long", "cumulative runtime, in milliseconds of covered time"),
        Column("boot", "string", "the boot last heard of; of a signal: its own"),
        Column("seq", "long", "the counter last heard of; of a signal: its own"),
        Column("reboots", "long", "how often it has started again"),
        Column("degraded_until", "timestamp", "until when errors keep it degraded"),
        Column("flagged_until", "timestamp", "until when it is flagged, unless it is released"),
        Column("held_until", "timestamp", "announced end of maintenance or update"),
        Column("death", "timestamp", "when its newest will was delivered that no later signal has voided"),
        Column("death_covered_ms", "long", "covered time then, in milliseconds"),
        Column("outage", "timestamp", "when its gateway died; null unless the gateway is dead"),
        Column("outage_covered_ms", "long", "covered time then, in milliseconds"),
        Column("excused_ms", "long", "covered time since the last signal in which its gateway was dead, in milliseconds"),
        Column("heard_arrival", "long", "place in arrival order of the newest signal, while a row before it may still be judged"),
        Column("proved_arrival", "long", "likewise of the newest that the device delivered itself, or that announced its start"),
        Column("session", "long", "a hash of the name of its newest session"),
        Column(
            "clock",
            "string",
            "of its newest signal: on_time, late, or a clock fault: invalid, ahead, behind; of a signal: its own",
        ),
        Column("clock_offset_ms", "long", "event time less received_at, in milliseconds, where clock is late, ahead or behind"),
        Column("timeout_ms", "long", "its own timeout, in milliseconds; null: that of its class"),
        Column("death_grace_ms", "long", "its own grace after a will, in milliseconds; null: that of its class"),
        Column("firmware", "string", "version of its firmware, as it last named it; of a signal: its own"),
        Column("speaks_from", "string", "site that its newest signal came from; null: its site"),
        Column("spoke_from", "string", "site that its signals came from before that; null: no other"),
        Column("moved", "timestamp", "when the one followed the other"),
        Column("conflict", "timestamp", "when its id was last reported to speak from two sites in turn"),
        Column("errors", "string", "JSON object: what is remembered of its errors; null where nothing is"),
        Column("received_at", "timestamp", "of a signal: when it was received"),
        Column("presence", "timestamp", "of a signal: the instant at which it is judged"),
        Column("event_time", "timestamp", "of a signal: when it happened; null if invalid"),
        Column("position", "long", "of a signal: its place among its bridge's rows of one received_at"),
        Column("connection", "string", "of a signal: its session"),
        Column("message_kind", "int", "of a signal: the number of its kind, see columnar/codec/arrow.py"),
        Column("device_clock", "int", "of a signal: 1 where event_time is the device's"),
        Column("code", "string", "of a signal: its error code"),
        Column("digest", "long", "of a signal: 64 bits over its payload; 0 where there is a seq"),
        Column("content", "string", "JSON object: a row, a judgement, or how far a group is"),
    ),
    ("part",),
    (("delta.enableExpiredLogCleanup", "false"),),  # maintenance clears it, by its own setting
)

QUALITY_RESULTS: Final = Table(
    "quality_results",
    "What came of each expectation, in each look at the data: see docs/quality.md.",
    ("run_id", "suite", "expectation"),
    (
        Column("run_id", "string", "names the look at the data; later ones sort later", required=True),
        Column("began_at", "timestamp", "when it began", required=True),
        Column("subject", "string", "what was looked at: tables, generation N, or snapshot N", required=True),
        Column("suite", "string", "the suite", required=True),
        Column("expectation", "string", "the expectation", required=True),
        Column("severity", "string", "critical (a gate stays shut) or warning", required=True),
        Column("outcome", "string", "passed, failed, skipped (the rows that are kept cannot tell) or fault", required=True),
        Column("rows", "long", "rows of the suite"),
        Column("failed", "long", "of them that fail"),
        Column("engine", "string", "pandas or spark"),
        Column("took_ms", "long", "time that the suite took, in milliseconds"),
        Column("why", "string", "why it was skipped, or could not be evaluated"),
    ),
)

QUALITY_FAILURES: Final = Table(
    "quality_failures",
    "Rows that fail an expectation, with their keys: the first hundred of each; how many there are, quality_results says.",
    ("run_id", "suite", "expectation", "row_key"),
    (
        Column("run_id", "string", "names the look at the data", required=True),
        Column("began_at", "timestamp", "when it began", required=True),
        Column("suite", "string", "the suite", required=True),
        Column("expectation", "string", "the expectation", required=True),
        Column("severity", "string", "critical or warning", required=True),
        Column("row_key", "string", "JSON object: which row", required=True),
        Column("detail", "string", "JSON object: what the row says", required=True),
    ),
)

TABLES: Final = (
    MESSAGES, QUARANTINE, COVERAGE, DEVICES, GATEWAYS, JUDGEMENTS, STREAM_HEALTH, DEVICE_SNAPSHOTS, QUALITY_RESULTS,
    QUALITY_FAILURES,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read judgements.

    Attributes:
        name: of the view.
        meaning: what a row is.
        sql: selects it; an earlier reading may be read.
    """

    name: str
    meaning: str
    sql: str


def _of_kind(name: str, kind: str) -> Reading:
    return Reading(name, f"kind {kind}", f"SELECT * FROM judgements WHERE kind = '{kind}'")


def transitions_in(judgements: str) -> str:
    """Return the SQL that selects transitions as amendments left them; ``never_seen``: to offline, of a device never heard.

    Args:
        judgements: the name of the table, or a query in brackets: by what was said in there.
    """
    return f"""
        SELECT *, to_mode = 'offline' AND last_seen IS NULL AS never_seen FROM (
        SELECT * FROM (SELECT * FROM {judgements} WHERE kind = 'transition') AS judged
        ANTI JOIN (SELECT * FROM {judgements} WHERE kind = 'retract' AND takes_back IS NULL) AS retracted
        USING (device_id, life, transition_no)
        UNION ALL BY NAME
        SELECT * FROM (SELECT * FROM {judgements} WHERE kind = 'add') AS added
        ANTI JOIN (SELECT device_id, takes_back AS amendment_no FROM {judgements} WHERE kind = 'retract') AS retracted
        USING (device_id, amendment_no))
    """


READINGS: Final = (
    Reading(
        "transitions",
        "kind transition, without those that were retracted, and kind add, likewise: what happened, as far as is known",
        transitions_in("judgements"),
    ),
    _of_kind("judged_transitions", "transition"),
    _of_kind("late_events", "late"),
    _of_kind("clock_faults", "clock"),
    _of_kind("identity_conflicts", "identity_conflict"),
    _of_kind("duplicates", "duplicate"),
    _of_kind("refusals", "refused"),
)
