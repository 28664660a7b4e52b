"""Data-quality suites of the lifecycle job's state (snapshot or generation).

Rule 1: a state is compared with the judgements and messages up to its own frontier.
Rule 2: if a state was built from a part of the devices, rules that need the others do not apply.
"""

from typing import Final

from fleetpulse.core.lifecycle import HELD, PRESENT, Mode
from fleetpulse.core.presence.presence_time import presence_sql
from fleetpulse.core.quality.suites import CORRECTED, Severity, Suite, holds
from fleetpulse.core.rows import EVERYONE, FROM_DEVICES, SIGNALS, Kind
from fleetpulse.core.tables import literals

_EMITTED_COLUMNS: Final = (
    "kind, device_id, site, life, transition_no, event_time, to_mode, runtime_ms, message_kind, received_at, boot, seq"
)
_EMITTED: Final = f"""all_judgements AS (SELECT {_EMITTED_COLUMNS} FROM judgements UNION ALL
        SELECT {_EMITTED_COLUMNS} FROM pending),
    emitted AS (SELECT DISTINCT device_id, site, life, transition_no, event_time, to_mode, runtime_ms
             FROM all_judgements WHERE kind = 'transition')"""
_NOT_JUDGED: Final = """
        SELECT device_id AS skipped_id, message_kind AS skipped_kind, received_at AS skipped_at, event_time AS skipped_time
        FROM all_judgements WHERE kind IN ('after_decommission', 'unknown_device')
        UNION SELECT copy.device_id, copy.message_kind, copy.received_at, copy.event_time
        FROM all_judgements AS copy JOIN all_judgements AS other ON other.device_id = copy.device_id
            AND other.message_kind = copy.message_kind AND other.event_time = copy.event_time
            AND other.boot IS NOT DISTINCT FROM copy.boot AND other.seq IS NOT DISTINCT FROM copy.seq
        WHERE copy.kind = 'duplicate' AND other.kind IN ('after_decommission', 'unknown_device')"""  # copies of such messages
_LATE: Final = """late AS (SELECT DISTINCT device_id AS late_id, message_kind AS late_kind, received_at AS late_at,
                 event_time AS late_time FROM judgements WHERE kind = 'late')"""
_SUMMED: Final = "SELECT DISTINCT device_id AS summed_id FROM judgements WHERE messages IS NOT NULL"  # a sum names no message
_PRESENCE: Final = f"""CASE WHEN kind IN ({literals(SIGNALS)}) THEN {presence_sql("checked.lead_ms", "checked.backlog_ms")}
                 ELSE event_time END"""
_IS_LATE: Final = "late_id = device_id AND late_kind = kind AND late_at = received_at AND late_time = event_time"
_REQUIRED_COLUMNS: Final = (
    "device_hash", "key_group", "site", "device_class", "mode", "mode_since", "life", "transition_no", "class_since",
    "quiet_since", "quiet_covered_ms", "excused_ms", "runtime_ms", "reboots",
)  # fmt: skip
_LEFT_OUT: Final = f"{CORRECTED.removesuffix(')')} UNION SELECT device_id FROM roaming)"
_STATE: Final = Suite(
    "state",
    "device_snapshots",
    "Devices of a snapshot or generation, joined with their newest transitions and messages.",
    ("state", "checked", "shards", "roaming", "pending", "next_deadlines", "judgements", "messages"),
    f"""
    WITH {_LEFT_OUT}, {_EMITTED},
    settled AS (SELECT emitted.*, row_number() OVER (PARTITION BY device_id ORDER BY life DESC, transition_no DESC) AS place
                FROM emitted CROSS JOIN checked LEFT JOIN shards ON shard_site = site
                WHERE event_time <= coalesce(shard_settled, checked.other_sites_settled)),
    newest AS (SELECT device_id AS newest_id, life AS newest_life, transition_no AS newest_no, to_mode AS newest_mode
               FROM settled WHERE place = 1),
    named AS (SELECT device_id AS named_id, life AS named_life, transition_no AS named_no, max(event_time) AS named_time,
                max(to_mode) AS named_mode, max(runtime_ms) AS named_runtime_ms FROM emitted GROUP BY 1, 2, 3),
    not_judged AS ({_NOT_JUDGED}),
    {_LATE},
    received AS (SELECT device_id, site, kind, received_at, event_time, coalesce(late_at, {_PRESENCE}) AS presence,
                  late_at IS NULL OR gateway IS NULL OR gateway = device_id AS proves
              FROM messages CROSS JOIN checked LEFT JOIN late ON {_IS_LATE}
              WHERE kind IN ({literals([*SIGNALS, "registry"])}) AND received_at <= checked.newest_received),
    last_judged AS (SELECT device_id AS judged_id,
                    max(CASE WHEN kind IN ({literals(SIGNALS)}) THEN presence END) AS last_signal_at
             FROM received CROSS JOIN checked LEFT JOIN not_judged
             ON skipped_id = device_id AND skipped_kind = kind AND skipped_at = received_at
                 AND skipped_time IS NOT DISTINCT FROM event_time
             LEFT JOIN shards ON shard_site = site
             WHERE presence <= coalesce(shard_frontier, checked.other_sites_frontier) AND proves AND skipped_id IS NULL
             GROUP BY 1),
    device AS (SELECT state.*, coalesce(shard_frontier, checked.other_sites_frontier) AS device_frontier,
                   coalesce(shard_settled, checked.other_sites_settled) AS device_settled,
                   row_number() OVER (PARTITION BY device_id ORDER BY mode) AS occurrence
               FROM state CROSS JOIN checked LEFT JOIN shards ON shard_site = coalesce(speaks_from, site) WHERE part = 'device')
    SELECT coalesce(device_id, newest_id) AS device_id, device.life, device.transition_no, mode, mode_since, last_seen,
        device.runtime_ms, newest_mode, newest_no, named_mode, last_signal_at, next_deadline, next_trigger,
        CASE WHEN checked.has_chosen_devices THEN NULL
             WHEN newest_mode <> 'forgotten' THEN device.device_id IS NOT NULL END AS is_not_missing,
        CASE WHEN device.device_id IS NULL OR checked.has_chosen_devices OR corrected.id IS NOT NULL THEN NULL
             WHEN transition_no > 0 THEN named_no IS NOT NULL
             WHEN unix_millis(life) - unix_millis(checked.retained_since) >= checked.lead_ms THEN judged_id IS NOT NULL END
            AS is_known,
        occurrence = 1 AS is_unique,
        CASE WHEN device.device_id IS NOT NULL THEN {" AND ".join(f"device.{name} IS NOT NULL" for name in _REQUIRED_COLUMNS)}
             AND (last_seen IS NOT NULL OR mode NOT IN ({literals(PRESENT)})) END AS has_its_required_values,
        CASE WHEN device.device_id IS NOT NULL
             THEN coalesce((device_hash % checked.key_groups + checked.key_groups) % checked.key_groups = key_group, false) END
            AS is_in_its_key_group,
        mode IN ({literals([mode for mode in Mode if mode is not Mode.FORGOTTEN])}) AS mode_is_known,
        CASE WHEN device.device_id IS NULL OR corrected.id IS NOT NULL OR checked.has_chosen_devices THEN NULL
             WHEN transition_no = 0 THEN mode = 'provisioned'
             ELSE named_mode IS NULL OR (mode IS NOT DISTINCT FROM named_mode AND mode_since IS NOT DISTINCT FROM named_time) END
            AS mode_equals_that_of_its_transition,
        CASE WHEN corrected.id IS NOT NULL THEN NULL
             WHEN mode = 'degraded' THEN degraded_until IS NOT NULL
             WHEN mode = 'flagged' THEN flagged_until IS NOT NULL
             WHEN mode IN ({literals(HELD)}) THEN held_until IS NOT NULL END AS temporary_mode_has_an_end,
        CASE WHEN device.device_id IS NULL OR newest_id IS NULL OR corrected.id IS NOT NULL OR checked.has_chosen_devices
             THEN NULL
             ELSE life > newest_life OR (life = newest_life AND transition_no >= newest_no) END AS is_not_stale,
        CASE WHEN device.device_id IS NULL OR roaming_id IS NOT NULL THEN NULL
             ELSE coalesce(last_seen, life) <= device_frontier AND mode_since <= device_frontier END AS is_not_ahead,
        CASE WHEN last_seen IS NOT NULL THEN quiet_since IS NOT DISTINCT FROM last_seen END
            AS silence_counts_from_the_last_signal,
        CASE WHEN last_seen IS NULL OR corrected.id IS NOT NULL OR checked.has_chosen_devices
                 OR last_seen < checked.listed_since OR checked.has_late_rules
                 OR summed_id IS NOT NULL
                 OR unix_millis(last_seen) - unix_millis(checked.retained_since) < checked.lead_ms THEN NULL
             WHEN mode = '{Mode.DECOMMISSIONED}' AND last_signal_at > mode_since
             THEN last_seen <= mode_since  -- no judgement names late signals of a device out of service
             ELSE last_signal_at IS NOT DISTINCT FROM last_seen END AS last_seen_is_the_newest_signal_judged,
        CASE WHEN named_no IS NOT NULL AND corrected.id IS NULL THEN device.runtime_ms >= named_runtime_ms END
            AS runtime_includes_that_of_its_transition,
        CASE WHEN corrected.id IS NULL AND expected_covered_ms IS NOT NULL
             THEN quiet_covered_ms IS NOT DISTINCT FROM expected_covered_ms END AS covered_time_follows_from_gaps,
        CASE WHEN device.device_id IS NULL THEN NULL ELSE next_deadline IS NULL OR next_deadline > device_settled END
            AS no_deadline_is_overdue
    FROM device FULL OUTER JOIN newest ON device.device_id = newest_id CROSS JOIN checked
    LEFT JOIN named ON named_id = device.device_id AND named_life = device.life AND named_no = device.transition_no
    LEFT JOIN last_judged ON judged_id = device.device_id
    LEFT JOIN next_deadlines ON deadline_id = device.device_id
    LEFT JOIN ({_SUMMED}) AS summed ON summed_id = device.device_id
    LEFT JOIN (SELECT device_id AS roaming_id FROM roaming) AS roaming_devices ON roaming_id = device.device_id
    LEFT JOIN (SELECT device_id AS id FROM corrected) AS corrected ON corrected.id = coalesce(device.device_id, newest_id)
    """,
    ("device_id",),
    (
        holds("is_not_missing", "a device is in the state unless its newest transition is to forgotten"),
        holds("is_known", "a device in the state has the transition that it names, or a message"),
        holds("is_unique", "a device is in the state once"),
        holds(
            "has_its_required_values",
            "every device has its required values; one that is online also has the time it was last seen",
        ),
        holds("is_in_its_key_group", "a device is in the key group that its id determines"),
        holds("mode_is_known", "the mode of a device is a known mode other than forgotten"),
        holds("mode_equals_that_of_its_transition", "mode and `mode_since` are those of the newest transition of the device"),
        holds("temporary_mode_has_an_end", "a device that is degraded, flagged or held has the instant at which that ends"),
        holds("is_not_stale", "no transition of a device up to the frontier is newer than the one that it names"),
        holds("is_not_ahead", "no instant of a device lies beyond the frontier"),
        holds("silence_counts_from_the_last_signal", "silence counts from the last signal"),
        holds("last_seen_is_the_newest_signal_judged", "the last signal is the newest judged signal in bronze"),
        holds("runtime_includes_that_of_its_transition", "the runtime of a device is at least that of its newest transition"),
        holds(
            "covered_time_follows_from_gaps", "the covered time at the start of silence follows from the coverage gaps in bronze"
        ),
        holds(
            "no_deadline_is_overdue", "no device is online without a signal within its timeout, or held beyond its announced end"
        ),
    ),
    (
        "mode",
        "mode_since",
        "last_seen",
        "newest_mode",
        "newest_no",
        "named_mode",
        "last_signal_at",
        "next_deadline",
        "next_trigger",
    ),
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
    ("state", "expected_devices"),
    "SELECT coalesce(one.device_id, other.device_id) AS device_id, one.mode, other.mode AS expected_mode, one.last_seen, "
    "other.last_seen AS expected_last_seen, one.runtime_ms, other.runtime_ms AS expected_runtime_ms, "
    "one.device_id IS NOT NULL AS is_present, other.device_id IS NOT NULL AS is_expected, "
    "CASE WHEN one.device_id IS NOT NULL AND other.device_id IS NOT NULL THEN "
    + " AND ".join(f"one.{name} IS NOT DISTINCT FROM other.{name}" for name in _COMPARED)
    + " END AS equals_the_expected_device FROM (SELECT * FROM state WHERE part = 'device') AS one "
    "FULL OUTER JOIN expected_devices AS other ON one.device_id = other.device_id",
    ("device_id",),
    (
        holds("is_present", "every device that follows from bronze is in the state"),
        holds("is_expected", "every device in the state follows from bronze"),
        holds("equals_the_expected_device", "each device equals the one that follows from bronze, in all fields"),
    ),
    ("mode", "expected_mode", "last_seen", "expected_last_seen", "runtime_ms", "expected_runtime_ms"),
    needs_replay=True,
)
_OWN: Final = (Kind.CONTROL, Kind.REGISTRY, Kind.CORRECT)
_NAMED: Final = " ".join(
    f"WHEN {number} THEN '{kind}'" for number, kind in enumerate(Kind)
)  # numbers of kinds as the state stores them
_PENDING: Final = Suite(
    "pending messages",
    "device_snapshots",
    "Pending messages of the state, joined with the messages of bronze beyond the frontier; messages for all key groups are "
    "pending in each of them.",
    ("state", "checked", "shards", "reserved_rows", "messages", "judgements"),
    f"""
    WITH {_LATE},
    beyond AS (
        SELECT messages.* FROM messages CROSS JOIN checked LEFT JOIN late ON {_IS_LATE} LEFT JOIN shards ON shard_site = site
        WHERE coalesce(late_at, {_PRESENCE}) > coalesce(shard_frontier, checked.other_sites_frontier)
            AND received_at <= checked.newest_received AND NOT checked.has_chosen_devices),
    sides AS (
        SELECT device_id, CASE message_kind {_NAMED} END AS kind, received_at, event_time, seq, boot, 1 AS in_state, 0 AS expected
        FROM state CROSS JOIN checked WHERE part = 'signal' AND NOT checked.has_chosen_devices
        UNION ALL SELECT device_id, kind, received_at, event_time, seq, boot, 0 AS in_state, 1 AS expected FROM beyond
        WHERE device_id <> '{EVERYONE}' AND kind IN ({literals(FROM_DEVICES)})
        UNION ALL SELECT device_id, kind, received_at, event_time, NULL AS seq, NULL AS boot, 1 AS in_state, 0 AS expected
        FROM reserved_rows CROSS JOIN checked WHERE NOT checked.has_chosen_devices
        UNION ALL SELECT device_id, kind, received_at, event_time, NULL AS seq, NULL AS boot, 0 AS in_state, 1 AS expected
        FROM beyond
        WHERE device_id <> '{EVERYONE}' AND kind IN ({literals(_OWN)})
        UNION ALL SELECT '{EVERYONE}' AS device_id, kind, received_at, received_at AS event_time, NULL AS seq, NULL AS boot,
            0 AS in_state, checked.key_groups AS expected FROM messages CROSS JOIN checked
        WHERE gateway_event IS NOT NULL AND received_at > checked.least_frontier
            AND received_at <= checked.newest_received AND NOT checked.has_chosen_devices),
    counted AS (SELECT device_id, kind, received_at, event_time, seq, boot, CAST(sum(in_state) AS BIGINT) AS in_state,
                    CAST(sum(expected) AS BIGINT) AS expected
                FROM sides LEFT JOIN ({_SUMMED}) AS summed ON summed_id = device_id
                WHERE summed_id IS NULL GROUP BY 1, 2, 3, 4, 5, 6)
    SELECT device_id, kind, received_at, event_time, seq, boot, in_state, expected,
        in_state >= expected OR received_at >= checked.newest_received AS none_is_missing, in_state <= expected AS none_is_extra
    FROM counted CROSS JOIN checked
    """,
    ("device_id", "kind", "received_at", "event_time", "seq"),
    (
        holds("none_is_missing", "every received message beyond the frontier is pending in the state"),
        holds("none_is_extra", "every pending message was received, and is pending once"),
    ),
    ("boot", "in_state", "expected"),
)
_OLD_MS: Final = 172_800_000  # two days; a snapshot is taken every hour
_SNAPSHOT: Final = Suite(
    "snapshot",
    "device_snapshots",
    "The snapshot, or the state of a generation, as one row.",
    ("state", "checked"),
    f"""
    SELECT checked.subject, checked.frontier, checked.job_frontier, checked.frontier_before,
        checked.key_groups, checked.devices, checked.contexts,
        (SELECT count(*) FROM state WHERE part = 'device') AS found, (SELECT count(*) FROM state WHERE part = 'group') AS groups,
        (SELECT count(*) FROM state WHERE part = 'group') = checked.key_groups
            AND (SELECT count(DISTINCT key_group) FROM state WHERE part = 'group') = checked.key_groups AS has_every_key_group,
        checked.contexts = 1 AS key_groups_are_at_one_instant,
        (SELECT count(*) FROM state WHERE part = 'device') = checked.devices AS has_the_counted_devices,
        coalesce(checked.frontier = checked.stated_frontier, false)
            AND coalesce(checked.newest_received = checked.stated_newest_received, true)
            AS position_equals_that_of_its_checkpoint,
        checked.follows_from_bronze AS coverage_follows_from_bronze,
        CASE WHEN checked.frontier_before IS NOT NULL THEN coalesce(checked.frontier >= checked.frontier_before, false) END
            AS frontier_never_decreases,
        unix_millis(checked.job_frontier) - unix_millis(checked.frontier) <= {_OLD_MS} AS is_recent
    FROM checked
    """,
    ("subject",),
    (
        holds("has_every_key_group", "every key group is in the state once"),
        holds("key_groups_are_at_one_instant", "coverage, frontier and policies are the same in all key groups"),
        holds("position_equals_that_of_its_checkpoint", "the position of the state is that of the checkpoint it was read from"),
        holds("coverage_follows_from_bronze", "frontier, coverage gaps and policies follow from bronze up to the position"),
        holds("has_the_counted_devices", "the number of devices is the one that was counted when the snapshot was taken"),
        holds(
            "frontier_never_decreases",
            "the frontier of a snapshot is not before that of the previous snapshot",
            Severity.WARNING,
        ),
        holds("is_recent", "a snapshot is at most two days behind the frontier of the job", Severity.WARNING),
    ),
    ("frontier", "frontier_before", "job_frontier", "key_groups", "groups", "contexts", "devices", "found"),
)
OF_STATE: Final = (_SNAPSHOT, _STATE, _AS_JUDGED, _PENDING)
