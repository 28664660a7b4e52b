"""Data-quality suites of the lifecycle job's state (snapshot or generation).

Rule 1: a state is compared with the judgements and messages up to its own frontier.
Rule 2: if a state was built from a part of the devices, rules that need the others do not apply.
"""

from typing import Final

from fleetpulse.core.lifecycle import HELD, PRESENT, Mode
from fleetpulse.core.presence.presence_time import presence_sql
from fleetpulse.core.quality.suites import CORRECTED, Severity, Suite, among, holds
from fleetpulse.core.rows import EVERYONE, FROM_DEVICES, SIGNALS, Kind

_EMITTED_COLUMNS: Final = (
    "kind, device_id, site, life, transition_no, event_time, to_mode, runtime_ms, message_kind, received_at, boot, seq"
)
_EMITTED: Final = f"""every AS (SELECT {_EMITTED_COLUMNS} FROM judgements UNION ALL SELECT {_EMITTED_COLUMNS} FROM pending),
    said AS (SELECT DISTINCT device_id, site, life, transition_no, event_time, to_mode, runtime_ms
             FROM every WHERE kind = 'transition')"""
_NOT_JUDGED: Final = """
        SELECT device_id AS not_id, message_kind AS not_kind, received_at AS not_at, event_time AS not_time
        FROM every WHERE kind IN ('after_decommission', 'unknown_device')
        UNION SELECT copy.device_id, copy.message_kind, copy.received_at, copy.event_time
        FROM every AS copy JOIN every AS other ON other.device_id = copy.device_id AND other.message_kind = copy.message_kind
            AND other.event_time = copy.event_time AND other.boot IS NOT DISTINCT FROM copy.boot
            AND other.seq IS NOT DISTINCT FROM copy.seq
        WHERE copy.kind = 'duplicate' AND other.kind IN ('after_decommission', 'unknown_device')"""  # a copy of one not judged
_LATE: Final = """late AS (SELECT DISTINCT device_id AS late_id, message_kind AS late_kind, received_at AS late_at,
                 event_time AS late_time FROM judgements WHERE kind = 'late')"""
_PRESENCE: Final = f"""CASE WHEN kind IN ({among(SIGNALS)}) THEN {presence_sql("taken.lead_ms", "taken.backlog_ms")}
                 ELSE event_time END"""
_IS_LATE: Final = "late_id = device_id AND late_kind = kind AND late_at = received_at AND late_time = event_time"
_REQUIRED_COLUMNS: Final = (
    "device_hash", "key_group", "site", "device_class", "mode", "mode_since", "life", "transition_no", "class_since",
    "quiet_since", "quiet_covered_ms", "excused_ms", "runtime_ms", "reboots",
)  # fmt: skip
_NOT_FOLLOWED: Final = f"{CORRECTED.removesuffix(')')} UNION SELECT device_id FROM roaming)"
_STATE: Final = Suite(
    "state",
    "device_snapshots",
    "Devices of a snapshot or generation, joined with their newest transitions and messages.",
    ("state", "taken", "shards", "roaming", "pending", "dues", "judgements", "messages"),
    f"""
    WITH {_NOT_FOLLOWED}, {_EMITTED},
    settled AS (SELECT said.*, row_number() OVER (PARTITION BY device_id ORDER BY life DESC, transition_no DESC) AS place
                FROM said CROSS JOIN taken LEFT JOIN shards ON of_site = site
                WHERE event_time <= coalesce(settled_to, taken.others_settled)),
    newest AS (SELECT device_id AS newest_id, life AS newest_life, transition_no AS newest_no, to_mode AS newest_mode
               FROM settled WHERE place = 1),
    its AS (SELECT device_id AS its_id, life AS its_life, transition_no AS its_no, max(event_time) AS its_time,
                max(to_mode) AS its_mode, max(runtime_ms) AS its_runtime_ms FROM said GROUP BY 1, 2, 3),
    not_judged AS ({_NOT_JUDGED}),
    {_LATE},
    heard AS (SELECT device_id, site, kind, received_at, event_time, coalesce(late_at, {_PRESENCE}) AS presence,
                  late_at IS NULL OR gateway IS NULL OR gateway = device_id AS proves
              FROM messages CROSS JOIN taken LEFT JOIN late ON {_IS_LATE}
              WHERE kind IN ({among([*SIGNALS, "registry"])}) AND received_at <= taken.newest),
    seen AS (SELECT device_id AS seen_id, max(CASE WHEN kind IN ({among(SIGNALS)}) THEN presence END) AS seen_at
             FROM heard CROSS JOIN taken LEFT JOIN not_judged
             ON not_id = device_id AND not_kind = kind AND not_at = received_at AND not_time IS NOT DISTINCT FROM event_time
             LEFT JOIN shards ON of_site = site
             WHERE presence <= coalesce(judged_to, taken.others) AND proves AND not_id IS NULL GROUP BY 1),
    device AS (SELECT state.*, coalesce(judged_to, taken.others) AS its_frontier,
                   coalesce(settled_to, taken.others_settled) AS its_settled,
                   row_number() OVER (PARTITION BY device_id ORDER BY mode) AS time
               FROM state CROSS JOIN taken LEFT JOIN shards ON of_site = coalesce(speaks_from, site) WHERE part = 'device')
    SELECT coalesce(device_id, newest_id) AS device_id, device.life, device.transition_no, mode, mode_since, last_seen,
        device.runtime_ms, newest_mode, newest_no, its_mode, seen_at, due_at, due_to,
        CASE WHEN taken.chosen THEN NULL WHEN newest_mode <> 'forgotten' THEN device.device_id IS NOT NULL END AS is_not_missing,
        CASE WHEN device.device_id IS NULL OR taken.chosen OR corrected.id IS NOT NULL THEN NULL
             WHEN transition_no > 0 THEN its_no IS NOT NULL
             WHEN unix_millis(life) - unix_millis(taken.kept) >= taken.lead_ms THEN seen_id IS NOT NULL END AS is_known,
        time = 1 AS is_there_once,
        CASE WHEN device.device_id IS NOT NULL THEN {" AND ".join(f"device.{name} IS NOT NULL" for name in _REQUIRED_COLUMNS)}
             AND (last_seen IS NOT NULL OR mode NOT IN ({among(PRESENT)})) END AS its_values_are_there,
        CASE WHEN device.device_id IS NOT NULL
             THEN coalesce((device_hash % taken.key_groups + taken.key_groups) % taken.key_groups = key_group, false) END
            AS is_in_its_key_group,
        mode IN ({among([mode for mode in Mode if mode is not Mode.FORGOTTEN])}) AS mode_is_known,
        CASE WHEN device.device_id IS NULL OR corrected.id IS NOT NULL OR taken.chosen THEN NULL
             WHEN transition_no = 0 THEN mode = 'provisioned'
             ELSE its_mode IS NULL OR (mode IS NOT DISTINCT FROM its_mode AND mode_since IS NOT DISTINCT FROM its_time) END
            AS mode_is_that_of_its_transition,
        CASE WHEN corrected.id IS NOT NULL THEN NULL
             WHEN mode = 'degraded' THEN degraded_until IS NOT NULL
             WHEN mode = 'flagged' THEN flagged_until IS NOT NULL
             WHEN mode IN ({among(HELD)}) THEN held_until IS NOT NULL END AS its_mode_has_an_end,
        CASE WHEN device.device_id IS NULL OR newest_id IS NULL OR corrected.id IS NOT NULL OR taken.chosen THEN NULL
             ELSE life > newest_life OR (life = newest_life AND transition_no >= newest_no) END AS is_not_stale,
        CASE WHEN device.device_id IS NULL OR roams_id IS NOT NULL THEN NULL
             ELSE coalesce(last_seen, life) <= its_frontier AND mode_since <= its_frontier END AS is_not_ahead,
        CASE WHEN last_seen IS NOT NULL THEN quiet_since IS NOT DISTINCT FROM last_seen END
            AS silence_counts_from_the_last_signal,
        CASE WHEN last_seen IS NULL OR corrected.id IS NOT NULL OR taken.chosen OR last_seen < taken.told OR taken.late_rules
                 OR unix_millis(last_seen) - unix_millis(taken.kept) < taken.lead_ms THEN NULL
             ELSE seen_at IS NOT DISTINCT FROM last_seen END AS last_seen_is_the_newest_signal_judged,
        CASE WHEN its_no IS NOT NULL AND corrected.id IS NULL THEN device.runtime_ms >= its_runtime_ms END AS runtime_goes_on,
        CASE WHEN corrected.id IS NULL AND quiet_covered_due_ms IS NOT NULL
             THEN quiet_covered_ms IS NOT DISTINCT FROM quiet_covered_due_ms END AS covered_as_we_listened,
        CASE WHEN device.device_id IS NULL THEN NULL ELSE due_at IS NULL OR due_at > its_settled END AS nothing_is_overdue
    FROM device FULL OUTER JOIN newest ON device.device_id = newest_id CROSS JOIN taken
    LEFT JOIN its ON its_id = device.device_id AND its_life = device.life AND its_no = device.transition_no
    LEFT JOIN seen ON seen_id = device.device_id
    LEFT JOIN dues ON due_id = device.device_id
    LEFT JOIN (SELECT device_id AS roams_id FROM roaming) AS roams ON roams_id = device.device_id
    LEFT JOIN (SELECT device_id AS id FROM corrected) AS corrected ON corrected.id = coalesce(device.device_id, newest_id)
    """,
    ("device_id",),
    (
        holds("is_not_missing", "a device is in the state unless its newest transition is to forgotten"),
        holds("is_known", "a device in the state has the transition that it names, or a message"),
        holds("is_there_once", "a device is in the state once"),
        holds(
            "its_values_are_there", "every device has its required values; one that is online also has the time it was last seen"
        ),
        holds("is_in_its_key_group", "a device is in the key group that its id determines"),
        holds("mode_is_known", "the mode of a device is a known mode other than forgotten"),
        holds("mode_is_that_of_its_transition", "mode and `mode_since` are those of the newest transition of the device"),
        holds("its_mode_has_an_end", "a device that is degraded, flagged or held has the instant at which that ends"),
        holds("is_not_stale", "no transition of a device up to the frontier is newer than the one that it names"),
        holds("is_not_ahead", "no instant of a device lies beyond the frontier"),
        holds("silence_counts_from_the_last_signal", "silence counts from the last signal"),
        holds("last_seen_is_the_newest_signal_judged", "the last signal is the newest judged signal in bronze"),
        holds("runtime_goes_on", "the runtime of a device is at least that of its newest transition"),
        holds("covered_as_we_listened", "the covered time at the start of silence follows from the coverage gaps in bronze"),
        holds("nothing_is_overdue", "no device is online without a signal within its timeout, or held beyond its announced end"),
    ),
    ("mode", "mode_since", "last_seen", "newest_mode", "newest_no", "its_mode", "seen_at", "due_at", "due_to"),
)
_COMPARED: Final = (
    "site", "device_class", "gateway", "mode", "mode_since", "life", "transition_no", "class_since", "last_seen", "quiet_since",
    "quiet_covered_ms", "runtime_ms", "boot", "seq", "reboots", "degraded_until", "flagged_until", "held_until", "death",
    "death_covered_ms", "outage", "outage_covered_ms", "excused_ms",
    "heard_arrival", "proved_arrival", "session", "clock", "clock_offset_ms", "timeout_ms", "death_grace_ms", "firmware",
    "speaks_from", "spoke_from", "moved", "conflict",
    "errors",
)  # fmt: skip
_AS_JUDGED: Final = Suite(
    "state as judged",
    "device_snapshots",
    "Devices of a snapshot or generation, joined with those that follow from bronze when it is judged again.",
    ("state", "defined_state"),
    "SELECT coalesce(one.device_id, other.device_id) AS device_id, one.mode, other.mode AS mode_due, one.last_seen, "
    "other.last_seen AS last_seen_due, one.runtime_ms, other.runtime_ms AS runtime_due_ms, "
    "one.device_id IS NOT NULL AS is_there, other.device_id IS NOT NULL AS is_due, "
    "CASE WHEN one.device_id IS NOT NULL AND other.device_id IS NOT NULL THEN "
    + " AND ".join(f"one.{name} IS NOT DISTINCT FROM other.{name}" for name in _COMPARED)
    + " END AS is_as_bronze_says FROM (SELECT * FROM state WHERE part = 'device') AS one "
    "FULL OUTER JOIN defined_state AS other ON one.device_id = other.device_id",
    ("device_id",),
    (
        holds("is_there", "every device that follows from bronze is in the state"),
        holds("is_due", "every device in the state follows from bronze"),
        holds("is_as_bronze_says", "each device equals the one that follows from bronze, in all fields"),
    ),
    ("mode", "mode_due", "last_seen", "last_seen_due", "runtime_ms", "runtime_due_ms"),
    needs_replay=True,
)
_OWN: Final = (Kind.CONTROL, Kind.REGISTRY, Kind.CORRECT)
_NAMED: Final = " ".join(
    f"WHEN {number} THEN '{kind}'" for number, kind in enumerate(Kind)
)  # numbers of kinds as the state stores them
_WAITING: Final = Suite(
    "waiting",
    "device_snapshots",
    "Pending messages of the state, joined with the messages of bronze beyond the frontier; messages for all key groups are "
    "pending in each of them.",
    ("state", "taken", "shards", "own_rows", "messages", "judgements"),
    f"""
    WITH {_LATE},
    beyond AS (
        SELECT messages.* FROM messages CROSS JOIN taken LEFT JOIN late ON {_IS_LATE} LEFT JOIN shards ON of_site = site
        WHERE coalesce(late_at, {_PRESENCE}) > coalesce(judged_to, taken.others)
            AND received_at <= taken.newest AND NOT taken.chosen),
    sides AS (
        SELECT device_id, CASE message_kind {_NAMED} END AS kind, received_at, event_time, seq, boot, 1 AS waits, 0 AS due
        FROM state CROSS JOIN taken WHERE part = 'signal' AND NOT taken.chosen
        UNION ALL SELECT device_id, kind, received_at, event_time, seq, boot, 0 AS waits, 1 AS due FROM beyond
        WHERE device_id <> '{EVERYONE}' AND kind IN ({among(FROM_DEVICES)})
        UNION ALL SELECT device_id, kind, received_at, event_time, NULL AS seq, NULL AS boot, 1 AS waits, 0 AS due
        FROM own_rows CROSS JOIN taken WHERE NOT taken.chosen
        UNION ALL SELECT device_id, kind, received_at, event_time, NULL AS seq, NULL AS boot, 0 AS waits, 1 AS due FROM beyond
        WHERE device_id <> '{EVERYONE}' AND kind IN ({among(_OWN)})
        UNION ALL SELECT '{EVERYONE}' AS device_id, kind, received_at, received_at AS event_time, NULL AS seq, NULL AS boot,
            0 AS waits, taken.key_groups AS due FROM messages CROSS JOIN taken
        WHERE gateway_event IS NOT NULL AND received_at > taken.least AND received_at <= taken.newest AND NOT taken.chosen),
    counted AS (SELECT device_id, kind, received_at, event_time, seq, boot, CAST(sum(waits) AS BIGINT) AS waiting,
                    CAST(sum(due) AS BIGINT) AS due FROM sides GROUP BY 1, 2, 3, 4, 5, 6)
    SELECT device_id, kind, received_at, event_time, seq, boot, waiting, due,
        waiting >= due OR received_at >= taken.newest AS none_is_lost, waiting <= due AS none_is_made_up
    FROM counted CROSS JOIN taken
    """,
    ("device_id", "kind", "received_at", "event_time", "seq"),
    (
        holds("none_is_lost", "every received message beyond the frontier is pending in the state"),
        holds("none_is_made_up", "every pending message was received, and is pending once"),
    ),
    ("boot", "waiting", "due"),
)
_OLD_MS: Final = 172_800_000  # two days; a snapshot is taken every hour
_SNAPSHOT: Final = Suite(
    "snapshot",
    "device_snapshots",
    "The snapshot, or the state of a generation, as one row.",
    ("state", "taken"),
    f"""
    SELECT taken.subject, taken.frontier, taken.job_frontier, taken.frontier_before, taken.key_groups, taken.devices,
        taken.contexts,
        (SELECT count(*) FROM state WHERE part = 'device') AS found, (SELECT count(*) FROM state WHERE part = 'group') AS groups,
        (SELECT count(*) FROM state WHERE part = 'group') = taken.key_groups
            AND (SELECT count(DISTINCT key_group) FROM state WHERE part = 'group') = taken.key_groups AS every_key_group_is_there,
        taken.contexts = 1 AS all_stand_at_one_instant,
        (SELECT count(*) FROM state WHERE part = 'device') = taken.devices AS as_many_devices_as_were_counted,
        coalesce(taken.frontier = taken.stated_frontier, false) AND coalesce(taken.newest = taken.stated_newest, true)
            AS stands_where_it_was_taken,
        taken.listens_as_bronze AS listened_as_bronze_says,
        CASE WHEN taken.frontier_before IS NOT NULL THEN coalesce(taken.frontier >= taken.frontier_before, false) END
            AS frontier_does_not_run_backwards,
        unix_millis(taken.job_frontier) - unix_millis(taken.frontier) <= {_OLD_MS} AS is_recent
    FROM taken
    """,
    ("subject",),
    (
        holds("every_key_group_is_there", "every key group is in the state once"),
        holds("all_stand_at_one_instant", "coverage, frontier and policies are the same in all key groups"),
        holds("stands_where_it_was_taken", "the position of the state is that of the checkpoint it was read from"),
        holds("listened_as_bronze_says", "frontier, coverage gaps and policies follow from bronze up to the position"),
        holds("as_many_devices_as_were_counted", "the number of devices is the one that was counted when the snapshot was taken"),
        holds(
            "frontier_does_not_run_backwards",
            "the frontier of a snapshot is not before that of the previous snapshot",
            Severity.WARNING,
        ),
        holds("is_recent", "a snapshot is at most two days behind the frontier of the job", Severity.WARNING),
    ),
    ("frontier", "frontier_before", "job_frontier", "key_groups", "groups", "contexts", "devices", "found"),
)
OF_STATE: Final = (_SNAPSHOT, _STATE, _AS_JUDGED, _WAITING)
