"""Recorder of the definition: the step that emitted a transition, and the rows that set the state before it.

Rule: it changes nothing. The fold judges as without it.
"""

from dataclasses import dataclass, field, replace
from typing import Final

from fleetpulse.core.device import Device, EvaluationContext
from fleetpulse.core.fold import Fold
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.policy import Dated, Rules
from fleetpulse.core.rows import OP_ERROR, SIGNALS, Kind, Row
from fleetpulse.core.signals import as_error

_FACTS: Final = (  # attributes of a device whose newest cause is recorded
    "quiet_since_ms", "death_ms", "outage_ms", "held_until_ms", "degraded_until_ms", "flagged_until_ms",
)  # fmt: skip
DECOMMISSIONED: Final = "decommissioned"  # key of the row that took the device out of service


@dataclass(frozen=True, slots=True)
class Cause:
    """Row that set a fact about a device, with the policy and the rules by which it was judged."""

    row: Row
    dated: Dated
    rules: Rules


@dataclass(slots=True)
class Record:
    """Causes of the facts about one device.

    Attributes:
        causes: newest cause of each fact, by attribute of the device; a fact without a row has none.
        errors: errors that were counted, oldest first.
        events: events that the velocity rule has counted, oldest first.
        gaps: rows that opened gaps, in any order.
    """

    causes: dict[str, Cause] = field(default_factory=dict[str, Cause])
    errors: list[Row] = field(default_factory=list[Row])
    events: list[Row] = field(default_factory=list[Row])
    gaps: list[Row] = field(default_factory=list[Row])

    def add(self, before: Device | None, after: Device | None, row: Row | None, dated: Dated | None) -> None:
        """Record one step of the definition: a row (with the policy in force), or a deadline."""
        if after is None or before is None:
            self.causes, self.errors = {}, []
            self.events = [one for one in self.events if one is row]  # the first row of a life can be an event
        if after is None or row is None or dated is None or before == after:
            return
        cause = Cause(row, dated, after.rules(dated.policy))
        changed = {name for name in _FACTS if before is None or getattr(before, name) != getattr(after, name)}
        if row.kind in SIGNALS:
            changed.add("quiet_since_ms")
        if after.mode is Mode.DECOMMISSIONED and (before is None or before.mode is not after.mode):
            changed.add(DECOMMISSIONED)
        self.causes |= dict.fromkeys(changed, cause)
        if row.kind is Kind.ERROR:
            self.errors.append(row)
        elif row.kind is Kind.CONTROL and row.contents().get("op") == OP_ERROR:
            self.errors.append(as_error(row))


@dataclass(frozen=True, slots=True)
class Step:
    """Step of the definition that emitted a transition.

    Attributes:
        transition: the transition.
        device: state before the step; None if the life begins with it.
        context: coverage and policies.
        row: row of the step; None if a deadline caused the transition.
        record: causes of the facts, including this step.
    """

    transition: Judgement
    device: Device | None
    context: EvaluationContext
    row: Row | None
    record: Record


class StepRecorder(Fold):
    """Fold that also records the steps of one device, up to the emission of a transition.

    Attributes:
        step: step that emitted the transition; None until then.

    Args:
        context: coverage and policies.
        judgements: judgements emitted so far.
        wanted: transition to find.
        gaps: rows that open gaps.
    """

    def __init__(self, context: EvaluationContext, judgements: list[Judgement], wanted: Judgement, gaps: list[Row]) -> None:
        Fold.__init__(self, context, judgements)
        self.step: Step | None = None
        self._wanted = wanted
        self._record = Record(gaps=gaps)

    def apply(self, device: Device | None, row: Row) -> Device | None:
        """Apply one row, and record the step."""
        before, count = None if device is None else replace(device), len(self.judgements)
        after = Fold.apply(self, device, row)
        device_id = row.device_id if before is None else before.device_id
        self._step(device_id, before, after, row, count)
        return after

    def count_event(self, device: Device, row: Row, rules: Rules) -> None:
        """Count an event of the velocity rule, and record it."""
        if device.device_id == self._wanted.device_id and self.step is None:
            self._record.events.append(row)
        Fold.count_event(self, device, row, rules)

    def fire(self, device: Device, at_ms: int, trigger: Trigger) -> Device | None:
        """Fire one deadline, and record the step."""
        before, count = replace(device), len(self.judgements)
        after = Fold.fire(self, device, at_ms, trigger)
        self._step(before.device_id, before, after, None, count)
        return after

    def _step(self, device_id: str, before: Device | None, after: Device | None, row: Row | None, count: int) -> None:
        if device_id != self._wanted.device_id or self.step is not None:
            return
        found = any(_is_same(one, self._wanted) for one in self.judgements[count:])
        if not found or after is not None:  # a device that is forgotten has no facts afterwards
            self._record.add(before, after, row, None if row is None else self.context.policies.at(row.at_ms))
        if found:
            self.step = Step(self._wanted, before, self.context, row, self._record)


def _is_same(one: Judgement, wanted: Judgement) -> bool:
    names = ("device_id", "event_time_ms", "from_mode", "to_mode", "trigger")
    return one.kind is JudgementKind.TRANSITION and all(getattr(one, name) == getattr(wanted, name) for name in names)
