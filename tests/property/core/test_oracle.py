"""Oracle of the definition: a slow independent implementation emits the same judgements as the core."""

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.rows import Row
from tests.support.histories.histories import (
    KINDS_AND_ANSWERS,
    OWN_AND_REVIEWS,
    any_internal_row,
    any_policy,
    any_signal,
    any_velocity,
    choosing,
    positioned,
    row,
)
from tests.support.oracle.compare import by_the_core, by_the_oracle

LATENESS = st.sampled_from([1, 5, 20, 60])
DELAYS = [[0], [0, 0, 0, 5], [0, 5, 10, 25, 70, -10, -30, -35], [0, -5, -10, -20, -30]]


class Shape(NamedTuple):
    """Ingredients of a history: with few kinds of rows, interactions are more frequent."""

    devices: str
    kinds: list[str]
    own: list[str]
    flagged: list[str] | None = None  # flagged sequence of the first policy; the history has few messages then
    reviews: bool = False  # whether the velocity rule is on in the first policy


SHAPES = {
    "everything": Shape(
        "abc",
        [*KINDS_AND_ANSWERS],
        [*OWN_AND_REVIEWS],
    ),
    "errors": Shape("a", ["error"], ["policy", "release", "release", "add", "alarm", "alarm"]),
    "sequences": Shape("a", ["error"], ["release", "alarm"], ["escalation", "escalation"]),
    "sessions": Shape(
        "a", ["error", "error", "birth", "heartbeat"], ["policy", "release", "confirm", "add", "alarm"], reviews=True
    ),
    "wills": Shape("a", ["heartbeat", "birth", "death"], ["policy", "add", "maintain", "gap"]),
    "gateways": Shape("abc", ["heartbeat", "heartbeat", "death"], ["policy", "add", "add", "decommission", "maintain", "gap"]),
    "outages": Shape("a", ["heartbeat", "death"], ["gap", "gap", "gap", "tick"]),
    "service": Shape("a", ["heartbeat", "error"], ["policy", "add", "add", "decommission", "maintain", "update", "release"]),
}


@st.composite
def _messages(draw: st.DrawFn, shape: Shape, steps: int, delays: list[int]) -> Row:
    return any_signal(choosing(draw), shape.devices, steps, shape.kinds, delays)


@st.composite
def _own_rows(draw: st.DrawFn, shape: Shape, steps: int) -> Row:
    return any_internal_row(choosing(draw), shape.devices, steps, shape.own)


@st.composite
def histories(draw: st.DrawFn, shape: Shape) -> list[Row]:
    """Return rows on a coarse grid, where deadlines and windows often coincide, and a last tick that judges most of them."""
    steps, delays = draw(st.sampled_from([10, 20, 60])), draw(st.sampled_from(DELAYS))
    own = draw(st.lists(_own_rows(shape, steps), max_size=8, unique_by=lambda one: one.received_at_ms))
    least, most = (draw(st.sampled_from([1, 6, 12])), 25) if shape.flagged is None else (2, 6)
    rows = [*draw(st.lists(_messages(shape, steps, delays), min_size=least, max_size=most)), *own]
    if draw(st.integers(0, 7)):
        policy = any_policy(choosing(draw), reviews="confirm" in shape.own)
        if shape.flagged is not None:
            policy["rules"]["flagged_codes"] = shape.flagged
        if shape.reviews:
            added = parse_policy({"rules": any_velocity(choosing(draw))}).normalised()["rules"]
            policy["rules"] |= {name: value for name, value in added.items() if name.startswith(("session_", "velocity_"))}
        rows.append(row(-1, "fleet/_/_/policy", policy=policy, effective_from_s=-500))
    rows.append(row(steps * 5 + draw(st.sampled_from([5, 100, 300])), "fleet/_/b/tick"))
    return positioned(draw(st.permutations(rows)))


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=settings().max_examples // 2)
@given(st.data(), LATENESS)
def test_the_definition_and_the_oracle_emit_the_same_judgements(shape: str, data: st.DataObject, lateness_s: int) -> None:
    rows = data.draw(histories(SHAPES[shape]))
    assert by_the_core(rows, lateness_s) == by_the_oracle(rows, lateness_s)
