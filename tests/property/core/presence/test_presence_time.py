"""Presence time: fold and definition agree on inputs from the field, and presence does not depend on device clocks."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.judgements import compared
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Row
from tests.support.histories.histories import changes, positioned, row, signal, tick
from tests.support.histories.key_groups import in_batches
from tests.support.histories.presence_cases import CASES, DEPLOYMENT, rows_of

CLOCKS = st.sampled_from([-1024 * 604_800, -3_600, -59, -1, -0.05, 0, 0.05, 59, 3_600])  # lead of a clock in seconds


@pytest.mark.parametrize("name", CASES)
def test_the_fold_agrees_with_the_definition_on_inputs_from_the_field(name: str) -> None:
    rows = rows_of([CASES[name]])
    assert in_batches(rows, range(0, len(rows), max(1, len(rows) // 40)), DEPLOYMENT, 2) == compared(replay(rows, DEPLOYMENT))


def test_silence_fires_before_a_will_whose_grace_period_ends_at_the_same_instant() -> None:
    rows = positioned([signal(0), row(3_570, "d/death"), tick(3_700)])  # timeout of an hour, grace period of half a minute
    want = replay(rows, DEPLOYMENT)
    assert changes(want)[1:] == [(3_600, "online", "offline", "silence")]
    assert in_batches(rows, [1, 2], DEPLOYMENT, 1) == compared(want)


def _offline(rows: Sequence[Row]) -> list[tuple[float, str, str, str]]:
    return [one for one in changes(replay(positioned(rows), Deployment(60_000))) if one[2] == "offline"]


@given(st.lists(st.tuples(st.floats(0.1, 29), CLOCKS), min_size=1, max_size=8), st.booleans())
def test_a_device_that_reconnects_within_the_grace_period_is_never_offline(
    reconnects: list[tuple[float, float]], sends_more: bool
) -> None:
    rows, at_s = [signal(100)], 200.0
    for away_s, ahead_s in reconnects:
        rows += [row(at_s, "d/death"), signal(at_s + away_s + ahead_s, kind="birth", received_s=at_s + away_s)]
        rows += [signal(at_s + away_s + 1 + ahead_s, received_s=at_s + away_s + 1)] if sends_more else []
        at_s += 60
    assert _offline([*rows, tick(at_s + 200)]) == []


@given(st.lists(st.tuples(st.floats(1, 3_599), CLOCKS), min_size=2, max_size=30))
def test_a_direct_device_that_sends_within_its_timeout_is_never_offline(
    beats: list[tuple[float, float]],
) -> None:
    rows, at_s = [], 100.0
    for pause_s, ahead_s in beats:
        rows.append(signal(at_s + ahead_s, received_s=at_s))
        at_s += min(pause_s, 3_500)  # the timeout of the built-in policy (1 h) less the largest lag of a trusted clock
    assert _offline([*rows, tick(at_s + 60)]) == []


@given(st.floats(0, 50), st.floats(0.001, 9), st.booleans())
def test_will_and_birth_are_ordered_by_arrival_and_not_by_event_time(behind_s: float, later_s: float, swapped: bool) -> None:
    def offline(event_s: float, death_s: float, birth_s: float) -> list[tuple[float, str, str, str]]:
        return _offline([signal(10), row(death_s, "d/death"), signal(event_s, kind="birth", received_s=birth_s), tick(400)])

    birth_s = 100 + later_s
    event_s = 100 - behind_s if swapped else birth_s
    assert offline(event_s, 100, birth_s) == []
    assert [one[0] for one in offline(event_s, birth_s + 1, birth_s)] == [pytest.approx(birth_s + 31, abs=0.002)]


@given(st.floats(0, 3_599), st.lists(st.tuples(st.floats(0.001, 7_000), st.floats(0, 100)), min_size=1, max_size=6), CLOCKS)
def test_outages_of_a_gateway_postpone_the_deadline_of_its_device_by_their_length(
    quiet_s: float, outages: list[tuple[float, float]], ahead_s: float
) -> None:
    rows, at_s, left_s = [signal(0, gateway="g")], 0.0, 3_600.0
    for length_s, pause_s in outages:
        pause_s = min(pause_s, (left_s - 1) / 2)
        died_s, at_s, left_s = round(at_s + pause_s, 3), round(at_s + pause_s + length_s, 3), left_s - round(pause_s, 3)
        rows += [row(died_s, "g/death", gateway="g"), signal(at_s + ahead_s, "g", received_s=at_s)]
    due_s = at_s + left_s

    def offline(until_s: float) -> list[tuple[float, str]]:
        judged = replay(positioned([*rows, tick(until_s + 60)]), Deployment(60_000))
        return [(one[0], one[3]) for one in changes(one for one in judged if one.device_id == "d") if one[2] == "offline"]

    assert offline(due_s - 0.05) == []
    assert offline(due_s + 0.05) == [(pytest.approx(due_s, abs=0.05), "silence")]
