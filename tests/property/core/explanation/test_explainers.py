"""Explanations: each verdict has one, its terms add up, and what would have prevented it does so."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.explanation.explainers import EXPLAINERS, Explanation, explain
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.lifecycle import Trigger
from fleetpulse.core.replay import Deployment, Outcome, outcome
from fleetpulse.core.rows import Clock, Kind, Row
from tests.support.floors import Floor
from tests.support.histories.strategies import DEPLOYMENTS, histories

BY_ROW = {
    Trigger.SIGNAL, Trigger.ERRORS, Trigger.SEQUENCE, Trigger.VELOCITY, Trigger.MAINTAIN, Trigger.UPDATE, Trigger.UPDATED,
    Trigger.RELEASED, Trigger.REGISTERED, Trigger.DECOMMISSION, Trigger.GATEWAY_RETURN,
}  # fmt: skip
BY_EARLIER_POLICY = {Trigger.RECOVERED, Trigger.HOLD_OVER}
PREVENTED_BY_SIGNAL = {Trigger.SILENCE, Trigger.DEATH, Trigger.GATEWAY_DEATH, Trigger.SESSION_OVER}
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


def _signal_at(one: Judgement, rows: list[Row], deployment: Deployment, *, amending: bool) -> Row:
    """Return a direct signal of the device at the instant of its transition, from its site at that time.

    A signal from another site is judged when the frontier of that site reaches it, which may be later.
    """
    assert one.event_time_ms is not None
    before = outcome(rows, deployment, amending=amending, through_ms=one.event_time_ms - 1).devices.get(one.device_id)
    site = (one.site or "") if before is None else before.current_site
    made = Row(one.event_time_ms, Kind.HEARTBEAT, one.device_id, site, one.event_time_ms, Clock.DEVICE, digest=1)
    return replace(made, position=10_000)


def _is_late(row: Row, judged: Outcome) -> bool:
    return any(one.kind is JudgementKind.LATE and one.received_at_ms == row.received_at_ms for one in judged.judgements)


@EXPLAINED.over_all_examples
@PREVENTED.over_all_examples
@settings(max_examples=66)
@given(histories(reviews=True), DEPLOYMENTS, st.booleans())
def test_each_transition_is_explained(rows: list[Row], deployment: Deployment, amending: bool) -> None:
    for one in _transitions(rows, deployment, amending=amending):
        found = explain(rows, deployment, one, amending=amending)
        assert found is not None, one
        assert found.sentence
        assert found.transition == one
        assert _adds_up(found), "\n".join(map(str, (found.sentence, *found.terms, *rows)))
        assert one.trigger is not None
        EXPLAINED.met()
        if one.trigger in BY_ROW:
            assert found.evidence, found
        else:
            assert found.terms
            assert found.otherwise or one.trigger in BY_EARLIER_POLICY
        if one.trigger in PREVENTED_BY_SIGNAL:
            added = _signal_at(one, rows, deployment, amending=amending)
            judged = outcome([*rows, added], deployment, amending=amending)
            if judged.shards is None or len(judged.shards) > 1 or _is_late(added, judged):
                continue  # sites with frontiers of their own are judged in turn, and a gap may begin at that instant
            again = {(other.device_id, other.event_time_ms, other.trigger) for other in judged.judgements}
            assert (one.device_id, one.event_time_ms, one.trigger) not in again
            PREVENTED.met()
