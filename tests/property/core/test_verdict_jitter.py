"""Verdict jitter: it delays the writing of verdicts, and changes neither their content nor their event time."""

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
    """Return rows with flushing ticks, one of them at the end."""
    ticks = [_flush(second + 0.9995) for second in at_s]
    return sorted([*rows, *ticks, _flush(END_S)], key=lambda one: one.received_at_ms)


@given(histories(), CUTS, DEPLOYMENTS, st.integers(1, 3), JITTERS, st.lists(st.integers(0, 300), max_size=2, unique=True))
def test_a_jitter_changes_no_judgement_after_a_flush(
    rows: list[Row], cuts: list[int], deployment: Deployment, groups: int, jitter_ms: int, at_s: list[int]
) -> None:
    flushed = _flushed(rows, at_s)
    judgements = in_batches(flushed, cuts, replace(deployment, verdict_jitter_ms=jitter_ms), groups)
    assert judgements == in_batches(flushed, cuts, deployment, groups)


@given(histories(), CUTS, DEPLOYMENTS, st.integers(1, 3), JITTERS)
def test_a_jitter_delays_only_deadlines_and_at_most_by_its_length(
    rows: list[Row], cuts: list[int], deployment: Deployment, groups: int, jitter_ms: int
) -> None:
    judgements = in_batches(rows, cuts, replace(deployment, verdict_jitter_ms=jitter_ms), groups)
    want = in_batches(rows, cuts, deployment, groups)
    assert not judgements - want
    frontier_ms = max(one.received_at_ms for one in rows) - deployment.allowed_lateness_ms
    for kind, received_at_ms, event_time_ms in map(_times_of, want - judgements):
        assert kind == "transition"
        assert received_at_ms is None, "a jitter delays only deadlines"
        assert frontier_ms - jitter_ms < event_time_ms or _has_gap(rows)


def _times_of(judgement: tuple[Any, ...]) -> tuple[str, int | None, int]:
    return judgement[0], judgement[15], judgement[2]


def _has_gap(rows: list[Row]) -> bool:
    return any(one.kind.value == "gap" for one in rows)


def test_devices_that_share_a_deadline_are_spread_over_the_jitter() -> None:
    deployment = Deployment(1_000, 30_000, verdict_jitter_ms=100_000)
    ids = [f"device-{number}" for number in range(200)]
    rows = [row(0, f"{device}/heartbeat", ts_s=0) for device in ids]
    rows += [row(3600 + 10 * step, "fleet/_/b/tick") for step in range(1, 13)]
    offline: list[int] = []
    for number in range(1, 13):
        judgements = in_batches(rows[: len(ids) + number], [], deployment)
        deadlines = Counter({key: count for key, count in judgements.items() if key[6] == "offline"})
        assert {key[2] for key in deadlines} <= {START + 3_600_000}
        offline.append(sum(deadlines.values()))
    assert offline[-1] == len(ids)
    steps = [after - before for before, after in zip([0, *offline], offline, strict=False)]
    assert max(steps) < 45, "a tenth of the jitter must fire for about a tenth of the devices"


@given(histories(), CUTS, CUTS, DEPLOYMENTS, st.integers(1, 3), JITTERS, st.lists(st.integers(0, 300), max_size=2, unique=True))
def test_batch_cuts_do_not_change_the_effect_of_a_flush(
    rows: list[Row], cuts: list[int], others: list[int], deployment: Deployment, groups: int, jitter_ms: int, at_s: list[int]
) -> None:
    spread = replace(deployment, verdict_jitter_ms=jitter_ms)
    flushed = _flushed(rows, at_s)[:-1]
    assert in_batches(flushed, cuts, spread, groups) == in_batches(flushed, others, spread, groups)


def test_death_of_a_former_gateway_does_not_flush_delayed_verdicts_of_a_device() -> None:
    rows = [
        row(0, "d/heartbeat", ts_s=0, gateway="old"),
        row(1, "d/heartbeat", ts_s=1, gateway="new"),
        row(5, "d/death"),
        row(40, "old/death", gateway="old"),
        row(42, "fleet/_/b/tick"),
    ]
    spread = Deployment(1_000, 30_000, verdict_jitter_ms=40_000)
    judgements = [in_batches(rows, cuts, spread) for cuts in ([], [2], [3], [1, 3])]
    assert judgements == judgements[:1] * 4
    assert not any(key[1] == "d" and key[6] == "offline" for key in judgements[0]), "the verdict must be delayed"
    assert any(key[1] == "d" and key[6] == "offline" for key in in_batches(rows, [], Deployment(1_000, 30_000)))
