"""Time travel: the fleet at an instant equals the outcome of the definition at that time, whenever it is queried."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.judgements import JudgementKind, compared
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.replay import Deployment, outcome, replay
from fleetpulse.core.rows import Kind, Row
from fleetpulse.reports.history.time_travel import Moment, fleet_of, life_of
from tests.support.floors import Floor
from tests.support.form import examples
from tests.support.histories.histories import judgement_entry
from tests.support.histories.strategies import DEPLOYMENTS, histories
from tests.support.homes.read_models import judgements_in_duckdb


def judged_live(rows: Sequence[Row], cuts: Sequence[int], deployment: Deployment) -> list[dict[str, Any]]:
    """Return the judgements of rows; each is judged at the ``received_at`` of the last row of its batch."""
    entries: list[dict[str, Any]] = []
    before = compared([])
    for cut in cuts:
        judgements = replay(rows[:cut], deployment)
        fresh = compared(judgements) - before
        for one in judgements:
            key = next(iter(compared([one])))
            if fresh[key] > 0:
                fresh[key] -= 1
                entries.append(judgement_entry(one, rows[cut - 1].received_at_ms))
        before = compared(judgements)
    return entries


def modes(found: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {one["device_id"]: one["mode"] for one in found if one["mode"] != Mode.FORGOTTEN}


CUTS = st.lists(st.integers(0, 60), max_size=4)


@settings(max_examples=examples(120))
@given(histories(), CUTS, DEPLOYMENTS, st.data())
def test_the_fleet_at_an_instant_equals_the_outcome_of_the_definition(
    rows: list[Row], drawn_cuts: list[int], deployment: Deployment, data: st.DataObject
) -> None:
    cuts = sorted({len(rows), *(1 + cut % len(rows) for cut in drawn_cuts)})
    cut = data.draw(st.sampled_from(cuts))
    past = outcome(rows[:cut], deployment)
    frontier_ms = past.shards.frontier_ms if past.shards else None
    want = {device_id: device.mode.value for device_id, device in past.devices.items()}
    known_ms = rows[cut - 1].received_at_ms
    with judgements_in_duckdb(judged_live(rows, cuts, deployment), rows) as tables:
        if frontier_ms is None:
            assert not modes(fleet_of(tables, Moment(known_ms, known_ms, -1)))
            return
        now = modes(fleet_of(tables, Moment(frontier_ms)))
        as_known_then = modes(fleet_of(tables, Moment(known_ms + 10**9, known_ms, frontier_ms)))
        assert now == want
        # a batch can end between rows of one instant
        same_instant = [one for one in rows[cut:] if one.received_at_ms == known_ms]
        assert as_known_then == want or same_instant


SPANS = Floor(5)


@SPANS.over_all_examples
@settings(max_examples=examples(80))
@given(histories(), DEPLOYMENTS, st.integers(0, 60))
def test_spans_of_a_life_are_contiguous_and_end_in_the_current_mode(rows: list[Row], deployment: Deployment, number: int) -> None:
    judged = outcome(rows, deployment)
    if judged.shards is None or judged.shards.frontier_ms is None:
        return
    at_ms = rows[number % len(rows)].received_at_ms
    judgements = [judgement_entry(one, rows[-1].received_at_ms) for one in judged.judgements]
    moment = Moment(at_ms, judged_to_ms=judged.shards.frontier_ms)
    with judgements_in_duckdb(judgements, rows) as tables:
        found = {one["device_id"]: one for one in fleet_of(tables, moment)}
        for device_id in {one.device_id for one in rows if one.kind is not Kind.GAP}:
            spans = life_of(tables, device_id, moment)
            if device_id not in found:
                assert not spans
                continue
            assert (spans[-1]["mode"], spans[-1]["until_ms"]) == (found[device_id]["mode"], None)
            assert spans[-1]["since_ms"] == round(found[device_id]["since"].timestamp() * 1000)
            for earlier, later in pairwise(spans):
                assert earlier["until_ms"] == later["since_ms"] == earlier["since_ms"] + earlier["lasted_ms"]
                assert earlier["mode"] != later["mode"]
            changed = [one for one in judged.judgements if one.kind is JudgementKind.TRANSITION and one.device_id == device_id]
            assert sum(span["transition_no"] is not None for span in spans) == sum(
                (one.event_time_ms or 0) <= at_ms for one in changed
            )
            SPANS.met(len(spans) > 1)
