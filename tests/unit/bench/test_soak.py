"""Soak test: its trends find growth, and its load is constant and bounded."""

from random import Random

import pytest

from bench.load import Load
from bench.soak import BOUNDS, Bound, plan, row_of, trend
from fleetpulse.core.replay import Deployment, Outcome, outcome
from fleetpulse.core.rows import Clock, Kind, Row
from tests.support.histories.histories import stored_rows
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
BOUND = Bound("state_rows", 0.10, 16)


def test_a_leaking_series_grows_and_an_oscillating_series_does_not() -> None:
    random = Random(1)
    oscillating = [1_000 + random.randrange(-300, 300) for _ in range(400)]
    assert not trend(BOUND, oscillating).grows
    assert trend(BOUND, [value + place for place, value in enumerate(oscillating)]).grows
    assert not trend(BOUND, [value - place for place, value in enumerate(oscillating)]).grows


def test_a_rise_during_warm_up_is_not_growth() -> None:
    assert not trend(BOUND, [min(place, 100) * 1_000 for place in range(400)]).grows
    assert trend(BOUND, [min(place, 300) * 1_000 for place in range(400)]).grows


def test_growth_exceeds_both_the_relative_and_the_absolute_bound() -> None:
    assert not trend(BOUND, [10] * 10 + [26] * 10).grows
    assert trend(BOUND, [10] * 10 + [27] * 10).grows
    assert not trend(BOUND, [1_000] * 10 + [1_100] * 10).grows
    assert trend(BOUND, [1_000] * 10 + [1_101] * 10).grows


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.series)
def test_every_bound_can_be_exceeded(bound: Bound) -> None:
    step = bound.least / 10
    assert trend(bound, [step * place for place in range(400)]).grows
    assert not trend(bound, [step * 400] * 400).grows


def test_too_few_samples_are_an_error() -> None:
    with refused("soak-too-short"):
        trend(BOUND, [1.0] * 11)


def test_series_that_settle_slowly_are_not_judged_in_a_short_run() -> None:
    leaking = trend(BOUNDS[0], [1e9 * place for place in range(40)])
    assert row_of(leaking, plan())["verdict"] == "grows"
    assert row_of(leaking, plan(quick=True))["verdict"].startswith("not judged")


def _judged(load: Load, steps: int) -> tuple[list[Row], Outcome]:
    rows = [row for number in range(steps) for row in stored_rows(load.step(number))]
    return rows, outcome(rows, Deployment(30_000, 300_000))


def test_the_load_is_ordered_and_reproducible() -> None:
    load = Load(50, 2)
    rows, _ = _judged(load, 80)
    received = [row.received_at_ms for row in rows]
    assert received == sorted(received)
    assert received[-1] == load.newest_ms(79)
    assert load.step(7).equals(load.step(7))
    assert {row.kind for row in rows} == {*Kind} - {Kind.TELEMETRY, Kind.BIRTH, Kind.DEATH, Kind.CORRECT, Kind.ACK}
    bridge_clock_ms = [row.received_at_ms for row in rows if row.clock is Clock.RECEIVED]
    assert len(set(bridge_clock_ms)) == len(bridge_clock_ms)
    assert all(received.count(instant) == 1 for instant in bridge_clock_ms)


def test_the_state_that_the_load_leaves_is_bounded() -> None:
    _, early = _judged(Load(50, 2), 60)
    _, late = _judged(Load(50, 2), 180)
    assert abs(len(late.devices) - len(early.devices)) <= 2
    assert abs(len(late.pending) - len(early.pending)) <= 40
    triggers = {judgement.trigger.value for judgement in late.judgements if judgement.trigger}
    assert triggers >= {"signal", "silence", "forget", "errors", "recovered", "maintain", "until", "decommission"}
    assert not any(judgement.kind == "refused" for judgement in late.judgements)


def test_every_step_of_the_load_has_the_same_number_of_devices() -> None:
    load = Load(50, 2)
    for number in (0, 1, 99):
        signals = [row.device_id for row in stored_rows(load.step(number)) if row.clock is Clock.DEVICE]
        assert len({*signals}) == 50
