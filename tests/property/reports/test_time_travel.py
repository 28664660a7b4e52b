"""The fleet at an instant is what the definition had come to then, from whichever later day one looks back."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.judgements import JudgementKind, compared
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.replay import Deployment, outcome, replay
from fleetpulse.core.rows import Kind, Row
from fleetpulse.reports.time_travel import Moment, fleet_of, life_of
from tests.support.floors import Floor
from tests.support.histories.histories import judgement_entry
from tests.support.histories.strategies import DEPLOYMENTS, histories
from tests.support.homes.read_models import judgements_in_duckdb


def judged_live(rows: Sequence[Row], cuts: Sequence[int], deployment: Deployment) -> list[dict[str, Any]]:
    """Return the judgements of rows, each with the ``received_at`` of the batch's last row as the time when it was judged."""
    said: list[dict[str, Any]] = []
    before = compared([])
    for cut in cuts:
        told = replay(rows[:cut], deployment)
        fresh = compared(told) - before
        for one in told:
            key = next(iter(compared([one])))
            if fresh[key] > 0:
                fresh[key] -= 1
                said.append(judgement_entry(one, rows[cut - 1].received_at_ms))
        before = compared(told)
    return said


def modes(found: Sequence[dict[str, Any]]) -> dict[str, str]:
    return {one["device_id"]: one["mode"] for one in found if one["mode"] != Mode.FORGOTTEN}


CUTS = st.lists(st.integers(0, 60), max_size=4)


@settings(max_examples=120)
@given(histories(), CUTS, DEPLOYMENTS, st.data())
def test_the_fleet_at_an_instant_is_what_the_definition_had_come_to(
    rows: list[Row], places: list[int], deployment: Deployment, data: st.DataObject
) -> None:
    cuts = sorted({len(rows), *(1 + place % len(rows) for place in places)})
    cut = data.draw(st.sampled_from(cuts))
    then = outcome(rows[:cut], deployment)
    frontier_ms = then.shards.frontier_ms if then.shards else None
    want = {device_id: device.mode.value for device_id, device in then.devices.items()}
    known_ms = rows[cut - 1].received_at_ms
    with judgements_in_duckdb(judged_live(rows, cuts, deployment), rows) as tables:
        if frontier_ms is None:
            assert not modes(fleet_of(tables, Moment(known_ms, known_ms, -1)))
            return
        now = modes(fleet_of(tables, Moment(frontier_ms)))
        as_known_then = modes(fleet_of(tables, Moment(known_ms + 10**9, known_ms, frontier_ms)))
        assert now == want
        same_instant = [one for one in rows[cut:] if one.received_at_ms == known_ms]  # a batch may end among equals
        assert as_known_then == want or same_instant


SPANS = Floor(5)


@SPANS.over_all_examples
@settings(max_examples=80)
@given(histories(), DEPLOYMENTS, st.integers(0, 60))
def test_a_life_is_told_without_holes_and_ends_in_the_mode_of_the_fleet(
    rows: list[Row], deployment: Deployment, place: int
) -> None:
    told = outcome(rows, deployment)
    if told.shards is None or told.shards.frontier_ms is None:
        return
    at_ms = rows[place % len(rows)].received_at_ms
    judgements = [judgement_entry(one, rows[-1].received_at_ms) for one in told.judgements]
    moment = Moment(at_ms, judged_to_ms=told.shards.frontier_ms)
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
            changed = [one for one in told.judgements if one.kind is JudgementKind.TRANSITION and one.device_id == device_id]
            assert sum(span["transition_no"] is not None for span in spans) == sum(
                (one.event_time_ms or 0) <= at_ms for one in changed
            )
            SPANS.met(len(spans) > 1)
