"""Limits of policies and gaps: rows beyond them are refused, and batch cuts do not matter."""

from typing import Any

import pytest

from fleetpulse.core.judgements import JudgementKind, compared
from fleetpulse.core.policy import Policy
from fleetpulse.core.replay import Deployment, outcome, replay
from tests.support.histories.histories import START, row, signal, tick
from tests.support.histories.key_groups import in_batches

_UNFIT: dict[str, Any] = {
    "timeout_ms": ["1h", 1.5, -5, 2**63, True, None],
    "flagged_codes": [[], ["a"] * 12, ["a" * 257], ["\ud800"], [1], 7],
    "last_errors": [5_000, -1],
    "degraded_errors": [100, 0],
    "forget_after_ms": [1_000],
    "session_idle_ms": [999, "30m"],
    "velocity_events": [0, 1_001, True],
    "velocity_kind": ["death", [], None],
    "velocity_code": ["", "a" * 257, 7],
    "velocity_hold_ms": [0],
    "unheard_of": [1],
}


@pytest.mark.parametrize(("rule", "value"), [(rule, value) for rule, values in _UNFIT.items() for value in values])
def test_an_invalid_recorded_policy_is_refused_and_judging_continues(rule: str, value: Any) -> None:
    policy = Policy().normalised()
    policy["rules"][rule] = value
    errors = [row(20 + second, "fleet/s/d/error", ts_s=20 + second, code="E") for second in range(40)]
    rows = [row(0, "fleet/_/_/policy", policy=policy), *errors, row(9_000, "fleet/_/b/tick")]
    judgements = replay(rows, Deployment(1_000))
    assert [one.kind for one in judgements if one.kind is not JudgementKind.TRANSITION] == [JudgementKind.REFUSED]
    assert in_batches(rows, [3, 17], Deployment(1_000), 2) == compared(judgements)


@pytest.mark.parametrize(
    "classes",
    [
        {"c" * 257: "E"},
        {"": "E"},
        {"\ud800": "E"},
        {str(number): "E" for number in range(501)},
        {str(number): "E" * 256 for number in range(90)},
    ],
)
def test_a_recorded_policy_above_the_size_limit_of_a_key_group_is_refused(classes: dict[str, str]) -> None:
    policy = Policy().normalised()
    policy["classes"] = {name: {**policy["rules"], "flagged_codes": [code] * 8} for name, code in classes.items()}
    rows = [row(0, "fleet/_/_/policy", policy=policy), signal(20), row(9_000, "fleet/_/b/tick")]
    judgements = replay(rows, Deployment(1_000))
    assert [one.kind for one in judgements if one.kind is not JudgementKind.TRANSITION] == [JudgementKind.REFUSED]
    assert in_batches(rows, [2], Deployment(1_000), 2) == compared(judgements)


def test_policies_that_are_not_yet_in_force_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetpulse.core.replay.MAX_AHEAD", 3)
    policy = Policy().normalised()
    rows = [signal(at, "d") for at in range(0, 400, 20)]
    rows += [row(at, "fleet/_/_/policy", policy=policy, effective_from_s=at + 100) for at in range(5, 400, 30)]
    rows.sort(key=lambda one: one.received_at_ms)
    judgements = replay(rows, Deployment(1_000))
    refused = [(one.received_at_ms or 0) - START for one in judgements if one.kind is JudgementKind.REFUSED]
    # policies are received at 5, 35, 65, ...; the fourth exceeds the limit, until the first is in force at 105
    assert refused == [95_000, 215_000, 335_000]
    for cuts in ([], [2, 9, 17], list(range(1, len(rows)))):
        assert in_batches(rows, cuts, Deployment(1_000), 2) == compared(judgements)


def test_a_policy_that_a_jitter_still_needs_counts_toward_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetpulse.core.replay.MAX_AHEAD", 3)
    policy, deployment = Policy().normalised(), Deployment(1_000, verdict_jitter_ms=50_000)
    rows = [signal(at, "d") for at in range(0, 400, 20)]
    rows += [row(at, "fleet/_/_/policy", policy=policy, effective_from_s=at + 100) for at in range(5, 400, 30)]
    rows += [row(at, "fleet/_/b/tick", op="flush") for at in (152, 251)]  # flushes, which do not lower the count
    rows.sort(key=lambda one: one.received_at_ms)
    judgements = replay(rows, deployment)
    refused = [(one.received_at_ms or 0) - START for one in judgements if one.kind is JudgementKind.REFUSED]
    # the first is in force at 105; it counts until the frontier reaches 155, because of the jitter
    assert refused == [95_000, 125_000, 155_000, 275_000, 305_000, 335_000]
    for cuts in ([], [2, 9, 17], list(range(1, len(rows)))):
        assert in_batches(rows, cuts, deployment, 2) == compared(judgements)


def test_bridges_with_an_open_gap_are_limited_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetpulse.core.presence.coverage.MAX_DEAF", 3)
    rows = [signal(0), signal(10, "d")]
    rows += [row(20 + number, f"fleet/_/{bridge}/gap", op="open", from_s=15) for number, bridge in enumerate("abcdea")]
    rows += [row(40 + number, f"fleet/_/{bridge}/gap", op="close", until_s=40) for number, bridge in enumerate("eabdc")]
    rows += [row(50, "fleet/_/d/gap", op="open", from_s=48), row(60, "fleet/_/d/gap", op="close", until_s=60), tick(9_000)]
    judgements = replay(rows, Deployment(1_000))
    refused = [((one.received_at_ms or 0) - START, one.device_id) for one in judgements if one.kind is JudgementKind.REFUSED]
    assert refused == [(23_000, "d"), (24_000, "e")]
    shards = outcome(rows[:-4], Deployment(1_000)).shards
    assert shards is not None and shards.listenings[0].coverage.deaf == ("c",)
    for cuts in ([], [4, 9], list(range(1, len(rows)))):
        assert in_batches(rows, cuts, Deployment(1_000), 2) == compared(judgements)
