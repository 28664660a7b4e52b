"""Judgements of the definition and of the oracle, in a comparable form."""

from collections import Counter
from typing import Any

from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.policy import Policy
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Clock, Row
from tests.support.histories.histories import positioned
from tests.support.oracle.oracle import judge
from tests.support.oracle.world import Message


def as_message(one: Row) -> Message:
    return Message(
        one.received_at_ms,
        one.kind.value,
        one.device_id,
        one.event_time_ms,
        one.clock is Clock.DEVICE,
        one.boot,
        one.seq,
        one.code,
        one.gateway,
        one.body,
        one.digest,
        one.session,
        one.position,
        site=one.site,
        firmware=one.firmware,
    )


def comparable(one: Judgement) -> tuple[Any, ...]:
    if one.kind is JudgementKind.TRANSITION:
        change = (one.life_ms, one.transition_no, one.from_mode, one.to_mode, one.trigger)
        return (one.kind.value, one.device_id, *change, one.event_time_ms, one.last_seen_ms, one.runtime_ms)
    return (one.kind.value, one.device_id, one.message_kind, one.event_time_ms, one.received_at_ms, one.late_by_ms)


def by_the_core(rows: list[Row], lateness_s: int) -> Counter[tuple[Any, ...]]:
    return Counter(comparable(one) for one in replay(positioned(rows, lateness_s), Deployment(lateness_s * 1000, 30_000)))


def by_the_oracle(rows: list[Row], lateness_s: int) -> Counter[tuple[Any, ...]]:
    backlog_ms = Deployment().max_backlog_ms
    return Counter(judge([as_message(one) for one in rows], lateness_s * 1000, 30_000, backlog_ms, Policy().normalised()))
