"""Availability report: its shares equal those of a naive walk over time, device by device."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.presence.coverage import Coverage
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment, outcome
from fleetpulse.core.rows import Row
from fleetpulse.reports.history.availability import COUNTED, CoveredSpans, Span, availability_of, covered_parts
from tests.support.form import examples
from tests.support.histories.histories import judgement_entry
from tests.support.histories.strategies import DEPLOYMENTS, histories
from tests.support.homes.read_models import judgements_in_duckdb

HEARD = {"online", "degraded", "flagged"}  # not those of the code under test


def walked(changes: list[Judgement], shards: Shards, span: Span, by: Any) -> dict[Any, dict[str, int]]:
    """Return milliseconds by group and mode, from a walk over the stretches between any two consecutive events."""
    edges = {span.from_ms, span.to_ms, shards.start_ms, *(one.frontier_ms or 0 for one in shards.listenings)}
    gaps = [gap for one in shards.listenings for gap in one.coverage.gaps]
    edges |= {instant for gap in gaps for instant in gap if instant is not None}
    edges |= {instant for one in changes for instant in (one.event_time_ms, one.life_ms) if instant is not None}
    stretches = list(pairwise(sorted(edge for edge in edges if span.from_ms <= edge <= span.to_ms)))
    spent: dict[Any, dict[str, int]] = {}
    for device_id in {one.device_id for one in changes}:
        own = [one for one in changes if one.device_id == device_id]
        for begin_ms, end_ms in stretches:
            before = [one for one in own if (one.event_time_ms or 0) <= begin_ms]
            after = [one for one in own if (one.event_time_ms or 0) > begin_ms]
            is_provisioned = bool(after) and after[0].transition_no == 1 and (after[0].life_ms or 0) <= begin_ms
            now, mode = (
                (after[0], Mode.PROVISIONED) if is_provisioned else (before[-1], before[-1].to_mode) if before else (None, None)
            )
            if now is not None and mode in COUNTED:
                progress = shards.of(now.site)
                group = spent.setdefault(by(now), {})
                covered = progress.coverage.covered
                begin_ms, end_ms = (min(one, progress.frontier_ms or 0) for one in (begin_ms, end_ms))
                group[str(mode)] = group.get(str(mode), 0) + covered(end_ms) - covered(begin_ms)
    return {group: modes for group, modes in spent.items() if sum(modes.values())}


@settings(max_examples=examples(60))
@given(histories(), DEPLOYMENTS, st.integers(-5, 70), st.integers(1, 80), st.booleans())
def test_shares_equal_those_of_a_naive_walk(
    rows: list[Row], deployment: Deployment, begin_s: int, for_s: int, by_device: bool
) -> None:
    judged = outcome(rows, deployment)
    if judged.shards is None or judged.shards.frontier_ms is None:
        return
    begin_ms = rows[0].received_at_ms + begin_s * 1000
    span = Span(begin_ms, min(begin_ms + for_s * 1000, judged.shards.frontier_ms))
    changes = [one for one in judged.judgements if one.kind is JudgementKind.TRANSITION]
    by = ("device_id", "site", "device_class") if by_device else ("site", "device_class")
    want = (
        walked(changes, judged.shards, span, lambda one: tuple(getattr(one, name) for name in by))
        if begin_ms < span.to_ms
        else {}
    )
    judgements = [judgement_entry(one, rows[-1].received_at_ms) for one in judged.judgements]
    with judgements_in_duckdb(judgements, rows) as tables:
        found = {
            tuple(row[name] for name in by): row for row in availability_of(tables, CoveredSpans.within(judged.shards, span), by)
        }
    assert {group: row["covered_ms"] for group, row in found.items()} == {
        group: sum(modes.values()) for group, modes in want.items()
    }
    for group, modes in want.items():
        total = sum(modes.values())
        assert {mode: found[group][mode] for mode in COUNTED} == pytest.approx(
            {mode: modes.get(mode, 0) / total for mode in COUNTED}
        )
        reachable = total - modes.get("unreachable", 0)
        heard = sum(modes.get(mode, 0) for mode in HEARD)
        assert found[group]["available"] == (pytest.approx(heard / reachable) if reachable else None)


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=5),
    st.integers(0, 100),
    st.integers(0, 60),
)
def test_covered_spans_add_up_to_the_covered_time(start: int, gaps: list[tuple[int, int]], begin: int, length: int) -> None:
    coverage = Coverage(start)
    for opened_ms, length_ms in sorted(gaps):
        coverage = coverage.open_gap(opened_ms, "b").close_gap(opened_ms + length_ms, "b")
    span = Span(begin, begin + length)
    parts = covered_parts(coverage, span)
    assert sum(part.to_ms - part.from_ms for part in parts) == coverage.covered(span.to_ms) - coverage.covered(span.from_ms)
    assert all(before.to_ms < after.from_ms for before, after in pairwise(parts))
