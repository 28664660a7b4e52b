"""Explanation of each trigger: sentence, rule, roles of its rows, and what would have prevented it."""

from collections.abc import Sequence
from typing import Any

import pytest

from fleetpulse.core.explanation.explainers import Explanation, explain
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.lifecycle import Trigger
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment, outcome
from fleetpulse.core.rows import Row
from tests.support.histories.histories import START, row, signal, stamped_by_bridge, tick

pytestmark = pytest.mark.unit
DEPLOYMENT = Deployment(10_000, 30_000)
RULES: dict[str, Any] = {
    "rules": {
        "timeout": "100s",
        "death_grace": "20s",
        "forget_after": "500s",
        "gateway_outage_limit": "300s",
        "degraded": {"errors": 2, "window": "60s"},
        "flagged": {"codes": ["probe", "login"], "window": "60s", "hold": "80s"},
        "session": {"idle": "70s"},
        "velocity": {"events": 2, "kind": "birth", "hold": "90s"},
    }
}
IN_FORCE = row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000)
BEAT = signal(10, "d")


def _gap(received_s: float, op: str, **more: Any) -> Row:
    return row(received_s, "fleet/_/bridge-1/gap", op=op, **more)


def _control(at_s: float, op: str, **more: Any) -> Row:
    return row(at_s, "d/control", op=op, **more)


def _registry(at_s: float, op: str, **more: Any) -> Row:
    return row(at_s, "d/registry", op=op, **more)


def _behind(at_s: float, **more: Any) -> Row:
    return signal(at_s, "d", gateway="g", **more)


def _explained(rows: Sequence[Row], trigger: Trigger, deployment: Deployment = DEPLOYMENT) -> Explanation:
    history = stamped_by_bridge([IN_FORCE, *rows])
    made = [one for one in outcome(history, deployment).judgements if _is(one, trigger)]
    assert made, [(one.kind, one.trigger, one.reason) for one in outcome(history, deployment).judgements]
    found = explain(history, deployment, made[-1])
    assert found is not None
    return found


def _is(one: Judgement, trigger: Trigger) -> bool:
    return one.kind is JudgementKind.TRANSITION and one.device_id == "d" and one.trigger is trigger


CASES: list[tuple[Trigger, list[Row], str, str, list[str]]] = [
    (Trigger.SIGNAL, [BEAT, tick(40)], "a heartbeat message was received, the first one", "", ["signal"]),
    (
        Trigger.SIGNAL,
        [BEAT, signal(200, "d"), tick(240)],
        "a heartbeat message was received, 3m10s after the one before",
        "",
        ["signal"],
    ),
    (Trigger.SILENCE, [BEAT, tick(200)], "nothing was heard for 1m40s of covered time", "timeout", ["last signal"]),
    (
        Trigger.SILENCE,
        [_registry(5, "add"), tick(200)],
        "nothing was heard for 1m40s of covered time",
        "timeout",
        ["registration"],
    ),
    (
        Trigger.DEATH,
        [BEAT, row(30, "d/death"), tick(90)],
        "its connection ended with a will, and it was not heard again within 20s",
        "death_grace",
        ["will", "last signal"],
    ),
    (
        Trigger.GATEWAY_DEATH,
        [signal(5, "g", "birth"), _behind(10), row(30, "g/death", gateway="g"), tick(90)],
        "its gateway g died and did not return within 20s",
        "death_grace",
        ["death of the gateway", "last signal"],
    ),
    (
        Trigger.GATEWAY_RETURN,
        [signal(5, "g", "birth"), _behind(10), row(30, "g/death", gateway="g"), signal(80, "g", "birth"), tick(120)],
        "its gateway g was heard again",
        "",
        ["return of the gateway"],
    ),
    (
        Trigger.SILENCE,
        [signal(5, "g", "birth"), _behind(10), row(30, "g/death", gateway="g"), tick(500)],
        "its gateway g was dead for 5m of covered time",
        "gateway_outage_limit",
        ["death of the gateway", "last signal"],
    ),
    (
        Trigger.ERRORS,
        [BEAT, signal(20, "d", "error", code="x"), signal(30, "d", "error", code="y"), tick(60)],
        "2 errors are within 1m",
        "degraded",
        ["error", "error"],
    ),
    (
        Trigger.RECOVERED,
        [BEAT, signal(20, "d", "error", code="x"), signal(30, "d", "error", code="y"), signal(70, "d"), tick(120)],
        "fewer than 2 errors are within 1m",
        "degraded",
        ["error", "error"],
    ),
    (
        Trigger.SEQUENCE,
        [signal(10, "d", "error", code="probe"), signal(25, "d"), signal(65, "d", "error", code="login"), tick(90)],
        "the errors probe, login occurred in this order within 1m",
        "flagged",
        ["error", "error"],
    ),
    (
        Trigger.HOLD_OVER,
        [signal(10, "d", "error", code="probe"), signal(65, "d", "error", code="login"), signal(120, "d"), tick(180)],
        "it was flagged for 1m20s, and nobody released it",
        "flagged",
        ["last error of the sequence"],
    ),
    (
        Trigger.VELOCITY,
        [signal(10, "d", "birth"), signal(25, "d"), signal(45, "d", "birth"), tick(80)],
        "2 birth messages occurred in one session, within 35s",
        "velocity",
        ["event", "event"],
    ),
    (
        Trigger.SESSION_OVER,
        [signal(10, "d", "birth"), signal(20, "d", "birth"), signal(30, "d"), tick(130)],
        "its session was over after 1m10s without a signal, and nobody confirmed the flag for review",
        "session",
        ["event that held it for review", "last signal"],
    ),
    (
        Trigger.HOLD_OVER,
        [signal(10, "d", "birth"), signal(20, "d", "birth"), signal(80, "d"), tick(150)],
        "it was flagged for 1m30s, and nobody released it",
        "velocity",
        ["last event of the session"],
    ),
    (
        Trigger.RELEASED,
        [signal(10, "d", "error", code="probe"), signal(65, "d", "error", code="login"), _control(90, "release"), tick(120)],
        "an operator released it",
        "",
        ["command"],
    ),
    (
        Trigger.MAINTAIN,
        [BEAT, _control(30, "maintain", until_s=90), tick(60)],
        "an operator announced maintenance until 2023-11-14T22:14:50.000Z",
        "",
        ["command"],
    ),
    (
        Trigger.UPDATE,
        [BEAT, _control(30, "update", until_s=90), tick(60)],
        "an operator announced an update until 2023-11-14T22:14:50.000Z",
        "",
        ["command"],
    ),
    (
        Trigger.UNTIL,
        [BEAT, _control(30, "maintain", until_s=90), signal(80, "d"), tick(120)],
        "the announced end was reached",
        "",
        ["announcement"],
    ),
    (
        Trigger.UPDATED,
        [signal(10, "d", firmware="1"), _control(30, "update", until_s=90), signal(50, "d", firmware="2"), tick(80)],
        "a signal shows new firmware: 2 instead of 1",
        "",
        ["signal"],
    ),
    (
        Trigger.UPDATED,
        [signal(10, "d", boot="a"), _control(30, "update", until_s=90), signal(50, "d", boot="b"), tick(80)],
        "a signal shows a restart: boot b instead of a",
        "",
        ["signal"],
    ),
    (
        Trigger.DECOMMISSION,
        [BEAT, _registry(30, "decommission"), tick(60)],
        "the registry took it out of service",
        "",
        ["registry entry"],
    ),
    (
        Trigger.REGISTERED,
        [BEAT, _registry(30, "decommission"), _registry(50, "add"), tick(80)],
        "the registry has a new entry for it",
        "",
        ["registry entry"],
    ),
    (Trigger.FORGET, [BEAT, tick(600)], "nothing was heard for 8m20s of covered time", "forget_after", ["last signal"]),
    (
        Trigger.FORGET,
        [BEAT, _registry(30, "decommission"), tick(600)],
        "it has been out of service for 8m20s",
        "forget_after",
        ["decommissioned"],
    ),
]


@pytest.mark.parametrize(("trigger", "rows", "sentence", "rule", "roles"), CASES, ids=[str(case[0]) for case in CASES])
def test_a_trigger_is_explained(trigger: Trigger, rows: list[Row], sentence: str, rule: str, roles: list[str]) -> None:
    found = _explained(rows, trigger)
    assert found.sentence == sentence
    assert (found.rule.key if found.rule else "") == rule
    assert [one.role for one in found.evidence] == roles
    if found.terms:
        assert found.terms[-1].at_ms == found.transition.event_time_ms


def test_the_arithmetic_of_silence_shows_the_gap_and_its_row() -> None:
    gap = [_gap(70, "open", from_s=40, after_s=30), _gap(71, "close", until_s=71)]
    found = _explained([BEAT, tick(30), *gap, tick(300)], Trigger.SILENCE)
    assert [(term.meaning, term.at_ms or term.span_ms) for term in found.terms] == [
        ("last signal", START + 10_000),
        ("timeout", 100_000),
        ("not listening from 2023-11-14T22:14:00.000Z to 2023-11-14T22:14:31.000Z", 31_000),
        ("offline", START + 141_000),
    ]
    assert [one.role for one in found.evidence] == ["last signal", "the bridge was not listening"]
    assert found.otherwise == "A signal of the device at or before 2023-11-14T22:15:41.000Z would have prevented it"


def test_a_limit_of_the_registry_is_named_as_that_of_the_device() -> None:
    found = _explained([_registry(5, "add", timeout_ms=40_000), BEAT, tick(200)], Trigger.SILENCE)
    assert found.rule is not None
    assert (found.rule.key, found.rule.value, found.rule.of) == ("timeout", "40s", "this device")


def test_a_shorter_timeout_that_takes_effect_later_postpones_the_instant() -> None:
    shorter = parse_policy({"rules": {"timeout": "20s"}}).normalised()
    found = _explained([BEAT, row(15, "fleet/_/_/policy", policy=shorter, effective_from_s=60), tick(200)], Trigger.SILENCE)
    assert [term.meaning for term in found.terms] == [
        "last signal",
        "timeout",
        "until the policy with this limit took effect",
        "offline",
    ]


def test_a_transition_that_does_not_follow_from_the_rows_has_no_explanation() -> None:
    history = stamped_by_bridge([IN_FORCE, BEAT, tick(200)])
    [silence] = [one for one in outcome(history, DEPLOYMENT).judgements if _is(one, Trigger.SILENCE)]
    assert explain([one for one in history if one.device_id != "d"], DEPLOYMENT, silence) is None


def test_the_end_of_a_flag_counts_from_the_policy_at_its_last_error() -> None:
    shorter = {"rules": {**RULES["rules"], "flagged": {**RULES["rules"]["flagged"], "hold": "20s"}}}
    errors = [signal(10, "d", "error", code="probe"), signal(30, "d", "error", code="login"), signal(100, "d")]
    policy = row(35, "fleet/_/_/policy", policy=parse_policy(shorter).normalised(), effective_from_s=50)
    found = _explained([*errors, policy, tick(160)], Trigger.HOLD_OVER)
    assert [(term.at_ms, term.span_ms) for term in found.terms] == [
        (START + 30_000, None),
        (None, 80_000),
        (START + 110_000, None),
    ]
    assert found.rule is not None
    assert (found.rule.value, found.rule.dated.effective_from_ms) == ('hold = "1m20s"', START - 1_000_000)
    assert found.otherwise == "", "the policy has changed since"


def test_the_end_of_a_count_of_errors_counts_from_the_policy_at_its_last_error() -> None:
    shorter = {"rules": {**RULES["rules"], "degraded": {"errors": 2, "window": "10s"}}}
    errors = [signal(20, "d", "error", code="x"), signal(30, "d", "error", code="y"), signal(75, "d", "error", code="z")]
    policy = row(32, "fleet/_/_/policy", policy=parse_policy(shorter).normalised(), effective_from_s=45)
    found = _explained([BEAT, *errors, policy, tick(120)], Trigger.RECOVERED)
    assert [(term.at_ms, term.span_ms) for term in found.terms] == [
        (START + 20_000, None),
        (None, 60_000),
        (START + 80_000, None),
    ]
    assert found.sentence == "fewer than 2 errors are within 1m"
    assert found.otherwise == ""
