"""A jitter spreads when verdicts are written; what they say, and of which instant, stays the same."""

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import FLUSH, Row
from tests.support.histories.histories import START, row
from tests.support.histories.key_groups import in_batches
from tests.support.histories.strategies import DEPLOYMENTS, histories

JITTERS = st.sampled_from([1, 3_000, 40_000, 600_000])
CUTS = st.lists(st.integers(0, 60), max_size=6)
END_S = 400.5


def _flush(received_s: float) -> Row:
    return row(received_s, "fleet/_/b/tick", op=FLUSH)


def _flushed(rows: list[Row], at_s: list[int]) -> list[Row]:
    """Return rows with ticks that flush, the last of them behind all."""
    ticks = [_flush(each + 0.9995) for each in at_s]
    return sorted([*rows, *ticks, _flush(END_S)], key=lambda one: one.received_at_ms)


@given(histories(), CUTS, DEPLOYMENTS, st.integers(1, 3), JITTERS, st.lists(st.integers(0, 300), max_size=2, unique=True))
def test_after_a_flush_a_jitter_has_changed_no_judgement(
    rows: list[Row], cuts: list[int], deployment: Deployment, groups: int, jitter_ms: int, at_s: list[int]
) -> None:
    flushed = _flushed(rows, at_s)
    told = in_batches(flushed, cuts, replace(deployment, verdict_jitter_ms=jitter_ms), groups)
    assert told == in_batches(flushed, cuts, deployment, groups)


@given(histories(), CUTS, DEPLOYMENTS, st.integers(1, 3), JITTERS)
def test_before_a_flush_a_jitter_holds_back_deadlines_of_its_own_width_and_nothing_else(
    rows: list[Row], cuts: list[int], deployment: Deployment, groups: int, jitter_ms: int
) -> None:
    told = in_batches(rows, cuts, replace(deployment, verdict_jitter_ms=jitter_ms), groups)
    want = in_batches(rows, cuts, deployment, groups)
    assert not told - want
    frontier_ms = max(one.received_at_ms for one in rows) - deployment.allowed_lateness_ms
    for kind, received_at_ms, event_time_ms in map(_when, want - told):
        assert kind == "transition"
        assert received_at_ms is None, "only deadlines are held back"
        assert frontier_ms - jitter_ms < event_time_ms or _stood_still(rows)


def _when(judgement: tuple[Any, ...]) -> tuple[str, int | None, int]:
    return judgement[0], judgement[15], judgement[2]


def _stood_still(rows: list[Row]) -> bool:
    return any(one.kind.value == "gap" for one in rows)


def test_devices_that_share_a_deadline_are_spread_over_the_jitter() -> None:
    deployment = Deployment(1_000, 30_000, verdict_jitter_ms=100_000)
    ids = [f"device-{number}" for number in range(200)]
    rows = [row(0, f"{device}/heartbeat", ts_s=0) for device in ids]
    rows += [row(3600 + 10 * step, "fleet/_/b/tick") for step in range(1, 13)]
    offline: list[int] = []
    for number in range(1, 13):
        told = in_batches(rows[: len(ids) + number], [], deployment)
        deadlines = Counter({key: count for key, count in told.items() if key[6] == "offline"})
        assert {key[2] for key in deadlines} <= {START + 3_600_000}
        offline.append(sum(deadlines.values()))
    assert offline[-1] == len(ids)
    steps = [after - before for before, after in zip([0, *offline], offline, strict=False)]
    assert max(steps) < 45, "a tenth of the jitter has about a tenth of the devices"


@given(histories(), CUTS, CUTS, DEPLOYMENTS, st.integers(1, 3), JITTERS, st.lists(st.integers(0, 300), max_size=2, unique=True))
def test_a_flush_counts_up_to_its_own_row_however_batches_are_cut(
    rows: list[Row], cuts: list[int], others: list[int], deployment: Deployment, groups: int, jitter_ms: int, at_s: list[int]
) -> None:
    spread = replace(deployment, verdict_jitter_ms=jitter_ms)
    flushed = _flushed(rows, at_s)[:-1]
    assert in_batches(flushed, cuts, spread, groups) == in_batches(flushed, others, spread, groups)


def test_a_gateway_that_a_device_has_left_has_nothing_of_it_written_early() -> None:
    rows = [
        row(0, "d/heartbeat", ts_s=0, gateway="old"),
        row(1, "d/heartbeat", ts_s=1, gateway="new"),
        row(5, "d/death"),
        row(40, "old/death", gateway="old"),
        row(42, "fleet/_/b/tick"),
    ]
    spread = Deployment(1_000, 30_000, verdict_jitter_ms=40_000)
    told = [in_batches(rows, cuts, spread) for cuts in ([], [2], [3], [1, 3])]
    assert told == told[:1] * 4
    assert not any(key[1] == "d" and key[6] == "offline" for key in told[0]), "it is held back"
    assert any(key[1] == "d" and key[6] == "offline" for key in in_batches(rows, [], Deployment(1_000, 30_000)))
