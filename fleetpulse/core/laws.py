"""The laws of this domain as suites: what holds between a device's transitions, its messages, its state, and time.

Rule 1: each law names one fault; that what was said is what bronze comes to (``verdicts``, ``accounts``) catches the rest.
Rule 2: a law that cannot be told from the rows that are kept says nothing of them, and is never a guess.
Rule 3: what an operator's correction has changed is left out: it goes on from its amended history.
"""

from typing import Final

from fleetpulse.core.machine import PRESENT, TRANSITIONS, Mode, Trigger
from fleetpulse.core.messages import FROM_DEVICES, SIGNALS
from fleetpulse.core.suites import STRUCTURE, Expectation, Form, Severity, Suite, holds

_LIVE: Final = sorted({Mode.PROVISIONED, *PRESENT})  # how online is worn, see `machine`
WAYS: Final = sorted(
    f"{before} {trigger} {after}"
    for (before, trigger), target in TRANSITIONS.items()
    for after in (_LIVE if target is Mode.ONLINE else [target])
    if after is not before
)


def _in(words: object) -> str:
    assert isinstance(words, list | tuple | frozenset), "a list of words"
    return ", ".join(f"'{word}'" for word in sorted(words))


_CORRECTED: Final = "corrected AS (SELECT DISTINCT device_id FROM messages WHERE kind = 'correct')"
_LIFE: Final = "(PARTITION BY device_id, life ORDER BY transition_no, event_time)"
_TRANSITIONS: Final = Suite(
    "transitions",
    "judgements",
    "The transitions that were judged, each with the one before it in the device's life.",
    ("judgements", "messages", "stand"),
    f"""
    WITH {_CORRECTED}, judged AS (
        SELECT device_id, life, transition_no, event_time, from_mode, to_mode, trigger, last_seen, runtime_ms, policy_version,
            lag(transition_no) OVER {_LIFE} AS number_before, lag(to_mode) OVER {_LIFE} AS mode_before,
            lag(event_time) OVER {_LIFE} AS time_before, lag(runtime_ms) OVER {_LIFE} AS runtime_before
        FROM judgements WHERE kind = 'transition')
    SELECT device_id, life, transition_no, event_time, from_mode, to_mode, trigger, number_before, mode_before, last_seen,
        trigger = 'amended' OR coalesce(concat_ws(' ', from_mode, trigger, to_mode) IN ({_in(WAYS)}), false) AS allowed_by_the_table,
        CASE WHEN corrected.id IS NULL THEN transition_no IS NOT DISTINCT FROM coalesce(number_before, 0) + 1 END
            AS numbers_without_gap_or_repeat,
        CASE WHEN corrected.id IS NOT NULL THEN NULL
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
        holds("allowed_by_the_table", "every transition is one of the table of `core/machine.py`"),
        holds("numbers_without_gap_or_repeat", "a life's transitions are numbered from 1, without gap or repeat"),
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
    "What amend took back and added.",
    ("judgements",),
    """
    WITH said AS (SELECT * FROM judgements WHERE kind IN ('retract', 'add')),
        transition AS (SELECT DISTINCT device_id AS id, life AS its_life, transition_no AS its_no
                       FROM judgements WHERE kind = 'transition'),
        added AS (SELECT DISTINCT device_id AS added_id, amendment_no AS added_no FROM judgements WHERE kind = 'add')
    SELECT said.kind, device_id, life, transition_no, amendment_no, takes_back,
        amendment_no = row_number() OVER (PARTITION BY device_id ORDER BY amendment_no) AS numbers_without_gap_or_repeat,
        CASE WHEN said.kind = 'retract' THEN coalesce(its_no, added_no) IS NOT NULL END AS takes_back_what_was_said
    FROM said
    LEFT JOIN transition ON said.takes_back IS NULL AND id = device_id AND its_life = life AND its_no = transition_no
    LEFT JOIN added ON added_id = device_id AND added_no = takes_back
    """,
    ("device_id", "amendment_no"),
    (
        holds("numbers_without_gap_or_repeat", "a device's amendments are numbered from 1, without gap or repeat"),
        holds("takes_back_what_was_said", "what is taken back had been said"),
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
            "silence acts at the first instant at which the covered time since the last signal is the timeout in force, "
            "or where an announced hold ends, or a class begins, after that",
        ),
    ),
    ("event_time", "last_seen", "deadline"),
    whole=True,
)
_TOLD: Final = (
    "kind, device_id, site, event_time, device_class, life, transition_no, from_mode, to_mode, trigger, last_seen, runtime_ms, "
    "nullif(last_errors, '[]') AS last_errors, gateway, policy_version, received_at, message_kind, boot, seq, reason, late_by_ms"
)
_TOLD_NAMES: Final = _TOLD.replace("nullif(last_errors, '[]') AS last_errors", "last_errors")


def _beside(such: str) -> str:
    """Return the SQL that counts, of each judgement, how often it was said, and how often bronze comes to it."""
    return f"""
    WITH sides AS (
        SELECT 1 AS said, 0 AS due, {_TOLD} FROM judgements CROSS JOIN stand WHERE {such}
        UNION ALL
        SELECT 0 AS said, 1 AS due, {_TOLD} FROM defined CROSS JOIN stand WHERE {such}),
    counted AS (SELECT {_TOLD_NAMES}, sum(said) AS said, sum(due) AS due FROM sides GROUP BY {_TOLD_NAMES})
    SELECT {_TOLD_NAMES}, said, due, said >= due AS none_is_lost, said <= due AS none_is_made_up FROM counted
    """


_VERDICTS: Final = Suite(
    "verdicts",
    "judgements",
    "The transitions up to the frontier, beside those that bronze comes to when it is judged again, in all columns.",
    ("judgements", "defined", "stand"),
    _beside("kind = 'transition' AND event_time <= stand.settled"),
    ("device_id", "life", "transition_no"),
    (
        holds("none_is_lost", "whatever bronze comes to was said"),
        holds("none_is_made_up", "whatever was said is what bronze comes to, once"),
    ),
    ("event_time", "from_mode", "to_mode", "trigger", "device_class", "runtime_ms", "said", "due"),
    whole=True,
)
_ACCOUNTS: Final = Suite(
    "accounts",
    "judgements",
    "What was said of messages that were not judged, beside what bronze comes to: what is listed nowhere was judged, or waits.",
    ("judgements", "defined", "stand"),
    _beside(
        "kind IN ('late', 'clock', 'duplicate', 'after_decommission', 'unknown_device', 'refused') "
        "AND received_at <= stand.newest AND (kind IN ('late', 'clock') OR event_time <= stand.frontier)"
    ),
    ("kind", "device_id", "message_kind", "event_time", "seq"),
    (
        holds("none_is_lost", "every message that is neither judged nor waits is listed, with the reason"),
        holds("none_is_made_up", "every listed message is in bronze, and was not judged"),
    ),
    ("received_at", "reason", "said", "due"),
    whole=True,
)
_LISTED: Final = Suite(
    "listed",
    "judgements",
    "The messages that were listed instead of judged, and what bronze has of them.",
    ("judgements", "messages", "stand"),
    """
    WITH had AS (SELECT device_id AS id, kind AS of_kind, received_at AS had_at, count(*) AS copies FROM messages GROUP BY 1, 2, 3)
    SELECT judgements.kind, device_id, message_kind, event_time, received_at, seq, reason,
        CASE WHEN received_at >= stand.kept THEN had.copies IS NOT NULL END AS is_in_bronze,
        reason IS NOT NULL AS says_why,
        CASE WHEN judgements.kind = 'late' THEN coalesce(late_by_ms >= 0, false) END AS says_how_late
    FROM judgements CROSS JOIN stand LEFT JOIN had ON id = device_id AND of_kind = message_kind AND had_at = received_at
    WHERE judgements.kind IN ('late', 'clock', 'duplicate', 'after_decommission', 'unknown_device', 'refused')
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
    WITH line AS (SELECT recording, line FROM messages WHERE recording IS NOT NULL
                  UNION ALL SELECT recording, line FROM quarantine WHERE recording IS NOT NULL)
    SELECT recording, count(*) AS lines, count(DISTINCT line) AS numbers, min(line) AS first_line, max(line) AS last_line,
        CASE WHEN max(stand.whole) THEN count(DISTINCT line) = max(line) + 1 END AS no_line_is_lost,
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
_COVERAGE: Final = Suite(
    "coverage spans",
    "coverage",
    "The rows that open and close the spans in which we did not listen, each beside its neighbours of the same bridge.",
    ("coverage", "stand"),
    """
    WITH spans AS (
        SELECT bridge, received_at, op, its.at AS begun_or_ended, lag(op) OVER (PARTITION BY bridge ORDER BY received_at) AS op_before,
            lag(its.at) OVER (PARTITION BY bridge ORDER BY received_at) AS at_before,
            lag(received_at) OVER (PARTITION BY bridge ORDER BY received_at) AS received_before,
            lead(op) OVER (PARTITION BY bridge ORDER BY received_at) AS op_after
        FROM coverage AS its)
    SELECT bridge, received_at, op, begun_or_ended, op_before, at_before,
        CASE WHEN op = 'close' THEN coalesce(op_before = 'open', false) END AS closes_what_was_open,
        CASE WHEN op = 'close' AND op_before = 'open' THEN coalesce(begun_or_ended >= at_before, false) END AS ends_after_it_began,
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
_FUTURE: Final = Suite(
    "clocks",
    "messages",
    "Messages whose clock ran further ahead of us than it may.",
    ("messages", "judgements", "stand"),
    f"""
    WITH ahead AS (
        SELECT device_id, kind, received_at, event_time FROM messages CROSS JOIN stand
        WHERE clock = 'device' AND kind IN ({_in(FROM_DEVICES)}) AND received_at <= stand.newest
            AND unix_millis(event_time) - unix_millis(received_at) > stand.lead_ms),
    listed AS (SELECT DISTINCT device_id AS id, message_kind, received_at AS listed_at FROM judgements WHERE kind = 'clock')
    SELECT device_id, kind, received_at, event_time, listed.id IS NOT NULL AS is_listed_and_not_judged
    FROM ahead LEFT JOIN listed ON id = device_id AND message_kind = kind AND listed_at = received_at
    """,
    ("device_id", "kind", "received_at"),
    (holds("is_listed_and_not_judged", "a message from the future is listed as a clock's fault", Severity.WARNING),),
    ("event_time",),
)
_VOLUME: Final = Suite(
    "volume",
    "messages",
    "The newest whole hour of each site, beside the median of the day before it, and how long ago the site was heard.",
    ("messages", "stand"),
    f"""
    WITH heard AS (SELECT site, received_at FROM messages CROSS JOIN stand
                   WHERE kind IN ({_in(SIGNALS)}) AND unix_millis(stand.landed) - unix_millis(received_at) < 90000000),
    hours AS (SELECT site, CAST(floor((unix_millis(stand.landed) - unix_millis(received_at)) / 3600000) AS BIGINT) AS ago, count(*) AS n
              FROM heard CROSS JOIN stand GROUP BY 1, 2),
    pauses AS (SELECT site, unix_millis(received_at) - lag(unix_millis(received_at)) OVER
                      (PARTITION BY site ORDER BY received_at) AS pause_ms FROM heard),
    pause AS (SELECT site AS paused, max(pause_ms) AS longest_ms, count(*) AS messages FROM pauses GROUP BY 1),
    last_heard AS (SELECT site AS heard_site, max(received_at) AS heard_at FROM heard GROUP BY 1),
    before AS (SELECT site, median(n) AS usual, count(*) AS known FROM hours WHERE ago > 0 GROUP BY 1)
    SELECT before.site, coalesce(hours.n, 0) AS messages_of_the_hour, usual, known, heard_at, longest_ms,
        CASE WHEN known >= 6 THEN coalesce(hours.n, 0) >= usual * 0.5 END AS not_half_of_usual,
        CASE WHEN known >= 6 THEN coalesce(hours.n, 0) <= usual * 3 END AS not_thrice_as_usual,
        CASE WHEN messages >= 100 THEN unix_millis(stand.landed) - unix_millis(heard_at) <= 60000 + 3 * longest_ms END AS is_fresh
    FROM before CROSS JOIN stand LEFT JOIN hours ON hours.site = before.site AND hours.ago = 0
    JOIN pause ON paused = before.site JOIN last_heard ON heard_site = before.site
    """,
    ("site",),
    (
        holds("not_half_of_usual", "a site sends half of what it usually does in an hour, at the least", Severity.WARNING),
        holds("not_thrice_as_usual", "a site sends thrice what it usually does, at the most", Severity.WARNING),
        holds("is_fresh", "a site is silent for thrice its longest pause and a minute, at the most", Severity.WARNING),
    ),
    ("messages_of_the_hour", "usual", "heard_at", "longest_ms"),
)
_SAID: Final = """said AS (
        SELECT device_id, life, transition_no, event_time, to_mode, runtime_ms FROM judgements WHERE kind = 'transition'
        UNION SELECT device_id, life, transition_no, event_time, to_mode, runtime_ms FROM pending)"""
_NOT_JUDGED: Final = """SELECT DISTINCT device_id AS not_id, message_kind AS not_kind, received_at AS not_at, event_time AS not_time
        FROM judgements WHERE kind IN ('late', 'clock', 'after_decommission', 'unknown_device')"""
_STATE: Final = Suite(
    "state",
    "device_snapshots",
    "The devices of a snapshot, or of a generation, beside their newest transitions and messages.",
    ("state", "taken", "pending", "dues", "judgements", "messages"),
    f"""
    WITH {_CORRECTED}, {_SAID},
    settled AS (SELECT said.*, row_number() OVER (PARTITION BY device_id ORDER BY life DESC, transition_no DESC) AS place
                FROM said CROSS JOIN taken WHERE event_time <= taken.settled),
    newest AS (SELECT device_id AS newest_id, life AS newest_life, transition_no AS newest_no, to_mode AS newest_mode
               FROM settled WHERE place = 1),
    its AS (SELECT device_id AS its_id, life AS its_life, transition_no AS its_no, max(event_time) AS its_time,
                max(to_mode) AS its_mode, max(runtime_ms) AS its_runtime_ms FROM said GROUP BY 1, 2, 3),
    not_judged AS ({_NOT_JUDGED}),
    seen AS (SELECT device_id AS seen_id, max(CASE WHEN kind IN ({_in(SIGNALS)}) THEN event_time END) AS seen_at
             FROM messages CROSS JOIN taken LEFT JOIN not_judged
             ON not_id = device_id AND not_kind = kind AND not_at = received_at AND not_time = event_time
             WHERE kind IN ({_in([*SIGNALS, "registry"])}) AND clock <> 'invalid' AND event_time <= taken.frontier
                 AND received_at <= taken.newest AND not_id IS NULL GROUP BY 1),
    device AS (SELECT *, row_number() OVER (PARTITION BY device_id ORDER BY mode) AS time FROM state WHERE part = 'device')
    SELECT coalesce(device_id, newest_id) AS device_id, device.life, device.transition_no, mode, mode_since, last_seen,
        device.runtime_ms, newest_mode, newest_no, its_mode, seen_at, due_at, due_to,
        CASE WHEN taken.chosen THEN NULL WHEN newest_mode <> 'forgotten' THEN device.device_id IS NOT NULL END AS is_not_missing,
        CASE WHEN device.device_id IS NULL OR taken.chosen OR corrected.id IS NOT NULL THEN NULL
             WHEN transition_no > 0 THEN its_no IS NOT NULL
             WHEN life >= taken.kept THEN seen_id IS NOT NULL END AS is_known,
        time = 1 AS is_there_once,
        mode IN ({_in([mode for mode in Mode if mode is not Mode.FORGOTTEN])}) AS mode_is_known,
        CASE WHEN device.device_id IS NULL OR corrected.id IS NOT NULL OR taken.chosen THEN NULL
             WHEN transition_no = 0 THEN mode = 'provisioned'
             ELSE its_mode IS NULL OR (mode IS NOT DISTINCT FROM its_mode AND mode_since IS NOT DISTINCT FROM its_time) END
            AS mode_is_that_of_its_transition,
        CASE WHEN device.device_id IS NULL OR newest_id IS NULL OR corrected.id IS NOT NULL THEN NULL
             ELSE life > newest_life OR (life = newest_life AND transition_no >= newest_no) END AS is_not_stale,
        CASE WHEN device.device_id IS NULL THEN NULL
             ELSE coalesce(last_seen, life) <= taken.frontier AND mode_since <= taken.frontier END AS is_not_ahead,
        CASE WHEN last_seen IS NOT NULL THEN quiet_since IS NOT DISTINCT FROM last_seen END AS silence_counts_from_the_last_signal,
        CASE WHEN last_seen IS NULL OR corrected.id IS NOT NULL OR last_seen < taken.kept THEN NULL
             ELSE seen_at IS NOT DISTINCT FROM last_seen END AS last_seen_is_the_newest_signal_judged,
        CASE WHEN its_no IS NOT NULL AND corrected.id IS NULL THEN device.runtime_ms >= its_runtime_ms END AS runtime_goes_on,
        CASE WHEN device.device_id IS NULL THEN NULL ELSE due_at IS NULL OR due_at > taken.settled END AS nothing_is_overdue
    FROM device FULL OUTER JOIN newest ON device.device_id = newest_id CROSS JOIN taken
    LEFT JOIN its ON its_id = device.device_id AND its_life = device.life AND its_no = device.transition_no
    LEFT JOIN seen ON seen_id = device.device_id
    LEFT JOIN dues ON due_id = device.device_id
    LEFT JOIN (SELECT device_id AS id FROM corrected) AS corrected ON corrected.id = coalesce(device.device_id, newest_id)
    """,
    ("device_id",),
    (
        holds("is_not_missing", "a device whose newest transition does not forget it is there"),
        holds("is_known", "a device that is there has the transition that it names, or a message"),
        holds("is_there_once", "a device is there once"),
        holds("mode_is_known", "its mode is one of the machine's, and not forgotten"),
        holds("mode_is_that_of_its_transition", "its mode, and since when, are those of its newest transition"),
        holds("is_not_stale", "no transition of it up to there is newer than the one that it names"),
        holds("is_not_ahead", "nothing of it lies beyond the frontier"),
        holds("silence_counts_from_the_last_signal", "silence counts from the last signal on"),
        holds("last_seen_is_the_newest_signal_judged", "the last signal is the newest one of bronze that was judged"),
        holds("runtime_goes_on", "its runtime is not less than at its newest transition"),
        holds("nothing_is_overdue", "nobody is online without a signal within the timeout, or held beyond its time"),
    ),
    ("mode", "mode_since", "last_seen", "newest_mode", "newest_no", "its_mode", "seen_at", "due_at", "due_to"),
)
_COMPARED: Final = (
    "site", "device_class", "gateway", "mode", "mode_since", "life", "transition_no", "class_since", "last_seen", "quiet_since",
    "quiet_covered_ms", "runtime_ms", "boot", "seq", "reboots", "degraded_until", "flagged_until", "held_until", "death",
    "death_covered_ms", "errors",
)  # fmt: skip
_AS_JUDGED: Final = Suite(
    "state as judged",
    "device_snapshots",
    "The devices of a snapshot, or of a generation, beside those that bronze comes to when it is judged again up to there.",
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
        holds("is_there", "every device that bronze comes to is there"),
        holds("is_due", "bronze comes to every device that is there"),
        holds("is_as_bronze_says", "each is what bronze comes to, in all fields"),
    ),
    ("mode", "mode_due", "last_seen", "last_seen_due", "runtime_ms", "runtime_due_ms"),
    whole=True,
)
_WAITING: Final = Suite(
    "waiting",
    "device_snapshots",
    "Of each device, how many messages wait in the state for their time, and how many of bronze have to.",
    ("state", "taken", "messages"),
    f"""
    WITH due AS (
        SELECT device_id AS due_id, count(*) AS due FROM messages CROSS JOIN taken
        WHERE kind IN ({_in(FROM_DEVICES)}) AND device_id <> '_' AND clock <> 'invalid' AND event_time > taken.frontier
            AND received_at <= taken.newest AND NOT taken.chosen
            AND NOT (clock = 'device' AND unix_millis(event_time) - unix_millis(received_at) > taken.lead_ms)
        GROUP BY 1),
    waits AS (SELECT device_id, count(*) AS waiting FROM state CROSS JOIN taken
              WHERE part = 'signal' AND NOT taken.chosen GROUP BY 1)
    SELECT coalesce(device_id, due_id) AS device_id, coalesce(waiting, 0) AS waiting, coalesce(due, 0) AS due,
        coalesce(waiting, 0) >= coalesce(due, 0) AS none_is_lost, coalesce(waiting, 0) <= coalesce(due, 0) AS none_is_made_up
    FROM waits FULL OUTER JOIN due ON device_id = due_id
    """,
    ("device_id",),
    (
        holds("none_is_lost", "every message that was received, and lies beyond the frontier, waits in the state"),
        holds("none_is_made_up", "whatever waits was received, and waits once"),
    ),
    ("waiting", "due"),
)
_SNAPSHOT: Final = Suite(
    "snapshot",
    "device_snapshots",
    "A snapshot, or a generation's state, as a whole.",
    ("state", "taken"),
    """
    SELECT taken.subject, taken.frontier, taken.frontier_before, taken.key_groups, taken.devices, taken.worlds,
        (SELECT count(*) FROM state WHERE part = 'device') AS found, (SELECT count(*) FROM state WHERE part = 'group') AS groups,
        (SELECT count(*) FROM state WHERE part = 'group') = taken.key_groups AS every_key_group_is_there,
        taken.worlds = 1 AS all_stand_at_one_instant,
        (SELECT count(*) FROM state WHERE part = 'device') = taken.devices AS as_many_devices_as_were_counted,
        CASE WHEN taken.frontier_before IS NOT NULL THEN coalesce(taken.frontier >= taken.frontier_before, false) END
            AS frontier_does_not_run_backwards
    FROM taken
    """,
    ("subject",),
    (
        holds("every_key_group_is_there", "every key group is there, once"),
        holds("all_stand_at_one_instant", "coverage, frontier and policies are the same in all of them"),
        holds("as_many_devices_as_were_counted", "there are as many devices as were counted when it was taken"),
        holds("frontier_does_not_run_backwards", "it is not older than the snapshot before it", Severity.WARNING),
    ),
    ("frontier", "frontier_before", "key_groups", "groups", "worlds", "devices", "found"),
)
OF_TABLES: Final = (
    *STRUCTURE, _TRANSITIONS, _AMENDMENTS, _DEADLINES, _VERDICTS, _ACCOUNTS, _LISTED, _LINES, _COVERAGE, _FUTURE, _VOLUME,
)  # fmt: skip
OF_STATE: Final = (_SNAPSHOT, _STATE, _AS_JUDGED, _WAITING)
SUITES: Final = (*OF_TABLES, *OF_STATE)
__all__ = ["OF_STATE", "OF_TABLES", "SUITES", "WAYS", "Expectation", "Form", "Trigger"]
