"""Data-quality suites of domain rules: transitions, messages, coverage, clocks.

Rule 1: each rule detects one kind of fault. The suites ``verdicts`` and ``accounts`` compare all
judgements with those that follow from bronze, which detects every other fault.
Rule 2: a rule that the retained rows cannot decide does not apply to them. If the first rows of
bronze are removed, or too many, judging again starts at a snapshot (``stand.since``).
Rule 3: devices that a correction row has changed are left out: they continue from their amended
history.

Source: ADR 16.
"""

from typing import Final

from fleetpulse.core.judgements import LISTED
from fleetpulse.core.lifecycle import HELD, PRESENT, TRANSITIONS, Mode
from fleetpulse.core.quality.state_suites import OF_STATE
from fleetpulse.core.quality.suites import CORRECTED, STRUCTURE, Severity, Suite, among, holds
from fleetpulse.core.rows import SIGNALS

_LIVE: Final = sorted({Mode.PROVISIONED, *PRESENT})  # modes for the target ONLINE, see `core.lifecycle`
WAYS: Final = sorted(
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
    ("judgements", "messages", "stand"),
    f"""
    WITH {CORRECTED}, judged AS (
        SELECT device_id, life, transition_no, event_time, from_mode, to_mode, trigger, last_seen, runtime_ms, policy_version,
            lag(transition_no) OVER {_LIFE} AS number_before, lag(to_mode) OVER {_LIFE} AS mode_before,
            lag(event_time) OVER {_LIFE} AS time_before, lag(runtime_ms) OVER {_LIFE} AS runtime_before
        FROM judgements WHERE kind = 'transition')
    SELECT device_id, life, transition_no, event_time, from_mode, to_mode, trigger, number_before, mode_before, last_seen,
        trigger = 'amended' OR coalesce(concat_ws(' ', from_mode, trigger, to_mode) IN ({among(WAYS)}), false)
            AS allowed_by_the_table,
        CASE WHEN corrected.id IS NOT NULL THEN NULL
             WHEN stand.listed AND number_before IS NULL AND transition_no = 2 THEN coalesce(from_mode = 'offline', false)
             WHEN stand.went_back THEN transition_no > coalesce(number_before, 0)
             ELSE transition_no IS NOT DISTINCT FROM coalesce(number_before, 0) + 1 END
            AS numbers_without_gap_or_repeat,
        CASE WHEN corrected.id IS NOT NULL OR stand.went_back THEN NULL
             WHEN mode_before IS NULL THEN coalesce(from_mode IN ('provisioned', 'offline'), false)
             ELSE from_mode IS NOT DISTINCT FROM mode_before END AS from_mode_is_the_to_mode_before,
        coalesce(event_time >= coalesce(time_before, life), false) AS in_the_order_of_time,
        coalesce(event_time < stand.landed, false) AS not_before_its_time,
        last_seen IS NULL OR coalesce(last_seen <= event_time, false) AS seen_before,
        CASE WHEN corrected.id IS NULL THEN coalesce(runtime_ms >= coalesce(runtime_before, 0), false) END AS runtime_grows,
        policy_version IS NOT NULL AS by_a_policy
    FROM judged CROSS JOIN stand LEFT JOIN (SELECT device_id AS id FROM corrected) AS corrected ON corrected.id = judged.device_id
    """,
    ("device_id", "life", "transition_no"),
    (
        holds("allowed_by_the_table", "every transition is in the table of `core/lifecycle.py`"),
        holds(
            "numbers_without_gap_or_repeat",
            "transitions of a life are numbered from 1, or from 2 if a bootstrapped device was silent at first; the numbers only "
            "increase if a generation was rolled back, since some transitions were then judged without being emitted",
        ),
        holds(
            "from_mode_is_the_to_mode_before", "each transition starts in the mode in which the previous one of that life ended"
        ),
        holds("in_the_order_of_time", "no transition happened before the previous one"),
        holds("not_before_its_time", "no transition happened at or after the newest landed row"),
        holds("seen_before", "the last signal was not seen after the transition"),
        holds("runtime_grows", "the runtime never decreases within a life"),
        holds("by_a_policy", "each transition names the policy in force"),
    ),
    ("event_time", "from_mode", "to_mode", "trigger", "number_before", "mode_before"),
)
_AMENDMENTS: Final = Suite(
    "amendments",
    "judgements",
    "Transitions that amendments retracted and added.",
    ("judgements", "stand"),
    """
    WITH said AS (SELECT * FROM judgements WHERE kind IN ('retract', 'add')),
        transition AS (SELECT DISTINCT device_id AS id, life AS its_life, transition_no AS its_no
                       FROM judgements WHERE kind = 'transition'),
        added AS (SELECT DISTINCT device_id AS added_id, amendment_no AS added_no FROM judgements WHERE kind = 'add')
    SELECT said.kind, device_id, life, transition_no, amendment_no, takes_back,
        amendment_no = row_number() OVER (PARTITION BY device_id ORDER BY amendment_no) AS numbers_without_gap_or_repeat,
        CASE WHEN said.kind = 'retract' AND (takes_back IS NOT NULL OR NOT coalesce(event_time > stand.settled, false))
             THEN coalesce(its_no, added_no) IS NOT NULL END AS takes_back_what_was_said
    FROM said CROSS JOIN stand
    LEFT JOIN transition ON said.takes_back IS NULL AND id = device_id AND its_life = life AND its_no = transition_no
    LEFT JOIN added ON added_id = device_id AND added_no = takes_back
    """,
    ("device_id", "amendment_no"),
    (
        holds("numbers_without_gap_or_repeat", "amendments of a device are numbered from 1, without gap or repeat"),
        holds("takes_back_what_was_said", "a retracted transition was emitted, unless the verdict jitter still holds it back"),
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
        event_time IS NOT DISTINCT FROM deadline AS offline_exactly_at_the_deadline
    FROM deadlines
    """,
    ("device_id", "life", "transition_no"),
    (
        holds(
            "offline_exactly_at_the_deadline",
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

    It counts both for each distinct judgement.

    Args:
        condition: SQL condition of the judgements to compare.
        unread: SQL condition of judgements that may depend on a landed row that was not read yet.
    """
    return f"""
    WITH sides AS (
        SELECT 1 AS said, 0 AS due, {_JUDGEMENT_COLUMNS} FROM judgements CROSS JOIN stand WHERE {condition}
        UNION ALL
        SELECT 0 AS said, 1 AS due, {_JUDGEMENT_COLUMNS} FROM defined CROSS JOIN stand WHERE {condition}),
    counted AS (SELECT {_JUDGEMENT_NAMES}, CAST(sum(said) AS BIGINT) AS said, CAST(sum(due) AS BIGINT) AS due
                FROM sides GROUP BY {_JUDGEMENT_NAMES})
    SELECT {_JUDGEMENT_NAMES}, said, due, said >= due OR {unread} AS none_is_lost, said <= due AS none_is_made_up
    FROM counted CROSS JOIN stand
    """


_VERDICTS: Final = Suite(
    "verdicts",
    "judgements",
    "Transitions up to the frontier, joined with those that follow from bronze when it is judged again, by all columns.",
    ("judgements", "defined", "stand"),
    _emitted_and_defined("kind = 'transition' AND event_time <= stand.settled AND event_time > stand.since"),
    ("device_id", "life", "transition_no"),
    (
        holds("none_is_lost", "every transition that follows from bronze was emitted"),
        holds("none_is_made_up", "every emitted transition follows from bronze, once"),
    ),
    ("event_time", "from_mode", "to_mode", "trigger", "device_class", "runtime_ms", "said", "due"),
    needs_replay=True,
)
_ACCOUNTS: Final = Suite(
    "accounts",
    "judgements",
    "Judgements about messages, joined with those that follow from bronze. All other messages are judged or pending.",
    ("judgements", "defined", "stand"),
    _emitted_and_defined(
        f"kind IN ({among(LISTED)}) "
        "AND received_at <= stand.newest AND received_at >= stand.told AND received_at > stand.since_received "
        "AND (kind IN ('late', 'clock', 'identity_conflict') OR event_time <= stand.frontier)",
        "received_at = stand.newest",  # some rows of this millisecond may be in the next batch
    ),
    ("kind", "device_id", "message_kind", "event_time", "seq"),
    (
        holds("none_is_lost", "every message that is neither judged nor pending is listed, with the reason"),
        holds("none_is_made_up", "every listed message is in bronze and was not judged"),
    ),
    ("received_at", "reason", "said", "due"),
    needs_replay=True,
)
_LISTED: Final = Suite(
    "listed",
    "judgements",
    "Listed messages, joined with their rows in bronze.",
    ("judgements", "messages", "stand"),
    f"""
    WITH had AS (SELECT device_id AS id, kind AS of_kind, received_at AS had_at, count(*) AS copies
                 FROM messages GROUP BY 1, 2, 3)
    SELECT judgements.kind, device_id, message_kind, event_time, received_at, seq, reason,
        CASE WHEN received_at >= stand.kept THEN had.copies IS NOT NULL END AS is_in_bronze,
        reason IS NOT NULL AS says_why,
        CASE WHEN judgements.kind = 'late' THEN coalesce(late_by_ms >= 0, false) END AS says_how_late
    FROM judgements CROSS JOIN stand LEFT JOIN had ON id = device_id AND of_kind = message_kind AND had_at = received_at
    WHERE judgements.kind IN ({among(LISTED)})
        AND received_at <= stand.newest
    """,
    ("kind", "device_id", "message_kind", "event_time", "seq"),
    (
        holds("is_in_bronze", "every listed message is in bronze"),
        holds("says_why", "every listed message has a reason"),
        holds("says_how_late", "every late message has its lateness"),
    ),
    ("received_at", "reason"),
)
_LINES: Final = Suite(
    "recordings",
    "messages",
    "Replayed recordings: their lines in bronze and in quarantine.",
    ("messages", "quarantine", "stand"),
    """
    WITH every AS (SELECT recording, line, received_at FROM messages WHERE recording IS NOT NULL
                   UNION ALL SELECT recording, line, received_at FROM quarantine WHERE recording IS NOT NULL),
    line AS (SELECT recording, line FROM every CROSS JOIN stand WHERE received_at < stand.newest)
    SELECT recording, count(*) AS lines, count(DISTINCT line) AS numbers, min(line) AS first_line, max(line) AS last_line,
        CASE WHEN max(stand.lines) THEN count(DISTINCT line) = max(line) + 1 END AS no_line_is_lost,
        count(*) = count(DISTINCT line) AS no_line_came_twice
    FROM line CROSS JOIN stand GROUP BY recording
    """,
    ("recording",),
    (
        holds("no_line_is_lost", "every line of a recording is in bronze or in quarantine"),
        holds("no_line_came_twice", "no line is stored twice"),
    ),
    ("lines", "numbers", "first_line", "last_line"),
)
_CONSERVATION: Final = Suite(
    "conservation",
    "messages",
    "Number of rows that landing has read from the bridges' segments, with the numbers of rows in bronze and in quarantine and "
    "of rows that maintenance has removed from them.",
    ("messages", "quarantine", "landed"),
    """
    SELECT taken, quarantined, in_messages, removed_messages, in_quarantine, removed_quarantine,
        in_messages + removed_messages >= taken - quarantined AS no_message_is_lost,
        in_messages + removed_messages <= taken - quarantined AS no_message_is_made_up,
        in_quarantine + removed_quarantine >= quarantined AS none_is_lost_from_quarantine
    FROM landed CROSS JOIN (SELECT count(*) AS in_messages FROM messages) AS kept
    CROSS JOIN (SELECT count(*) AS in_quarantine FROM quarantine) AS refused
    """,
    ("taken",),
    (
        holds(
            "no_message_is_lost",
            "every row that was read from a segment and not quarantined is in bronze until its retention ends",
        ),
        holds("no_message_is_made_up", "every row in bronze was read from a segment, once"),
        holds(
            "none_is_lost_from_quarantine",
            "every quarantined row is in quarantine until its retention ends; more may be there while rows land",
        ),
    ),
    ("quarantined", "in_messages", "removed_messages", "in_quarantine", "removed_quarantine"),
)
_COVERAGE: Final = Suite(
    "coverage spans",
    "coverage",
    "Rows that open and close coverage gaps, each with the previous and next row of the same bridge.",
    ("coverage", "stand"),
    """
    WITH spans AS (
        SELECT bridge, received_at, op, its.at AS begun_or_ended,
            lag(op) OVER (PARTITION BY bridge ORDER BY received_at) AS op_before,
            lag(its.at) OVER (PARTITION BY bridge ORDER BY received_at) AS at_before,
            lag(received_at) OVER (PARTITION BY bridge ORDER BY received_at) AS received_before,
            lead(op) OVER (PARTITION BY bridge ORDER BY received_at) AS op_after
        FROM coverage AS its)
    SELECT bridge, received_at, op, begun_or_ended, op_before, at_before,
        CASE WHEN op = 'close' THEN coalesce(op_before = 'open', false) END AS closes_what_was_open,
        CASE WHEN op = 'close' AND op_before = 'open'
             THEN coalesce(begun_or_ended >= at_before, false) END AS ends_after_it_began,
        CASE WHEN op = 'open' AND op_before = 'close'
             THEN coalesce(begun_or_ended >= received_before, false) END AS no_two_overlap,
        CASE WHEN op = 'open' AND op_after IS NULL
             THEN unix_millis(stand.landed) - unix_millis(received_at) < 3600000 END AS is_closed
    FROM spans CROSS JOIN stand
    """,
    ("bridge", "received_at"),
    (
        holds("closes_what_was_open", "a row that closes a gap follows one that opens it", Severity.WARNING),
        holds("ends_after_it_began", "a gap does not end before its start"),
        holds("no_two_overlap", "no gap starts before the row that closed the previous gap of the bridge", Severity.WARNING),
        holds("is_closed", "no gap has been open for an hour: no device goes offline for silence meanwhile", Severity.WARNING),
    ),
    ("op", "begun_or_ended", "op_before", "at_before"),
)
_CLOCKS: Final = Suite(
    "clocks",
    "messages",
    "Devices whose clock was ahead by more than `max_clock_lead`, each with its first judged message of that kind.",
    ("messages", "judgements", "stand"),
    f"""
    WITH ahead AS (
        SELECT device_id, min(received_at) AS received_at, count(*) AS messages FROM messages CROSS JOIN stand
        WHERE clock = 'device' AND kind IN ({among(SIGNALS)}) AND received_at <= stand.settled AND received_at >= stand.told
            AND unix_millis(event_time) - unix_millis(received_at) > stand.lead_ms GROUP BY 1),
    listed AS (SELECT device_id AS id, min(received_at) AS listed_at FROM judgements
               WHERE kind IN ('clock', 'unknown_device', 'after_decommission', 'duplicate') GROUP BY 1)
    SELECT device_id, received_at, messages,
        CASE WHEN stand.told <= stand.kept THEN coalesce(listed_at <= received_at, false) END AS is_listed
    FROM ahead CROSS JOIN stand LEFT JOIN listed ON id = device_id
    """,
    ("device_id",),
    (holds("is_listed", "a clock that is ahead is listed at its first message", Severity.WARNING),),
    ("received_at", "messages"),
)
_VOLUME: Final = Suite(
    "volume",
    "messages",
    "Number of messages in the newest full hour of each site heard within eight days, with the median hour of the day before. "
    "Hours, and the time since the site was heard, count back from the newest landed row.",
    ("messages", "stand"),
    f"""
    WITH lately AS (SELECT site, received_at, unix_millis(stand.landed) - unix_millis(received_at) AS ago_ms
                    FROM messages CROSS JOIN stand
                    WHERE kind IN ({among(SIGNALS)}) AND unix_millis(stand.landed) - unix_millis(received_at) < 691200000),
    known_site AS (SELECT site, max(received_at) AS heard_at, min(ago_ms) AS silent_ms,
                       count(DISTINCT floor(ago_ms / 3600000)) AS known_hours
                   FROM lately GROUP BY 1),
    heard AS (SELECT site, received_at FROM lately WHERE ago_ms < 90000000),
    hours AS (SELECT site, count(*) AS n,
                  CAST(floor((unix_millis(stand.landed) - unix_millis(received_at)) / 3600000) AS BIGINT) AS ago
              FROM heard CROSS JOIN stand GROUP BY 1, 3),
    pauses AS (SELECT site, unix_millis(received_at) - lag(unix_millis(received_at)) OVER
                      (PARTITION BY site ORDER BY received_at) AS pause_ms FROM heard),
    pause AS (SELECT site AS paused, max(pause_ms) AS longest_ms, count(*) AS messages FROM pauses GROUP BY 1),
    before AS (SELECT site AS usual_site, median(n) AS usual, count(*) AS known FROM hours WHERE ago > 0 GROUP BY 1)
    SELECT known_site.site, coalesce(hours.n, 0) AS messages_of_the_hour, usual, known, heard_at, longest_ms,
        CASE WHEN known >= 6 THEN coalesce(hours.n, 0) >= usual * 0.5 END AS not_half_of_usual,
        CASE WHEN known >= 6 THEN coalesce(hours.n, 0) <= usual * 3 END AS not_thrice_as_usual,
        CASE WHEN messages >= 100 THEN silent_ms <= 60000 + 3 * longest_ms END AS is_fresh,
        CASE WHEN known_hours >= 6 THEN silent_ms < 90000000 END AS is_heard_each_day
    FROM known_site CROSS JOIN stand LEFT JOIN before ON usual_site = known_site.site
    LEFT JOIN hours ON hours.site = known_site.site AND hours.ago = 0 LEFT JOIN pause ON paused = known_site.site
    """,
    ("site",),
    (
        holds("not_half_of_usual", "a site sends at least half of its usual messages an hour", Severity.WARNING),
        holds("not_thrice_as_usual", "a site sends at most three times its usual messages an hour", Severity.WARNING),
        holds("is_fresh", "a site is silent for at most three times its longest pause and a minute", Severity.WARNING),
        holds("is_heard_each_day", "a site heard in the last week is heard again within 25 hours", Severity.WARNING),
    ),
    ("messages_of_the_hour", "usual", "heard_at", "longest_ms"),
)
OF_TABLES: Final = (
    *STRUCTURE, _TRANSITIONS, _AMENDMENTS, _DEADLINES, _VERDICTS, _ACCOUNTS, _LISTED, _CONSERVATION, _LINES, _COVERAGE, _CLOCKS,
    _VOLUME,
)  # fmt: skip
SUITES: Final = (*OF_TABLES, *OF_STATE)
