"""Backtests by the definition: both policies judged separately, then compared."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fleetpulse.columnar.backtest.replay import BacktestRequest, BacktestResult
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.replay import replay
from fleetpulse.core.rows import EVERYONE, Clock, Kind, Row

Changed = Counter[tuple[str, str, str, int | None, int | None]]  # change, device, mode, before, after


def _placed(judgements: Sequence[Judgement]) -> Counter[tuple[str, str, int]]:
    return Counter(
        (one.device_id, str(one.to_mode), one.event_time_ms or 0) for one in judgements if one.kind is JudgementKind.TRANSITION
    )


def instead(rows: Sequence[Row], question: BacktestRequest) -> list[Row]:
    """Return the rows with the tried policy instead of the policies that it replaces.

    Each replaced row becomes a tick, because its time of receipt stays covered.
    """
    body = json.dumps({"policy": question.policy})
    own = Row(question.started_ms, Kind.POLICY, EVERYONE, EVERYONE, question.from_ms or 0, Clock.RECEIVED, body=body)
    kept = [
        replace(one, kind=Kind.TICK, body=None, event_time_ms=one.received_at_ms)
        if one.kind is Kind.POLICY and one.clock is not Clock.INVALID and (one.event_time_ms or 0) >= (question.from_ms or 0)
        else one
        for one in rows
    ]
    return [own, *kept]


def sides(rows: Sequence[Row], question: BacktestRequest) -> tuple[list[Judgement], list[Judgement]]:
    """Return the judgements of the definition under both policies, within the range."""

    def within(one: Judgement) -> bool:
        at_ms = one.event_time_ms if one.kind is JudgementKind.TRANSITION else one.received_at_ms
        assert at_ms is not None
        return (question.from_ms or 0) <= at_ms and (question.to_ms is None or at_ms <= question.to_ms)

    both = (replay(history, question.deployment) for history in (rows, instead(rows, question)))
    before, after = ([one for one in judgements if within(one)] for judgements in both)
    return before, after


def by_hand(before: Sequence[Judgement], after: Sequence[Judgement]) -> Changed:
    """Pair the transitions that only one side has.

    For each device and mode, in order of time: a transition is paired with the previous one if that
    is unpaired and of the other side.
    """
    gone, added = _placed(before) - _placed(after), _placed(after) - _placed(before)
    left: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for side, bag in enumerate((gone, added)):
        for device, mode, at_ms in bag.elements():
            left.setdefault((device, mode), []).append((at_ms, side))
    found: Changed = Counter()
    for (device, mode), entries in left.items():
        free: tuple[int, int] | None = None
        for entry in sorted(entries):
            if free is not None and free[1] != entry[1]:
                old, new = (free, entry) if entry[1] else (entry, free)
                found["moved", device, mode, old[0], new[0]] += 1
                free = None
                continue
            if free is not None:
                found[_lone(device, mode, *free)] += 1
            free = entry
        if free is not None:
            found[_lone(device, mode, *free)] += 1
    return found


def _lone(device: str, mode: str, at_ms: int, side: int) -> tuple[str, str, str, int | None, int | None]:
    return ("added", device, mode, None, at_ms) if side else ("gone", device, mode, at_ms, None)


def changes_of(found: BacktestResult) -> Changed:
    names = ("change", "device_id", "to_mode", "before_ms", "after_ms")
    return Counter(tuple(one[name] for name in names) for one in found.changed.to_pylist())
