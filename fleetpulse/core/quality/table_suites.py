"""Data-quality suites of domain rules: transitions, messages, coverage, clocks.

Rule 1: each rule detects one kind of fault. The suites ``verdicts`` and ``accounts`` compare all
judgements with those that follow from bronze, which detects every other fault.
Rule 2: a rule that the retained rows cannot decide does not apply to them. If the first rows of
bronze were removed, or are too many, the replay starts at a snapshot (``job.replayed_after``).
Rule 3: devices that a correction row has changed are left out: they continue from their amended
history.
Rule 4: a row for several messages is compared by the sum of its group. Rules about the lateness of a
single message do not apply to devices with such rows.

Source: ADR 16, ADR 41.
"""

from typing import Final

from fleetpulse.core.judgements import LISTED
from fleetpulse.core.lifecycle import HELD, PRESENT, TRANSITIONS, Mode
from fleetpulse.core.quality.state_suites import OF_STATE
from fleetpulse.core.quality.suites import CORRECTED, STRUCTURE, Severity, Suite, holds
from fleetpulse.core.rows import SIGNALS
from fleetpulse.core.tables import literals
from fleetpulse.core.times import MINUTE_MS

_LIVE: Final = sorted({Mode.PROVISIONED, *PRESENT})  # modes for the target ONLINE, see `core.lifecycle`
ALLOWED_TRANSITIONS: Final = sorted(
    f"{before} {trigger} {after}"
    for (before, trigger), target in TRANSITIONS.items()
    for after in ([*_LIVE, *([Mode.UNREACHABLE] if before in HELD else [])] if target is Mode.ONLINE else [target])
    if after is not before
)


_LIFE: Final = "(PARTITION BY device_id, life ORDER BY transition_no, event_time)"
_TRANSITIONS: Final = Suite(
    "transitions",
    "judgements",
    "Judged transitions, each with the previous one in the life of its device.",
    ("judgements", "messages", "job"),
    f"""
    WITH {CORRECTED}, judged AS (
        SELECT device_id, life, transition_no, event_time, from_mode, to_mode, trigger, last_seen, runtime_ms, policy_version,
            lag(transition_no) OVER {_LIFE} AS number_before, lag(to_mode) OVER {_LIFE} AS mode_before,
            lag(event_time) OVER {_LIFE} AS time_before, lag(runtime_ms) OVER {_LIFE} AS runtime_before
        FROM judgements WHERE kind = 'transition')
    SELECT device_id, life, transition_no, event_time, from_mode, to_mode, trigger, number_before, mode_before, last_seen,
        trigger = 'amended' OR coalesce(concat_ws(' ', from_mode, trigger, to_mode) IN ({literals(ALLOWED_TRANSITIONS)}), false)
            AS allowed_by_the_table,
        CASE WHEN corrected.id IS NOT NULL THEN NULL
             WHEN job.has_listed_devices AND number_before IS NULL AND transition_no = 2
             THEN coalesce(from_mode = 'offline', false)
             WHEN job.was_rolled_back THEN transition_no > coalesce(number_before, 0)
             ELSE transition_no IS NOT DISTINCT FROM coalesce(number_before, 0) + 1 END
            AS numbered_without_gap_or_repeat,
        CASE WHEN corrected.id IS NOT NULL OR job.was_rolled_back THEN NULL
             WHEN mode_before IS NULL THEN coalesce(from_mode IN ('provisioned', 'offline'), false)
             ELSE from_mode IS NOT DISTINCT FROM mode_before END AS starts_in_the_previous_mode,
        coalesce(event_time >= coalesce(time_before, life), false) AS in_order_of_time,
        coalesce(event_time < job.landed_before, false) AS not_beyond_bronze,
        last_seen IS NULL OR coalesce(last_seen <= event_time, false) AS last_seen_is_not_later,
        CASE WHEN corrected.id IS NULL THEN coalesce(runtime_ms >= coalesce(runtime_before, 0), false) END
            AS runtime_never_decreases,
        policy_version IS NOT NULL AS names_its_policy
    FROM judged CROSS JOIN job LEFT JOIN (SELECT device_id AS id FROM corrected) AS corrected ON corrected.id = judged.device_id
    """,
    ("device_id", "life", "transition_no"),
    (
        holds("allowed_by_the_table", "every transition is in the table of `core/lifecycle.py`"),
        holds(
            "numbered_without_gap_or_repeat",
            "transitions of a life are numbered from 1, or from 2 if a bootstrapped device was silent at first; the numbers only "
            "increase if a generation was rolled back, since some transitions were then judged without being emitted",
        ),
        holds("starts_in_the_previous_mode", "each transition starts in the mode in which the previous one of that life ended"),
        holds("in_order_of_time", "no transition happened before the previous one"),
        holds("not_beyond_bronze", "no transition happened at or after the newest landed row"),
        holds("last_seen_is_not_later", "the last signal was not seen after the transition"),
        holds("runtime_never_decreases", "the runtime never decreases within a life"),
        holds("names_its_policy", "each transition names the policy in force"),
    ),
    ("event_time", "from_mode", "to_mode", "trigger", "number_before", "mode_before"),
)
_AMENDMENTS: Final = Suite(
    "amendments",
    "judgements",
    "Transitions that amendments retracted and added.",
    ("judgements", "job"),
    """
    WITH amended AS (SELECT * FROM judgements WHERE kind IN ('retract', 'add')),
        emitted AS (SELECT DISTINCT device_id AS id, life AS emitted_life, transition_no AS emitted_no
                       FROM judgements WHERE kind = 'transition'),
        added AS (SELECT DISTINCT device_id AS added_id, amendment_no AS added_no FROM judgements WHERE kind = 'add')
    SELECT amended.kind, device_id, life, transition_no, amendment_no, takes_back,
        amendment_no = row_number() OVER (PARTITION BY device_id ORDER BY amendment_no) AS numbered_without_gap_or_repeat,
        CASE WHEN amended.kind = 'retract' AND (takes_back IS NOT NULL OR NOT coalesce(event_time > job.settled, false))
             THEN coalesce(emitted_no, added_no) IS NOT NULL END AS retracts_an_emitted_transition
    FROM amended CROSS JOIN job
    LEFT JOIN emitted ON amended.takes_back IS NULL AND id = device_id AND emitted_life = life AND emitted_no = transition_no
    LEFT JOIN added ON added_id = device_id AND added_no = takes_back
    """,
    ("device_id", "amendment_no"),
    (
        holds("numbered_without_gap_or_repeat", "amendments of a device are numbered from 1, without gap or repeat"),
        holds(
            "retracts_an_emitted_transition", "a retracted transition was emitted, unless the verdict jitter still holds it back"
        ),
    ),
    ("kind", "life", "transition_no", "takes_back"),
)
_DEADLINES: Final = Suite(
    "deadlines",
    "judgements",
    "Transitions by silence, each with the deadline that follows from the policies in force and covered time.",
    ("deadlines",),
    """
    SELECT device_id, life, transition_no, event_time, last_seen, deadline,
        event_time IS NOT DISTINCT FROM deadline AS is_at_its_deadline
    FROM deadlines
    """,
    ("device_id", "life", "transition_no"),
    (
        holds(
            "is_at_its_deadline",
            "silence takes effect at the first instant at which the covered time since the last signal is the timeout of the "
            "device, or later, when an announced hold ends or a class comes into force; devices whose gateway died or "
            "returned meanwhile are left out",
        ),
    ),
    ("event_time", "last_seen", "deadline"),
    needs_replay=True,
)
_JUDGEMENT_COLUMNS: Final = (
    "kind, device_id, site, event_time, device_class, life, transition_no, from_mode, to_mode, trigger, last_seen, runtime_ms, "
    "nullif(last_errors, '[]') AS last_errors, gateway, policy_version, received_at, message_kind, boot, seq, reason, late_by_ms"
)
_JUDGEMENT_NAMES: Final = _JUDGEMENT_COLUMNS.replace("nullif(last_errors, '[]') AS last_errors", "last_errors")


def _emitted_and_defined(condition: str, unread: str = "false") -> str:
    """Return SQL that compares emitted judgements with those that follow from bronze.

    The query counts both for each distinct judgement.

    Args:
        condition: SQL condition of the judgements to compare.
        unread: SQL condition of judgements that may depend on a landed row that was not read yet.
    """
    return f"""
    WITH sides AS (
        SELECT 1 AS emitted, 0 AS expected, {_JUDGEMENT_COLUMNS} FROM judgements CROSS JOIN job WHERE {condition}
        UNION ALL
        SELECT 0 AS emitted, 1 AS expected, {_JUDGEMENT_COLUMNS} FROM expected_judgements CROSS JOIN job WHERE {condition}),
    counted AS (SELECT {_JUDGEMENT_NAMES}, CAST(sum(emitted) AS BIGINT) AS emitted, CAST(sum(expected) AS BIGINT) AS expected
                FROM sides GROUP BY {_JUDGEMENT_NAMES})
    SELECT {_JUDGEMENT_NAMES}, emitted, expected, emitted >= expected OR {unread} AS none_is_missing,
        emitted <= expected AS none_is_extra
    FROM counted CROSS JOIN job
    """


_MINUTE: Final = f"CAST(floor(unix_millis(received_at) / {MINUTE_MS}) AS BIGINT)"
_OF_SUMS: Final = {"kind": "sum_kind", "device_id": "sum_id", "message_kind": "sum_message_kind", "received_at": "sum_first"}


def _with_sums(compared: str) -> str:
    """Return SQL that also compares rows for several messages, by their sums.

    The judgements of a group have one kind, device, kind of message, and minute of ``received_at``.
    Those without a row of their own do not count as missing. The sum of the group is compared if all
    of it is judged and retained.

    Args:
        compared: SQL of `_emitted_and_defined` that compares the rows for one message.
    """
    columns = ", ".join(f"{_OF_SUMS.get(name, 'NULL')} AS {name}" for name in _JUDGEMENT_NAMES.split(", "))
    same = f"sum_kind = kind AND sum_id = device_id AND sum_message_kind = message_kind AND sum_minute = {_MINUTE}"
    emitted = "CAST(max(summed) + coalesce(sum(emitted), 0) AS BIGINT)"
    expected = "CAST(coalesce(sum(expected), 0) AS BIGINT)"
    return f"""
    WITH sums AS (
        SELECT kind AS sum_kind, device_id AS sum_id, message_kind AS sum_message_kind, {_MINUTE} AS sum_minute,
            min(received_at) AS sum_first, sum(messages) AS summed, bool_and(
                {_MINUTE} * {MINUTE_MS} >= unix_millis(job.listed_since)
                AND {_MINUTE} * {MINUTE_MS} > unix_millis(job.replayed_after_received)
                AND ({_MINUTE} + 1) * {MINUTE_MS} <= unix_millis(job.newest_received) AND received_until <= job.newest_received
                AND (kind IN ('late', 'clock') OR coalesce(event_time_until <= job.frontier, false))) AS decided
        FROM judgements CROSS JOIN job WHERE messages IS NOT NULL GROUP BY 1, 2, 3, 4),
    compared AS ({compared}),
    grouped AS (
        SELECT sum_kind, sum_id, sum_message_kind, sum_first, {emitted} AS emitted, {expected} AS expected
        FROM sums LEFT JOIN compared ON {same} WHERE decided GROUP BY sum_kind, sum_id, sum_message_kind, sum_minute, sum_first)
    SELECT {_JUDGEMENT_NAMES}, emitted, expected, none_is_missing OR summed IS NOT NULL AS none_is_missing, none_is_extra
    FROM compared LEFT JOIN sums ON {same}
    UNION ALL
    SELECT {columns}, emitted, expected, emitted >= expected AS none_is_missing, emitted <= expected AS none_is_extra FROM grouped
    """


_VERDICTS: Final = Suite(
    "verdicts",
    "judgements",
    "Transitions up to the frontier, joined with those that follow from bronze when it is judged again, by all columns.",
    ("judgements", "expected_judgements", "job"),
    _emitted_and_defined("kind = 'transition' AND event_time <= job.settled AND event_time > job.replayed_after"),
    ("device_id", "life", "transition_no"),
    (
        holds("none_is_missing", "every transition that follows from bronze was emitted"),
        holds("none_is_extra", "every emitted transition follows from bronze, once"),
    ),
    ("event_time", "from_mode", "to_mode", "trigger", "device_class", "runtime_ms", "emitted", "expected"),
    needs_replay=True,
)
_ACCOUNTS: Final = Suite(
    "accounts",
    "judgements",
    "Judgements about messages, joined with those that follow from bronze. All other messages are judged or pending.",
    ("judgements", "expected_judgements", "job"),
    _with_sums(
        _emitted_and_defined(
            f"messages IS NULL AND kind IN ({literals(LISTED)}) "
            "AND received_at <= job.newest_received AND received_at >= job.listed_since "
            "AND received_at > job.replayed_after_received "
            "AND (kind IN ('late', 'clock', 'identity_conflict') OR event_time <= job.frontier)",
            "received_at = job.newest_received",  # some rows of this millisecond may be in the next batch
        )
    ),
    ("kind", "device_id", "message_kind", "event_time", "seq"),
    (
        holds("none_is_missing", "every message that is neither judged nor pending is listed, with the reason"),
        holds("none_is_extra", "every listed message is in bronze and was not judged"),
    ),
    ("received_at", "reason", "emitted", "expected"),
    needs_replay=True,
)
_LISTED: Final = Suite(
    "listed",
    "judgements",
    "Listed messages, joined with their rows in bronze.",
    ("judgements", "messages", "job"),
    f"""
    WITH stored AS (SELECT device_id AS id, kind AS stored_kind, received_at AS stored_at, count(*) AS copies
                 FROM messages GROUP BY 1, 2, 3)
    SELECT judgements.kind, device_id, message_kind, event_time, received_at, seq, reason,
        CASE WHEN received_at >= job.retained_since THEN stored.copies IS NOT NULL END AS is_in_bronze,
        reason IS NOT NULL AS has_a_reason,
        CASE WHEN judgements.kind = 'late' THEN coalesce(late_by_ms >= 0, false) END AS has_its_lateness
    FROM judgements CROSS JOIN job LEFT JOIN stored ON id = device_id AND stored_kind = message_kind AND stored_at = received_at
    WHERE judgements.kind IN ({literals(LISTED)})
        AND received_at <= job.newest_received
    """,
    ("kind", "device_id", "message_kind", "event_time", "seq"),
    (
        holds("is_in_bronze", "every listed message is in bronze"),
        holds("has_a_reason", "every listed message has a reason"),
        holds("has_its_lateness", "every late message has its lateness"),
    ),
    ("received_at", "reason"),
)
_LINES: Final = Suite(
    "recordings",
    "messages",
    "Replayed recordings: their lines in bronze and in quarantine.",
    ("messages", "quarantine", "job"),
    """
    WITH all_lines AS (SELECT recording, line, received_at FROM messages WHERE recording IS NOT NULL
                   UNION ALL SELECT recording, line, received_at FROM quarantine WHERE recording IS NOT NULL),
    settled AS (SELECT recording, line FROM all_lines CROSS JOIN job WHERE received_at < job.newest_received)
    SELECT recording, count(*) AS lines, count(DISTINCT line) AS numbers, min(line) AS first_line, max(line) AS last_line,
        CASE WHEN max(job.has_all_lines) THEN count(DISTINCT line) = max(line) + 1 END AS no_line_is_missing,
        count(*) = count(DISTINCT line) AS no_line_is_repeated
    FROM settled CROSS JOIN job GROUP BY recording
    """,
    ("recording",),
    (
        holds("no_line_is_missing", "every line of a recording is in bronze or in quarantine"),
        holds("no_line_is_repeated", "no line is stored twice"),
    ),
    ("lines", "numbers", "first_line", "last_line"),
)
_CONSERVATION: Final = Suite(
    "conservation",
    "messages",
    "Number of rows that landing has read from the bridges' segments, with the numbers of rows in bronze and in quarantine and "
    "of rows that maintenance has removed from them.",
    ("messages", "quarantine", "landing_counts"),
    """
    SELECT taken, quarantined, in_messages, removed_messages, in_quarantine, removed_quarantine,
        in_messages + removed_messages >= taken - quarantined AS no_message_is_missing,
        in_messages + removed_messages <= taken - quarantined AS no_message_is_extra,
        in_quarantine + removed_quarantine >= quarantined AS none_is_missing_in_quarantine
    FROM landing_counts CROSS JOIN (SELECT count(*) AS in_messages FROM messages) AS bronze
    CROSS JOIN (SELECT count(*) AS in_quarantine FROM quarantine) AS rejected
    """,
    ("taken",),
    (
        holds(
            "no_message_is_missing",
            "every row that was read from a segment and not quarantined is in bronze until its retention ends",
        ),
        holds("no_message_is_extra", "every row in bronze was read from a segment, once"),
        holds(
            "none_is_missing_in_quarantine",
            "every quarantined row is in quarantine until its retention ends; more may be there while rows land",
        ),
    ),
    ("quarantined", "in_messages", "removed_messages", "in_quarantine", "removed_quarantine"),
)
_COVERAGE: Final = Suite(
    "coverage spans",
    "coverage",
    "Rows that open and close coverage gaps, each with the previous and next row of the same bridge.",
    ("coverage", "job"),
    """
    WITH spans AS (
        SELECT bridge, received_at, op, its.at AS gap_bound,
            lag(op) OVER (PARTITION BY bridge ORDER BY received_at) AS op_before,
            lag(its.at) OVER (PARTITION BY bridge ORDER BY received_at) AS at_before,
            lag(received_at) OVER (PARTITION BY bridge ORDER BY received_at) AS received_before,
            lead(op) OVER (PARTITION BY bridge ORDER BY received_at) AS op_after
        FROM coverage AS its)
    SELECT bridge, received_at, op, gap_bound, op_before, at_before,
        CASE WHEN op = 'close' THEN coalesce(op_before = 'open', false) END AS closes_an_open_gap,
        CASE WHEN op = 'close' AND op_before = 'open'
             THEN coalesce(gap_bound >= at_before, false) END AS ends_after_its_start,
        CASE WHEN op = 'open' AND op_before = 'close'
             THEN coalesce(gap_bound >= received_before, false) END AS gaps_do_not_overlap,
        CASE WHEN op = 'open' AND op_after IS NULL
             THEN unix_millis(job.landed_before) - unix_millis(received_at) < 3600000 END AS is_closed
    FROM spans CROSS JOIN job
    """,
    ("bridge", "received_at"),
    (
        holds("closes_an_open_gap", "a row that closes a gap follows one that opens it", Severity.WARNING),
        holds("ends_after_its_start", "a gap does not end before its start"),
        holds("gaps_do_not_overlap", "no gap starts before the row that closed the previous gap of the bridge", Severity.WARNING),
        holds("is_closed", "no gap has been open for an hour: no device goes offline for silence meanwhile", Severity.WARNING),
    ),
    ("op", "gap_bound", "op_before", "at_before"),
)
_CLOCKS: Final = Suite(
    "clocks",
    "messages",
    "Devices whose clock was ahead by more than `max_clock_lead`, each with its first judged message of that kind.",
    ("messages", "judgements", "job"),
    f"""
    WITH ahead AS (
        SELECT device_id, min(received_at) AS received_at, count(*) AS messages FROM messages CROSS JOIN job
        WHERE clock = 'device' AND kind IN ({literals(SIGNALS)})
            AND received_at <= job.settled AND received_at >= job.listed_since
            AND unix_millis(event_time) - unix_millis(received_at) > job.lead_ms GROUP BY 1),
    listed AS (SELECT device_id AS id, min(received_at) AS listed_at FROM judgements
               WHERE kind IN ('clock', 'unknown_device', 'after_decommission', 'duplicate') GROUP BY 1)
    SELECT device_id, received_at, messages,
        CASE WHEN job.listed_since <= job.retained_since THEN coalesce(listed_at <= received_at, false) END AS is_listed
    FROM ahead CROSS JOIN job LEFT JOIN listed ON id = device_id
    """,
    ("device_id",),
    (holds("is_listed", "a clock that is ahead is listed at its first message", Severity.WARNING),),
    ("received_at", "messages"),
)
_VOLUME: Final = Suite(
    "volume",
    "messages",
    "Number of messages in the newest full hour of each site that sent in the last eight days, with the median hour of "
    "the day before. Hours, and the time since the last message of a site, count back from the newest landed row.",
    ("messages", "job"),
    f"""
    WITH recent AS (SELECT site, received_at, unix_millis(job.landed_before) - unix_millis(received_at) AS age_ms
                    FROM messages CROSS JOIN job
                    WHERE kind IN ({literals(SIGNALS)})
                        AND unix_millis(job.landed_before) - unix_millis(received_at) < 691200000),
    known_site AS (SELECT site, max(received_at) AS last_received, min(age_ms) AS silent_ms,
                       count(DISTINCT floor(age_ms / 3600000)) AS hours_heard
                   FROM recent GROUP BY 1),
    in_a_day AS (SELECT site, received_at FROM recent WHERE age_ms < 90000000),
    hours AS (SELECT site, count(*) AS n,
                  CAST(floor((unix_millis(job.landed_before) - unix_millis(received_at)) / 3600000) AS BIGINT) AS hours_ago
              FROM in_a_day CROSS JOIN job GROUP BY 1, 3),
    pauses AS (SELECT site, unix_millis(received_at) - lag(unix_millis(received_at)) OVER
                      (PARTITION BY site ORDER BY received_at) AS pause_ms FROM in_a_day),
    pause AS (SELECT site AS paused, max(pause_ms) AS longest_ms, count(*) AS messages FROM pauses GROUP BY 1),
    before AS (SELECT site AS median_site, median(n) AS median_messages, count(*) AS hours_known
               FROM hours WHERE hours_ago > 0 GROUP BY 1)
    SELECT known_site.site, coalesce(hours.n, 0) AS messages_of_the_hour, median_messages, hours_known, last_received, longest_ms,
        CASE WHEN hours_known >= 6 THEN coalesce(hours.n, 0) >= median_messages * 0.5 END AS at_least_half_of_the_median,
        CASE WHEN hours_known >= 6 THEN coalesce(hours.n, 0) <= median_messages * 3 END AS at_most_three_times_the_median,
        CASE WHEN messages >= 100 THEN silent_ms <= 60000 + 3 * longest_ms END AS is_fresh,
        CASE WHEN hours_heard >= 6 THEN silent_ms < 90000000 END AS sends_each_day
    FROM known_site CROSS JOIN job LEFT JOIN before ON median_site = known_site.site
    LEFT JOIN hours ON hours.site = known_site.site AND hours.hours_ago = 0 LEFT JOIN pause ON paused = known_site.site
    """,
    ("site",),
    (
        holds("at_least_half_of_the_median", "a site sends at least half of its usual messages an hour", Severity.WARNING),
        holds("at_most_three_times_the_median", "a site sends at most three times its usual messages an hour", Severity.WARNING),
        holds("is_fresh", "a site is silent for at most three times its longest pause and a minute", Severity.WARNING),
        holds("sends_each_day", "a site that sent in the last eight days sends again within 25 hours", Severity.WARNING),
    ),
    ("messages_of_the_hour", "median_messages", "last_received", "longest_ms"),
)
OF_TABLES: Final = (
    *STRUCTURE, _TRANSITIONS, _AMENDMENTS, _DEADLINES, _VERDICTS, _ACCOUNTS, _LISTED, _CONSERVATION, _LINES, _COVERAGE, _CLOCKS,
    _VOLUME,
)  # fmt: skip
SUITES: Final = (*OF_TABLES, *OF_STATE)
