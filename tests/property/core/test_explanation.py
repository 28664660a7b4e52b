"""Explanations: each verdict has one, its terms add up, and what would have prevented it does so."""

from dataclasses import replace

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fleetpulse.core.explanation import EXPLAINERS, Explanation, explain
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.lifecycle import Trigger
from fleetpulse.core.replay import Deployment, outcome
from fleetpulse.core.rows import Clock, Kind, Row
from tests.support.floors import Floor
from tests.support.histories.strategies import DEPLOYMENTS, histories

BY_ROW = {
    Trigger.SIGNAL, Trigger.ERRORS, Trigger.SEQUENCE, Trigger.MAINTAIN, Trigger.UPDATE, Trigger.UPDATED, Trigger.RELEASED,
    Trigger.REGISTERED, Trigger.DECOMMISSION, Trigger.GATEWAY_RETURN,
}  # fmt: skip
BY_EARLIER_POLICY = {Trigger.RECOVERED, Trigger.HOLD_OVER}
PREVENTED_BY_SIGNAL = {Trigger.SILENCE, Trigger.DEATH, Trigger.GATEWAY_DEATH}
EXPLAINED, PREVENTED = Floor(150), Floor(30)


def test_each_trigger_has_an_explanation() -> None:
    assert set(EXPLAINERS) == set(Trigger)


def _transitions(rows: list[Row], deployment: Deployment, *, amending: bool = False) -> list[Judgement]:
    judged = outcome(rows, deployment, amending=amending)
    return [one for one in judged.judgements if one.kind is JudgementKind.TRANSITION]


def _adds_up(found: Explanation) -> bool:
    if not found.terms:
        return True
    first, *spans, last = found.terms
    return last.at_ms == (first.at_ms or 0) + sum(term.span_ms or 0 for term in spans) and all(
        term.span_ms is not None and term.span_ms >= 0 for term in spans
    )


def _signal_at(one: Judgement, rows: list[Row]) -> Row:
    """Return a direct signal of the device at the instant of its transition."""
    assert one.event_time_ms is not None
    site = max((row for row in rows if row.device_id == one.device_id), key=lambda row: row.received_at_ms).site
    made = Row(one.event_time_ms, Kind.HEARTBEAT, one.device_id, site, one.event_time_ms, Clock.DEVICE, digest=1)
    return replace(made, position=10_000)


@EXPLAINED.over_all_examples
@PREVENTED.over_all_examples
@settings(max_examples=60, derandomize=True, phases=[Phase.generate])
@given(histories(), DEPLOYMENTS, st.booleans())
def test_each_transition_is_explained(rows: list[Row], deployment: Deployment, amending: bool) -> None:
    for one in _transitions(rows, deployment, amending=amending):
        found = explain(rows, deployment, one, amending=amending)
        if found is None:  # the definition cannot give the state before it: rare, and counted by the floor
            continue
        assert found.sentence
        assert found.transition == one
        assert _adds_up(found), "\n".join(map(str, (found.sentence, *found.terms, *rows)))
        assert one.trigger is not None
        EXPLAINED.met()
        if one.trigger in BY_ROW:
            assert found.evidence, found
        elif one.trigger not in BY_EARLIER_POLICY:
            assert found.terms
            assert found.otherwise
        if one.trigger in PREVENTED_BY_SIGNAL:
            added = _signal_at(one, rows)
            judged = outcome([*rows, added], deployment, amending=amending).judgements
            if any(other.kind is JudgementKind.LATE and other.received_at_ms == added.received_at_ms for other in judged):
                continue  # a gap that began at that instant holds the frontier of its site beyond it
            again = [other for other in judged if other.kind is JudgementKind.TRANSITION and other.device_id == one.device_id]
            assert (one.event_time_ms, one.trigger) not in {(other.event_time_ms, other.trigger) for other in again}, (one, added)
            PREVENTED.met()
