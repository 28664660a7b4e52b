"""Fold of one device: its transitions at exact deadlines, ends of windows and commands."""

from typing import Any

from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment, outcome, replay
from fleetpulse.core.rows import Row
from tests.support.histories.histories import START, changes, positioned, row, signal, tick

DEPLOYMENT = Deployment(allowed_lateness_ms=1_000, max_clock_lead_ms=300_000)


def policy(received_s: float = 0, effective_s: float | None = None, classes: dict[str, Any] | None = None, **rules: Any) -> Row:
    content = parse_policy({"rules": {"timeout": "60s", "forget_after": "10h", **rules}, "classes": classes or {}})
    more = {} if effective_s is None else {"effective_from_s": effective_s}
    return row(received_s, "fleet/_/_/policy", policy=content.normalised(), **more)


def judged(*rows: Row, until_s: float, **rules: Any) -> list[tuple[float, str, str, str]]:
    return changes(replay(positioned([policy(effective_s=-1000, **rules), *rows, tick(until_s)]), DEPLOYMENT))


def test_a_silent_device_is_offline_exactly_at_its_deadline() -> None:
    assert judged(signal(10), until_s=71) == [(10, "provisioned", "online", "signal"), (70, "online", "offline", "silence")]
    assert judged(signal(10), until_s=70.999) == [(10, "provisioned", "online", "signal")]


def test_a_message_exactly_at_the_deadline_is_in_time() -> None:
    assert judged(signal(10), signal(70), until_s=100) == [(10, "provisioned", "online", "signal")]
    assert len(judged(signal(10), signal(70.001), until_s=100)) == 3


def test_errors_degrade_a_device_while_enough_of_them_lie_in_the_window() -> None:
    errors = [signal(at, kind="error", code="E1") for at in (10, 20, 610)]
    transitions = judged(*errors, until_s=700, timeout="1h")
    assert transitions[1:] == [(610, "online", "degraded", "errors"), (610, "degraded", "online", "recovered")]
    transitions = judged(*[signal(at, kind="error", code="E1") for at in (10, 20, 600, 605)], until_s=1300, timeout="1h")
    assert transitions[1:] == [(600, "online", "degraded", "errors"), (620, "degraded", "online", "recovered")]
    assert len(judged(*[signal(at, kind="error") for at in (10, 20, 610.001)], until_s=700, timeout="1h")) == 1


def test_an_ordered_sequence_of_errors_flags_a_device_until_its_release() -> None:
    codes = ("reconnaissance", "x", "auth_failed", "escalation")
    attack = [signal(10 + 5 * i, kind="error", code=code) for i, code in enumerate(codes)]
    release = row(100, "d/control", op="release")
    calm = {"degraded": {"errors": 16}, "timeout": "1h"}
    transitions = judged(*attack, release, until_s=200, **calm)
    assert transitions[1:] == [(25, "online", "flagged", "sequence"), (100, "flagged", "online", "released")]
    assert judged(*attack[::-1], until_s=200, **calm) == judged(
        *sorted(attack, key=lambda one: one.event_time_ms or 0), until_s=200, **calm
    )
    unordered = [
        signal(10 + 5 * i, kind="error", code=code) for i, code in enumerate(("auth_failed", "reconnaissance", "escalation"))
    ]
    assert len(judged(*unordered, until_s=200, **calm)) == 1


def test_a_sequence_flags_a_device_if_it_ends_by_the_end_of_the_window() -> None:
    rules: dict[str, Any] = {"degraded": {"errors": 16}, "timeout": "1h", "flagged": {"window": "30s", "hold": "5m"}}
    codes = ("reconnaissance", "auth_failed", "escalation")

    def judged_attack(last_s: float) -> list[tuple[float, str, str, str]]:
        errors = [signal(at, kind="error", code=code) for at, code in zip((10, 25, last_s), codes, strict=True)]
        return judged(*errors, until_s=100, **rules)

    assert judged_attack(40)[1:] == [(40, "online", "flagged", "sequence")]
    assert judged_attack(40.001) == [(10, "provisioned", "online", "signal")]


def test_a_flag_ends_after_its_hold() -> None:
    attack = [signal(10 + i, kind="error", code=c) for i, c in enumerate(("reconnaissance", "auth_failed", "escalation"))]
    rules: dict[str, Any] = {"degraded": {"errors": 16}, "timeout": "1h", "flagged": {"hold": "5m"}}
    assert judged(*attack, until_s=400, **rules)[1:] == [
        (12, "online", "flagged", "sequence"),
        (312, "flagged", "online", "hold_over"),
    ]


def test_a_degraded_device_that_was_offline_returns_degraded() -> None:
    errors = [signal(at, kind="error") for at in (10, 11, 12)]
    transitions = judged(*errors, signal(200), until_s=230)
    assert [mode for _, _, mode, _ in transitions] == ["online", "degraded", "offline", "degraded"]


def test_silence_takes_effect_only_after_maintenance() -> None:
    hold = row(20, "d/control", op="maintain", until_s=200)
    assert judged(signal(10), hold, until_s=250)[1:] == [
        (20, "online", "maintenance", "maintain"),
        (200, "maintenance", "offline", "silence"),
    ]
    transitions = judged(signal(10), hold, signal(190), until_s=260)
    assert transitions[1:] == [
        (20, "online", "maintenance", "maintain"),
        (200, "maintenance", "online", "until"),
        (250, "online", "offline", "silence"),
    ]


def test_a_hold_beyond_the_policy_is_refused() -> None:
    def other_kinds(until_s: float) -> list[JudgementKind]:
        judgements = replay([signal(10), row(20, "d/control", op="maintain", until_s=until_s), tick(60)], DEPLOYMENT)
        return [one.kind for one in judgements if one.kind is not JudgementKind.TRANSITION]

    longest_s = 20 + 7 * 86_400
    assert (other_kinds(longest_s), other_kinds(longest_s + 0.001)) == ([], [JudgementKind.REFUSED])
    assert (other_kinds(20.001), other_kinds(20)) == ([], [JudgementKind.REFUSED]), "a hold must end after its command"


def test_an_update_ends_with_the_first_signal_after_a_restart() -> None:
    update = row(20, "d/control", op="update", until_s=7_200)
    lives: list[tuple[dict[str, Any], dict[str, Any]]]
    lives = [({"boot": "1"}, {"boot": "2"}), ({"seq": 9}, {"seq": 0}), ({"boot": "1", "seq": 9}, {"boot": "2"})]
    for before, after in lives:
        rows = [signal(10, **before), update, signal(30, **before), signal(200, **after)]
        assert judged(*rows, until_s=210)[1:] == [
            (20, "online", "updating", "update"),
            (200, "updating", "online", "updated"),
        ]
    assert judged(signal(10, boot="1"), update, signal(200, boot="1"), until_s=210)[2:] == []
    restarted = [signal(10, boot="1"), row(20, "d/control", op="maintain", until_s=7_200), signal(200, boot="2")]
    assert judged(*restarted, until_s=210)[2:] == [], "a restart does not end maintenance"


def test_a_release_ends_an_update_or_a_flag_and_is_otherwise_refused() -> None:
    release = row(40, "d/control", op="release")
    update = row(20, "d/control", op="update", until_s=7_200)
    assert judged(signal(10), update, release, until_s=50)[2:] == [(40, "updating", "online", "released")]
    for holds in ((), (row(20, "d/control", op="maintain", until_s=7_200),)):
        rows = positioned([signal(10), *holds, release, tick(50)])
        refused = [one.reason for one in replay(rows, DEPLOYMENT) if one.kind is JudgementKind.REFUSED]
        mode = "maintenance" if holds else "online"
        assert refused == [f"release ends an update or a flag; the device has neither, and is {mode}"]


def test_a_command_is_accepted_only_for_an_instant_after_the_frontier() -> None:
    def kinds(effective_s: float) -> list[JudgementKind]:
        command = row(20, "d/control", op="maintain", until_s=100, effective_from_s=effective_s)  # the frontier is at 19
        return [one.kind for one in replay(positioned([signal(10), command, tick(60)]), DEPLOYMENT)]

    assert kinds(19) == [JudgementKind.REFUSED, JudgementKind.TRANSITION]
    assert kinds(19.001) == [JudgementKind.TRANSITION] * 2


def test_a_will_takes_effect_after_its_grace_unless_a_later_signal_arrives() -> None:
    death = row(20, "d/death")
    assert judged(signal(10), death, until_s=60)[1:] == [(50, "online", "offline", "death")]
    assert judged(signal(10), death, signal(40), until_s=60) == [(10, "provisioned", "online", "signal")]
    ahead = signal(45, received_s=19)  # sent before the will, by a clock that is ahead
    assert judged(signal(10), ahead, death, until_s=60)[1:] == [(50, "online", "offline", "death")]


def test_a_will_of_another_boot_is_ignored() -> None:
    death = row(20, "d/death", boot="b1")
    assert judged(signal(10, boot="b2"), death, until_s=60) == [(10, "provisioned", "online", "signal")]


def via_g(at_s: float, device: str = "d", **more: Any) -> Row:
    return signal(at_s, device, gateway="g", **more)


def transitions_of(device: str, *rows: Row, until_s: float, **rules: Any) -> list[tuple[float, str, str, str]]:
    """Return the transitions of one of several devices."""
    judgements = replay(positioned([policy(effective_s=-1000, **rules), *rows, tick(until_s)]), DEPLOYMENT)
    return changes(one for one in judgements if one.device_id == device)


ONLINE = (10, "provisioned", "online", "signal")
DEATH = row(20, "g/death", gateway="g")


def test_a_gateways_death_makes_a_device_unreachable_until_either_is_heard() -> None:
    cut_off = (50, "online", "unreachable", "gateway_death")
    assert transitions_of("d", via_g(10), DEATH, until_s=60) == [ONLINE, cut_off]
    assert transitions_of("d", via_g(10), DEATH, via_g(49), until_s=60) == [ONLINE]
    assert transitions_of("d", via_g(10), DEATH, via_g(55), until_s=60) == [
        ONLINE,
        cut_off,
        (55, "unreachable", "online", "signal"),
    ]
    delayed = via_g(19, received_s=21)  # sent by the gateway before its death
    assert transitions_of("d", via_g(10), delayed, DEATH, until_s=60) == [ONLINE, cut_off]
    back = signal(55, "g")
    assert transitions_of("d", via_g(10), DEATH, back, until_s=60) == [
        ONLINE,
        cut_off,
        (55, "unreachable", "online", "gateway_return"),
    ]


def test_a_gateways_death_does_not_affect_a_device_that_was_heard_after_it() -> None:
    born = signal(15, "d", "birth", received_s=25, gateway="g")  # it is judged before the death, and received after it
    judgements = replay(positioned([via_g(10), DEATH, born, tick(200)]), Deployment(60_000))
    assert [one.trigger for one in judgements if one.device_id == "d"] == ["signal"]


def test_a_gateways_return_within_the_grace_changes_nothing() -> None:
    for back in (signal(49, "g"), signal(50, "g", "birth"), signal(5, "g", received_s=50), signal(45, "g", gateway="h")):
        assert transitions_of("d", via_g(10), DEATH, back, until_s=60) == [ONLINE]
    delayed = signal(15, "g", gateway="h", received_s=45)  # sent before its death, so no return
    assert transitions_of("d", via_g(10), DEATH, delayed, until_s=60)[1:] == [(50, "online", "unreachable", "gateway_death")]


def test_a_gateway_outage_does_not_count_as_silence_of_its_devices() -> None:
    died, back = row(40, "g/death", gateway="g"), signal(1040, "g")
    outage = [(70, "online", "unreachable", "gateway_death"), (1040, "unreachable", "online", "gateway_return")]
    assert transitions_of("d", via_g(10), died, back, until_s=1070.999) == [ONLINE, *outage]
    assert transitions_of("d", via_g(10), died, back, until_s=1071)[3:] == [(1070, "online", "offline", "silence")]
    twice = [died, signal(45, "g"), row(60, "g/death", gateway="g"), signal(65, "g")]
    assert transitions_of("d", via_g(10), *twice, until_s=80.999) == [ONLINE]
    assert transitions_of("d", via_g(10), *twice, until_s=81) == [ONLINE, (80, "online", "offline", "silence")]
    heard = [via_g(1050), via_g(1051)]
    rows = positioned([policy(effective_s=-1000), via_g(10), died, back, *heard, tick(1060)])
    assert outcome(rows, DEPLOYMENT).devices["d"].runtime_ms == 41_000, "30 s before the death, 10 s after the return, and 1 s"


def test_devices_go_offline_at_the_gateway_outage_limit_and_are_then_forgotten() -> None:
    rules = {"gateway_outage_limit": "100s", "forget_after": "200s"}
    outage = [(50, "online", "unreachable", "gateway_death"), (120, "unreachable", "offline", "silence")]
    assert transitions_of("d", via_g(10), DEATH, until_s=320.999, **rules)[1:] == outage
    assert transitions_of("d", via_g(10), DEATH, until_s=321, **rules)[3:] == [(320, "offline", "forgotten", "forget")]
    assert transitions_of("d", via_g(10), DEATH, signal(130, "g"), until_s=140, **rules)[1:] == outage, (
        "offline until it is heard"
    )


def test_an_offline_device_stays_offline_when_its_gateway_dies() -> None:
    died = row(80, "g/death", gateway="g")
    assert transitions_of("d", via_g(10), died, signal(500, "g"), until_s=600) == [ONLINE, (70, "online", "offline", "silence")]


def test_a_gateways_death_affects_only_devices_behind_it_at_that_instant() -> None:
    for unaffected in (signal(10), signal(10, gateway="h")):
        assert transitions_of("d", unaffected, DEATH, until_s=60) == [ONLINE]
    assert transitions_of("g", signal(10, "g"), DEATH, until_s=60) == [ONLINE, (50, "online", "offline", "death")]
    assert transitions_of("d", via_g(10), signal(15, gateway="h"), DEATH, until_s=60) == [ONLINE]
    registered = [row(5, "d/registry", op="add", gateway="g"), signal(10)]
    assert transitions_of("d", *registered, DEATH, until_s=60)[1:] == [(50, "online", "unreachable", "gateway_death")]
    moved = row(55, "d/registry", op="add", gateway="h")
    assert transitions_of("d", *registered, DEATH, moved, until_s=60)[2:] == [(55, "unreachable", "online", "registered")]
    assert len(transitions_of("d", via_g(10), row(20, "g/death"), until_s=60)) == 1  # the will of a device that is no gateway


def test_a_gateways_will_of_an_older_session_does_not_affect_its_devices() -> None:
    for name in ("boot", "session"):
        stale = row(20, "g/death", gateway="g", **{name: "1"})
        gateway_signal = via_g(10, "g", **{name: "2"})
        assert transitions_of("d", gateway_signal, via_g(10), stale, until_s=60) == [ONLINE]


def test_a_devices_own_will_takes_it_offline_despite_its_gateways_death() -> None:
    rows = [via_g(10), row(20, "d/death"), row(35, "g/death", gateway="g")]
    assert transitions_of("d", *rows, until_s=60)[1:] == [(50, "online", "offline", "death")]
    later = [via_g(10), DEATH, row(25, "g/death", gateway="g"), row(30, "d/death")]
    assert transitions_of("d", *later, until_s=65)[1:] == [
        (50, "online", "unreachable", "gateway_death"),
        (60, "unreachable", "offline", "death"),
    ]


def test_a_device_is_unreachable_when_its_hold_ends_behind_a_dead_gateway() -> None:
    held = row(15, "d/control", op="maintain", until_s=100)
    expected = [ONLINE, (15, "online", "maintenance", "maintain"), (100, "maintenance", "unreachable", "until")]
    assert transitions_of("d", via_g(10), held, DEATH, until_s=110) == expected
    returned = [via_g(10), held, DEATH, signal(60, "g")]  # of 90 s without a signal, 50 s are silence
    assert transitions_of("d", *returned, until_s=105)[2:] == [(100, "maintenance", "online", "until")]
    assert transitions_of("d", *returned, until_s=105, timeout="45s")[2:] == [(100, "maintenance", "offline", "silence")]


def test_a_registered_device_that_never_sends_times_out() -> None:
    add = row(5, "d/registry", op="add")
    assert judged(add, until_s=100) == [(65, "provisioned", "offline", "silence")]


def test_a_decommissioned_device_has_its_signals_listed_and_is_forgotten() -> None:
    rows = [policy(effective_s=-1000), signal(10), row(20, "d/registry", op="decommission"), signal(30), tick(36_100)]
    judgements = replay(rows, DEPLOYMENT)
    assert changes(judgements)[1:] == [
        (20, "online", "decommissioned", "decommission"),
        (36_020, "decommissioned", "forgotten", "forget"),
    ]
    assert [one.event_time_ms for one in judgements if one.kind is JudgementKind.AFTER_DECOMMISSION] == [START + 30_000]


def test_a_forgotten_device_that_returns_starts_a_new_life() -> None:
    result = outcome([policy(effective_s=-1000), signal(10), signal(36_100), tick(36_110)], DEPLOYMENT)
    transitions = [one for one in result.judgements if one.kind is JudgementKind.TRANSITION]
    assert [(one.to_mode, one.life_ms, one.transition_no) for one in transitions] == [
        ("online", START + 10_000, 1),
        ("offline", START + 10_000, 2),
        ("forgotten", START + 10_000, 3),
        ("online", START + 36_100_000, 1),
    ]


def test_a_shortened_timeout_applies_from_its_effective_time() -> None:
    shorter = policy(30, timeout="10s")
    assert judged(signal(10), shorter, until_s=60)[1:] == [(30, "online", "offline", "silence")]
    assert judged(signal(25), shorter, until_s=60)[1:] == [(35, "online", "offline", "silence")]


def test_a_silence_deadline_passed_during_a_hold_follows_a_later_policy() -> None:
    hold = row(15, "d/control", op="maintain", until_s=100)
    longer = policy(80, timeout="200s")
    assert judged(signal(10), hold, longer, until_s=300)[2:] == [
        (100, "maintenance", "online", "until"),
        (210, "online", "offline", "silence"),
    ]


def test_the_grace_of_a_will_follows_the_policy_in_force() -> None:
    death = row(20, "d/death")
    assert judged(signal(10), death, policy(30, death_grace="15s"), until_s=60)[1:] == [(35, "online", "offline", "death")]
    assert judged(signal(10), death, policy(40, death_grace="15s"), until_s=60)[1:] == [(40, "online", "offline", "death")]
    assert judged(signal(10), death, policy(40, death_grace="45s"), until_s=69)[1:] == [(65, "online", "offline", "death")]


def test_a_class_change_does_not_set_a_deadline_in_the_past() -> None:
    classes = {"quick": {"death_grace": "5s"}}
    rows = [policy(effective_s=-1000, classes=classes), signal(10), row(20, "d/death")]
    quick = row(30, "d/registry", op="add", **{"class": "quick"})
    assert changes(replay([*rows, quick, tick(60)], DEPLOYMENT))[1:] == [(30, "online", "offline", "death")]


def test_a_decommissioned_device_is_forgotten_by_the_policy_in_force() -> None:
    decommissioned = row(20, "d/registry", op="decommission")
    shorter = policy(50, forget_after="100s")
    assert judged(signal(10), decommissioned, shorter, until_s=200)[2:] == [(120, "decommissioned", "forgotten", "forget")]


def test_only_covered_time_counts_as_silence() -> None:
    heard = tick(20)
    opened = row(40, "fleet/_/bridge-1/gap", op="open", from_s=20, why="broker")
    closed = row(100, "fleet/_/bridge-1/gap", op="close", until_s=120)
    assert judged(signal(10), heard, opened, closed, until_s=180)[1:] == [(170, "online", "offline", "silence")]
    assert judged(signal(10), heard, opened, until_s=500) == [(10, "provisioned", "online", "signal")]


def test_runtime_is_covered_time_between_signals_within_the_timeout() -> None:
    def runtime_ms(*rows: Row) -> int:
        return outcome([policy(effective_s=-1000), *rows, tick(230)], DEPLOYMENT).devices["d"].runtime_ms

    assert runtime_ms(signal(10), signal(40), signal(200), signal(210)) == 40_000
    assert runtime_ms(signal(10), signal(70), signal(210)) == 60_000, "a gap of exactly the timeout counts"
    assert runtime_ms(signal(10), signal(70.001), signal(210)) == 0


def test_a_late_message_is_listed_with_its_lateness() -> None:
    judgements = replay([signal(10), tick(100), signal(20, received_s=101)], DEPLOYMENT)
    assert [(one.kind, one.late_by_ms) for one in judgements if one.kind is JudgementKind.LATE] == [(JudgementKind.LATE, 80_000)]


def test_the_copy_received_first_counts_and_others_are_duplicates() -> None:
    judgements = replay([signal(10, seq=1), signal(10, seq=1, received_s=10.5), tick(60)], DEPLOYMENT)
    assert [one.received_at_ms for one in judgements if one.kind is JudgementKind.DUPLICATE] == [START + 10_500]
    assert len(changes(judgements)) == 1


def test_a_signal_with_a_clock_far_ahead_is_listed_and_changes_nothing() -> None:
    judgements = replay([signal(10), signal(10_000, received_s=11), tick(60)], DEPLOYMENT)
    assert [one.kind for one in judgements if one.kind is not JudgementKind.TRANSITION] == [JudgementKind.CLOCK]
    assert len(changes(judgements)) == 1


def test_unknown_devices_are_listed_if_the_policy_quarantines_them() -> None:
    content = parse_policy({"unknown_devices": "quarantine"}).normalised()
    quarantining = row(0, "fleet/_/_/policy", policy=content, effective_from_s=-1000)
    judgements = replay([quarantining, signal(10), tick(60)], DEPLOYMENT)
    assert [one.kind for one in judgements] == [JudgementKind.UNKNOWN_DEVICE]


def test_a_forgotten_device_is_listed_as_unknown_until_it_is_registered_again() -> None:
    rules = {"rules": {"timeout": "60s", "forget_after": "100s"}, "unknown_devices": "quarantine"}
    quarantining = row(0, "fleet/_/_/policy", policy=parse_policy(rules).normalised(), effective_from_s=-1000)
    added, again = (row(at, "d/registry", op="add") for at in (5, 600))
    judgements = replay([quarantining, added, signal(10), signal(500), again, signal(610), tick(630)], DEPLOYMENT)
    assert [(one.event_time_ms, one.reason) for one in judgements if one.kind is JudgementKind.UNKNOWN_DEVICE] == [
        (START + 500_000, "the device is not registered, or was forgotten; register it (again)")
    ]
    assert [one[2] for one in changes(judgements)] == ["online", "offline", "forgotten", "online"]


def test_a_command_to_a_device_has_no_effect_and_its_answer_is_a_signal() -> None:
    command = {"op": "command", "id": "c", "name": "set"}
    history = [signal(10), row(20, "d/control", **command), row(30, "unknown/control", **command), tick(3_000)]
    assert replay(history, DEPLOYMENT) == replay([signal(10), tick(3_000)], DEPLOYMENT)
    answers = [signal(10), row(20, "d/ack", ts_s=20, id="c", status="rejected"), tick(3_000)]
    beats = [signal(10), row(20, "d/heartbeat", ts_s=20), tick(3_000)]
    found, expected = (
        [(one.to_mode, one.event_time_ms, one.last_seen_ms) for one in replay(rows, DEPLOYMENT)] for rows in (answers, beats)
    )
    assert found == expected != []


def test_an_error_of_a_control_row_counts_without_proving_its_device_alive() -> None:
    rules = {"degraded": {"errors": 2, "window": "5m"}, "flagged": {"codes": ["vital:battery", "x"]}, "timeout": "100s"}
    alarm = row(50, "d/control", op="error", code="vital:battery")
    transitions = judged(signal(10), signal(40, kind="error", code="y"), alarm, until_s=200, **rules)
    assert transitions[1:] == [(50, "online", "degraded", "errors"), (140, "degraded", "offline", "silence")]
    assert judged(signal(10), alarm, signal(60, kind="error", code="x"), until_s=100, **rules)[-1][3] == "sequence"
    alarms = [row(at, "d/control", op="error", code=7) for at in (150, 151)]
    assert judged(signal(10), *alarms, signal(160), until_s=170, **rules)[2:] == [(160, "offline", "degraded", "signal")]


def test_an_alarm_is_an_event_of_the_session_that_goes_on() -> None:
    def alarm(at: float, code: str = "vital:battery") -> Row:
        return row(at, "d/control", op="error", code=code)

    rules = _reviews(code="vital:battery")
    alarms = [alarm(10), alarm(20), alarm(30, "vital:load"), alarm(40)]
    assert judged(signal(5), *alarms, until_s=41, **rules)[1:] == [(40, "online", "flagged", "velocity")]
    assert judged(signal(5), alarm(10), alarm(20), *_errors(30), until_s=41, **_reviews())[-1][3] == "velocity"
    assert len(judged(signal(5), alarm(10), alarm(20), alarm(65.001), until_s=70, **rules)) == 1, "the session is over"
    in_time = judged(signal(5), alarm(10), alarm(20), alarm(65), until_s=70, **rules)
    assert [(one[0], one[3]) for one in in_time[1:]] == [(65, "velocity"), (65, "session_over")]
    assert len(judged(signal(5), alarm(10), alarm(20), signal(66), alarm(67), until_s=70, **rules)) == 1
    offline = {**rules, "timeout": "30s"}
    assert judged(signal(5), alarm(10), alarm(20), alarm(40), until_s=50, **offline)[-1][3] == "silence"
    registered = row(0, "d/registry", op="add", **{"class": "default"})
    assert judged(registered, *(alarm(at) for at in (1, 2, 3)), until_s=10, **rules) == [], "a device never heard has no session"


def _reviews(events: int = 3, **velocity: Any) -> dict[str, Any]:
    """Return rules with a velocity rule, and without other rules about errors."""
    calm = {"degraded": {"errors": 16}, "flagged": {"codes": ["never"]}, "timeout": "1h"}
    return {**calm, "session": {"idle": "60s"}, "velocity": {"events": events, "hold": "10m", **velocity}}


def _errors(*at_s: float, **more: Any) -> list[Row]:
    return [signal(at, kind="error", code="declined", **more) for at in at_s]


def test_the_last_of_enough_events_in_a_session_holds_a_device_for_review() -> None:
    assert judged(*_errors(10, 20), signal(30), until_s=60, **_reviews()) == [(10, "provisioned", "online", "signal")]
    transitions = judged(*_errors(10, 20, 30), signal(60), until_s=61, **_reviews())
    assert transitions[1:] == [(30, "online", "flagged", "velocity")]
    assert judged(*_errors(10), until_s=20, **_reviews(events=1))[1:] == [(10, "online", "flagged", "velocity")]
    assert len(judged(*_errors(10, 20, 30), signal(60), until_s=61, **_reviews(events=0))) == 1, "the rule is off"


def test_only_events_of_the_kind_and_code_of_the_rule_count() -> None:
    assert len(judged(*_errors(10, 20, 30), until_s=40, **_reviews(code="other"))) == 1
    assert judged(*_errors(10, 20, 30), until_s=40, **_reviews(code="declined"))[-1][3] == "velocity"
    births = [signal(at, kind="birth") for at in (10, 20, 30)]
    assert judged(*births, until_s=40, **_reviews(kind="birth"))[1:] == [(30, "online", "flagged", "velocity")]
    assert len(judged(*births, until_s=40, **_reviews())) == 1


def test_a_session_ends_by_idleness_of_more_than_its_limit() -> None:
    assert judged(*_errors(10, 20, 80), until_s=100, **_reviews())[-1][3] == "velocity", "a signal at the limit is in time"
    assert len(judged(*_errors(10, 20, 80.001), until_s=100, **_reviews())) == 1
    assert judged(*_errors(10, 20), signal(75), *_errors(130), until_s=150, **_reviews())[-1][3] == "velocity"


def test_a_session_ends_when_the_device_is_offline_or_a_birth_names_another() -> None:
    rules = {**_reviews(), "timeout": "30s"}
    assert [why for *_, why in judged(*_errors(10, 20, 55, 60), until_s=70, **rules)] == ["signal", "silence", "signal"]
    others: list[tuple[dict[str, Any], dict[str, Any]]] = [({"session": "s"}, {"session": "t"}), ({"boot": "p"}, {"boot": "q"})]
    for before, after in others:
        rows = [*_errors(10, 20, **before), signal(25, kind="birth", **after), *_errors(30, **after)]
        assert len(judged(*rows, until_s=40, **_reviews())) == 1
        same = [*_errors(10, 20, **before), signal(25, kind="birth", **before), *_errors(30, **before)]
        assert judged(*same, until_s=40, **_reviews())[-1][3] == "velocity"


def test_a_flag_for_review_ends_with_its_session_or_its_hold() -> None:
    events = _errors(10, 20, 30)
    assert judged(*events, signal(50), until_s=120, **_reviews())[2:] == [(110, "flagged", "online", "session_over")]
    assert len(judged(*events, signal(50), signal(110), until_s=120, **_reviews())) == 2
    steady = [signal(at) for at in range(50, 700, 50)]
    assert judged(*events, *steady, until_s=700, **_reviews())[2:] == [(630, "flagged", "online", "hold_over")]
    again = [*events, *_errors(300, 310), signal(340)]
    assert len(judged(*again, until_s=350, **_reviews())) == 3, "the next session counts anew"


def test_a_confirmed_flag_ends_only_by_a_command() -> None:
    events, confirm = _errors(10, 20, 30), row(40, "d/control", op="confirm")
    assert len(judged(*events, confirm, until_s=3_000, **_reviews())) == 2
    release = row(2_000, "d/control", op="release")
    transitions = judged(*events, confirm, release, until_s=3_000, **_reviews())
    assert transitions[2:] == [(2_000, "flagged", "online", "released")]
    rows = positioned([policy(effective_s=-1000, **_reviews()), signal(10), confirm, tick(50)])
    refused = [one.reason for one in replay(rows, DEPLOYMENT) if one.kind is JudgementKind.REFUSED]
    assert refused == ["confirm is for a flag; the device has none, and is online"]


def test_a_release_counts_the_events_of_a_session_anew() -> None:
    events, release = _errors(10, 20, 30), row(31, "d/control", op="release")
    after = judged(*events, release, *_errors(35, 40), signal(60), until_s=61, **_reviews())
    assert [why for *_, why in after] == ["signal", "velocity", "released"]
    after = judged(*events, release, *_errors(35, 40, 45), signal(60), until_s=61, **_reviews())
    assert [why for *_, why in after] == ["signal", "velocity", "released", "velocity"]


def test_a_sequence_turns_a_flag_for_review_into_one_of_its_own() -> None:
    rules = {**_reviews(events=1, code="x"), "flagged": {"codes": ["y"], "hold": "200s"}}
    review, sequence = signal(10, kind="error", code="x"), signal(20, kind="error", code="y")
    assert judged(review, sequence, until_s=800, **rules)[2:] == [(610, "flagged", "online", "hold_over")], "not earlier"
    assert judged(sequence, signal(30, kind="error", code="x"), until_s=800, **rules)[2:] == [
        (220, "flagged", "online", "hold_over")
    ], "the rule does not replace the flag of a sequence"
