"""The laws of this domain as suites: what holds between a device's transitions, its messages, its state, and time.

Rule 1: each law names one fault; that what was said is what bronze comes to (``verdicts``, ``accounts``) catches the rest.
Rule 2: a law that cannot be told from the rows that are kept says nothing of them, and is never a guess. What is judged again
begins with a snapshot (``stand.since``) where the first rows are gone, or too many.
Rule 3: what an operator's correction has changed is left out: it goes on from its amended history.
"""

from typing import Final

from fleetpulse.core.judgements import LISTED
from fleetpulse.core.lifecycle import HELD, PRESENT, TRANSITIONS, Mode
from fleetpulse.core.quality.state_suites import OF_STATE
from fleetpulse.core.quality.suites import CORRECTED, STRUCTURE, Severity, Suite, among, holds
from fleetpulse.core.rows import SIGNALS

_LIVE: Final = sorted({Mode.PROVISIONED, *PRESENT})  # how online is worn, see `lifecycle`
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
    "The transitions that were judged, each with the one before it in the device's life.",
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
        holds("allowed_by_the_table", "every transition is one of the table of `core/lifecycle.py`"),
        holds(
            "numbers_without_gap_or_repeat",
            "a life's transitions are numbered from 1, or from 2 where a listed device began silent; they only grow where "
            "some were judged silently on a way back",
        ),
        holds("from_mode_is_the_to_mode_before", "each begins where the one before it in that life ended"),
        holds("in_the_order_of_time", "none happened before the one before it"),
        holds("not_before_its_time", "none happened at or after the newest row that has landed"),
        holds("seen_before", "the last signal was not seen after it"),
        holds("runtime_grows", "the runtime never grows less within a life"),
        holds("by_a_policy", "each names the policy that it was judged by"),
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
        holds("numbers_without_gap_or_repeat", "a device's amendments are numbered from 1, without gap or repeat"),
        holds("takes_back_what_was_said", "what is taken back had been said, unless it is still held back by the jitter"),
    ),
    ("kind", "life", "transition_no", "takes_back"),
)
_DEADLINES: Final = Suite(
    "deadlines",
    "judgements",
    "The transitions by silence, each with the instant that the policies in force and covered time give.",
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
            "silence acts at the first instant at which the covered time since the last signal is the device's timeout, "
            "or where an announced hold ends, or a class begins, after that; left out if the gateway died or returned meanwhile",
        ),
    ),
    ("event_time", "last_seen", "deadline"),
    again=True,
)
_TOLD: Final = (
    "kind, device_id, site, event_time, device_class, life, transition_no, from_mode, to_mode, trigger, last_seen, runtime_ms, "
    "nullif(last_errors, '[]') AS last_errors, gateway, policy_version, received_at, message_kind, boot, seq, reason, late_by_ms"
)
_TOLD_NAMES: Final = _TOLD.replace("nullif(last_errors, '[]') AS last_errors", "last_errors")


def _beside(such: str, unread: str = "false") -> str:
    """Return the SQL that counts, of each judgement, how often it was said, and how often bronze comes to it.

    Args:
        such: which judgements.
        unread: those that may be due to a row which has landed, and was not read yet.
    """
    return f"""
    WITH sides AS (
        SELECT 1 AS said, 0 AS due, {_TOLD} FROM judgements CROSS JOIN stand WHERE {such}
        UNION ALL
        SELECT 0 AS said, 1 AS due, {_TOLD} FROM defined CROSS JOIN stand WHERE {such}),
    counted AS (SELECT {_TOLD_NAMES}, CAST(sum(said) AS BIGINT) AS said, CAST(sum(due) AS BIGINT) AS due
                FROM sides GROUP BY {_TOLD_NAMES})
    SELECT {_TOLD_NAMES}, said, due, said >= due OR {unread} AS none_is_lost, said <= due AS none_is_made_up
    FROM counted CROSS JOIN stand
    """


_VERDICTS: Final = Suite(
    "verdicts",
    "judgements",
    "The transitions up to the frontier, beside those that bronze comes to when it is judged again, in all columns.",
    ("judgements", "defined", "stand"),
    _beside("kind = 'transition' AND event_time <= stand.settled AND event_time > stand.since"),
    ("device_id", "life", "transition_no"),
    (
        holds("none_is_lost", "whatever bronze comes to was said"),
        holds("none_is_made_up", "whatever was said is what bronze comes to, once"),
    ),
    ("event_time", "from_mode", "to_mode", "trigger", "device_class", "runtime_ms", "said", "due"),
    again=True,
)
_ACCOUNTS: Final = Suite(
    "accounts",
    "judgements",
    "Judgements of messages beside transitions, and those that follow from bronze. All other messages are judged or pending.",
    ("judgements", "defined", "stand"),
    _beside(
        f"kind IN ({among(LISTED)}) "
        "AND received_at <= stand.newest AND received_at >= stand.told AND received_at > stand.since_received "
        "AND (kind IN ('late', 'clock', 'identity_conflict') OR event_time <= stand.frontier)",
        "received_at = stand.newest",  # of one millisecond some may be in the next batch
    ),
    ("kind", "device_id", "message_kind", "event_time", "seq"),
    (
        holds("none_is_lost", "every message that is neither judged nor waits is listed, with the reason"),
        holds("none_is_made_up", "every listed message is in bronze, and was not judged"),
    ),
    ("received_at", "reason", "said", "due"),
    again=True,
)
_LISTED: Final = Suite(
    "listed",
    "judgements",
    "The messages that are listed, beside their rows in bronze.",
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
        holds("says_why", "each is listed with the reason"),
        holds("says_how_late", "a late one is listed with how late it was"),
    ),
    ("received_at", "reason"),
)
_LINES: Final = Suite(
    "recordings",
    "messages",
    "The recordings that were played: their lines in bronze and in quarantine.",
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
        holds("no_line_is_lost", "every line of a recording is a message, or in quarantine"),
        holds("no_line_came_twice", "no line is there twice"),
    ),
    ("lines", "numbers", "first_line", "last_line"),
)
_CONSERVATION: Final = Suite(
    "conservation",
    "messages",
    "How many rows landing has taken from the bridges' segments, beside how many are in bronze and in quarantine, and how many "
    "maintenance has removed from there.",
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
        holds("no_message_is_lost", "whatever was taken from a segment, and not quarantined, is in bronze until it is too old"),
        holds("no_message_is_made_up", "whatever is in bronze was taken from a segment, once"),
        holds(
            "none_is_lost_from_quarantine", "whatever was quarantined is there until it is too old; while rows land, more may be"
        ),
    ),
    ("quarantined", "in_messages", "removed_messages", "in_quarantine", "removed_quarantine"),
)
_COVERAGE: Final = Suite(
    "coverage spans",
    "coverage",
    "The rows that open and close the spans in which we did not listen, each beside its neighbours of the same bridge.",
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
        holds("closes_what_was_open", "what closes was open", Severity.WARNING),
        holds("ends_after_it_began", "a span ends after it began"),
        holds("no_two_overlap", "of one bridge no span begins before the row that closed the one before it", Severity.WARNING),
        holds("is_closed", "no span has been open for an hour: nobody is offline while it is", Severity.WARNING),
    ),
    ("op", "begun_or_ended", "op_before", "at_before"),
)
_CLOCKS: Final = Suite(
    "clocks",
    "messages",
    "The devices whose clock was ahead by more than `max_clock_lead`, each with its first such message that was judged.",
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
    (holds("is_listed", "a clock that is ahead is listed from its first message on", Severity.WARNING),),
    ("received_at", "messages"),
)
_VOLUME: Final = Suite(
    "volume",
    "messages",
    "The newest whole hour of each site that was heard within eight days, beside the median of the day before it, and how long "
    "ago the site was heard, counted back from the newest row that has landed.",
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
        holds("not_half_of_usual", "a site sends half of what it usually does in an hour, at the least", Severity.WARNING),
        holds("not_thrice_as_usual", "a site sends thrice what it usually does, at the most", Severity.WARNING),
        holds("is_fresh", "a site is silent for thrice its longest pause and a minute, at the most", Severity.WARNING),
        holds(
            "is_heard_each_day", "a site that was heard in the week before is heard within a day and an hour", Severity.WARNING
        ),
    ),
    ("messages_of_the_hour", "usual", "heard_at", "longest_ms"),
)
OF_TABLES: Final = (
    *STRUCTURE, _TRANSITIONS, _AMENDMENTS, _DEADLINES, _VERDICTS, _ACCOUNTS, _LISTED, _CONSERVATION, _LINES, _COVERAGE, _CLOCKS,
    _VOLUME,
)  # fmt: skip
SUITES: Final = (*OF_TABLES, *OF_STATE)
