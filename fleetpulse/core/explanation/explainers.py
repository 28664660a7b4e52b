"""Explanation of a verdict: its sentence, arithmetic, rows and rule, from the definition.

Rule 1: an explanation computes no verdict. `recorder` records the definition while it judges the rows: the
step that emitted the transition, the state and the coverage before it, and the rows that set this state.
Rule 2: a transition is explained only if the definition emits it for the given rows; otherwise the rows
are not complete, and `explain` returns None.
Rule 3: each trigger has an explanation.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fleetpulse.core.device import Device, EvaluationContext
from fleetpulse.core.explanation.recorder import DECOMMISSIONED, Step, StepRecorder
from fleetpulse.core.fold import NO_CODE, Fold
from fleetpulse.core.judgements import Judgement
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.policy import MAX_ERRORS, Dated, Rules
from fleetpulse.core.replay import EMPTY_OUTCOME, Deployment, Outcome, outcome
from fleetpulse.core.rows import Kind, Row
from fleetpulse.core.times import format_duration, format_instant


@dataclass(frozen=True, slots=True)
class Term:
    """One line of the arithmetic of a deadline.

    Attributes:
        meaning: what the instant or the span is, for people.
        at_ms: instant, epoch milliseconds; None for a span.
        span_ms: span that is added, milliseconds; None for an instant.
    """

    meaning: str
    at_ms: int | None = None
    span_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A row that the verdict depends on.

    Attributes:
        role: part of the row in the verdict, for people.
        row: row of bronze.
    """

    role: str
    row: Row


@dataclass(frozen=True, slots=True)
class RuleInForce:
    """Rule of the policy that decided.

    Attributes:
        key: name of the rule in a policy file.
        value: its value, as in a policy file.
        of: class of the device, or "this device" if the registry sets the limit.
        dated: policy in force.
    """

    key: str
    value: str
    of: str
    dated: Dated


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of one transition.

    Attributes:
        transition: the transition.
        sentence: the reason, one sentence.
        terms: arithmetic of the instant; empty if a row decided. The first term is an instant, the last is
            the instant of the transition, and the spans between them add up to it.
        rule: rule that decided; None if no rule did.
        evidence: rows, in the order of the sentence.
        otherwise: what would have prevented the transition, one sentence; empty if a row decided.
    """

    transition: Judgement
    sentence: str
    terms: tuple[Term, ...] = ()
    rule: RuleInForce | None = None
    evidence: tuple[Evidence, ...] = ()
    otherwise: str = ""


class _Case(Step):
    """A step with what the explainers read from it."""

    __slots__ = ()

    @property
    def at_ms(self) -> int:
        assert self.transition.event_time_ms is not None, "a transition has an instant"
        return self.transition.event_time_ms

    @property
    def dated(self) -> Dated:
        return self.context.policies.at(self.at_ms)

    @property
    def rules(self) -> Rules:
        policy = self.dated.policy
        return policy.of(self.transition.device_class or "") if self.device is None else self.device.rules(policy)

    def rule(self, key: str, value: str, *, own: bool = False, dated: Dated | None = None) -> RuleInForce:
        """Return a rule in force at the transition, or that of an earlier policy; ``own`` if the registry sets it."""
        return RuleInForce(key, value, "this device" if own else f"class {self.transition.device_class}", dated or self.dated)

    def evidence(self, fact: str, role: str) -> list[Evidence]:
        """Return the row that set a fact; none if the rows begin after it."""
        cause = self.record.causes.get(fact)
        return [] if cause is None else [Evidence(role, cause.row)]

    def gaps(self, since_ms: int) -> list[tuple[int, int]]:
        """Return the spans since an instant in which the site was not covered, up to the transition."""
        assert self.device is not None
        spans = self.context.coverage(self.device).gaps
        cut = [(max(opened, since_ms), min(self.at_ms if closed is None else closed, self.at_ms)) for opened, closed in spans]
        return [(opened, closed) for opened, closed in cut if opened < closed]

    def gap_rows(self, since_ms: int) -> list[Evidence]:
        """Return the rows that opened the gaps since an instant."""
        spans = self.gaps(since_ms)
        opened = [row for row in self.record.gaps if any(begin <= _opened_ms(row) < end for begin, end in spans)]
        return [Evidence("the bridge was not listening", row) for row in opened]


def explain(
    rows: Iterable[Row],
    deployment: Deployment,
    transition: Judgement,
    *,
    initial: Outcome = EMPTY_OUTCOME,
    amending: bool = False,
) -> Explanation | None:
    """Explain a transition of a device.

    Args:
        rows: rows of the device, and rows that concern all devices.
        deployment: settings of the installation.
        transition: a transition, or an addition of an amendment.
        initial: outcome of the rows before ``rows``.
        amending: whether the transition is an addition, which the amended history has.

    Returns:
        The explanation; None if the definition does not emit the transition for these rows.
    """
    known = list(rows)
    gaps = [row for row in known if row.kind is Kind.GAP and row.contents().get("op") == "open"]
    recorders: list[StepRecorder] = []

    def make_fold(context: EvaluationContext, judgements: list[Judgement]) -> Fold:
        recorders.append(StepRecorder(context, judgements, transition, gaps))
        return recorders[-1]

    outcome(known, deployment, amending=amending, initial=initial, make_fold=make_fold)
    step = next((one.step for one in recorders if one.step is not None), None)
    if step is None:
        return None
    assert transition.trigger is not None, "a transition has a trigger"
    return EXPLAINERS[transition.trigger](_Case(step.transition, step.device, step.context, step.row, step.record))


def _opened_ms(gap: Row) -> int:
    """Return the start of a gap as its row names it; a gap starts no earlier than the frontier, so maybe later."""
    since_ms = gap.contents().get("from")
    return since_ms if type(since_ms) is int else gap.received_at_ms


def _deadline(case: _Case, start: Term, covered_ms: int | None, limit: Term, excused_ms: int = 0) -> tuple[Term, ...]:
    """Return the arithmetic of a deadline: start, limit, excused time, gaps, postponement, and the instant.

    Args:
        case: transition by a deadline.
        start: instant from which the limit counts.
        covered_ms: covered time at that instant; of a device that moved, converted to its site by the definition.
        limit: limit of covered time.
        excused_ms: covered time that does not count, milliseconds.
    """
    assert case.device is not None and covered_ms is not None and start.at_ms is not None and limit.span_ms is not None
    passed_ms = case.context.coverage(case.device).covered(case.at_ms) - covered_ms
    missed_ms, late_ms = case.at_ms - start.at_ms - passed_ms, passed_ms - limit.span_ms - excused_ms
    terms = [start, limit]
    if excused_ms:
        terms.append(Term("time in which its gateway was dead, which is no silence", span_ms=excused_ms))
    gaps = case.gaps(start.at_ms)
    if sum(closed - opened for opened, closed in gaps) == missed_ms:
        named = [(f"from {format_instant(opened)} to {format_instant(closed)}", closed - opened) for opened, closed in gaps]
    else:  # covered time of a device that moved was that of another site
        named = [("at the site of the device, or at its site before", missed_ms)]
    terms += [Term(f"not listening {where}", span_ms=span_ms) for where, span_ms in named]
    if late_ms:
        terms.append(Term(_postponed(case), span_ms=late_ms))
    return (*terms, _end(case))


def _end(case: _Case) -> Term:
    return Term(f"{case.transition.to_mode}", at_ms=case.at_ms)


def _postponed(case: _Case) -> str:
    assert case.device is not None
    if case.dated.effective_from_ms == case.at_ms:
        return "until the policy with this limit took effect"
    if case.device.class_since_ms == case.at_ms:
        return "until the class or the limit of the device took effect"
    if case.device.held_until_ms is not None:
        return "until the announced end of maintenance or update"
    return f"the device is in mode {case.device.mode} since then"


def _prevented(what: str, case: _Case) -> str:
    return f"{what} at or before {format_instant(case.at_ms)} would have prevented it"


def _quiet_since(device: Device) -> Term:
    return Term("last signal" if device.last_seen_ms is not None else "registration", at_ms=device.quiet_since_ms)


def _last_signals(case: _Case) -> list[Evidence]:
    assert case.device is not None
    return case.evidence("quiet_since_ms", _quiet_since(case.device).meaning)


def _silence(case: _Case) -> Explanation:
    """Explain by the last signal, or by the death of the gateway if it is dead."""
    device = case.device
    assert device is not None
    if device.outage_ms is not None:
        return _of_gateway(case, "gateway_outage_limit", "was dead for {} of covered time", case.rules.gateway_outage_limit_ms)
    limit_ms = case.rules.timeout_ms
    terms = _deadline(case, _quiet_since(device), device.quiet_covered_ms, Term("timeout", span_ms=limit_ms), device.excused_ms)
    rule = case.rule("timeout", format_duration(limit_ms), own=device.timeout_ms is not None)
    evidence = (*_last_signals(case), *case.gap_rows(device.quiet_since_ms))
    sentence = f"nothing was heard for {format_duration(limit_ms)} of covered time"
    return Explanation(case.transition, sentence, terms, rule, evidence, _prevented("A signal of the device", case))


def _of_gateway(case: _Case, key: str, sentence: str, limit_ms: int, *, own: bool = False) -> Explanation:
    """Explain by the death of the gateway; the braces in the sentence are replaced by the limit."""
    device = case.device
    assert device is not None and device.outage_ms is not None
    start, limit = Term("death of the gateway", at_ms=device.outage_ms), Term(key, span_ms=limit_ms)
    terms = _deadline(case, start, device.outage_covered_ms, limit)
    evidence = (*case.evidence("outage_ms", start.meaning), *_last_signals(case), *case.gap_rows(device.outage_ms))
    rule = case.rule(key, format_duration(limit_ms), own=own)
    text = f"its gateway {device.gateway} {sentence.format(format_duration(limit_ms))}"
    otherwise = _prevented("A signal of the device or of its gateway", case)
    return Explanation(case.transition, text, terms, rule, evidence, otherwise)


def _death(case: _Case) -> Explanation:
    """Explain by the will that no later signal has voided."""
    device = case.device
    assert device is not None and device.death_ms is not None
    grace_ms = case.rules.death_grace_ms
    evidence = (*case.evidence("death_ms", "will"), *_last_signals(case), *case.gap_rows(device.death_ms))
    start, limit = Term("will", at_ms=device.death_ms), Term("death_grace", span_ms=grace_ms)
    terms = _deadline(case, start, device.death_covered_ms, limit)
    sentence = f"its connection ended with a will, and it was not heard again within {format_duration(grace_ms)}"
    rule = case.rule("death_grace", format_duration(grace_ms), own=device.death_grace_ms is not None)
    return Explanation(case.transition, sentence, terms, rule, evidence, _prevented("A signal sent after the will", case))


def _gateway_death(case: _Case) -> Explanation:
    """Explain by the death of the gateway, after the grace period."""
    assert case.device is not None
    own = case.device.death_grace_ms is not None
    return _of_gateway(case, "death_grace", "died and did not return within {}", case.rules.death_grace_ms, own=own)


def _by_row(sentence: Callable[[_Case], str], role: str) -> Callable[[_Case], Explanation]:
    """Return an explanation of transitions that one row causes."""

    def explained(case: _Case) -> Explanation:
        evidence = () if case.row is None else (Evidence(role, case.row),)
        return Explanation(case.transition, sentence(case), evidence=evidence)

    return explained


def _always(sentence: str) -> Callable[[_Case], str]:
    return lambda _case: sentence


def _signal(case: _Case) -> str:
    kind = "signal" if case.row is None else case.row.kind
    article = "an" if kind[0] in "aeiou" else "a"
    before = case.device.last_seen_ms if case.device is not None else None
    after = f", {format_duration(case.at_ms - before)} after the one before" if before is not None else ", the first one"
    return f"{article} {kind} message was received{after}"


def _errors(case: _Case) -> Explanation:
    """Explain by the errors within the window, of which the last one completed the count."""
    rules = case.rules
    window = format_duration(rules.degraded_window_ms)
    rule = case.rule("degraded", f'errors = {rules.degraded_errors}, window = "{window}"')
    evidence = tuple(Evidence("error", row) for row in case.record.errors[-rules.degraded_errors :])
    return Explanation(case.transition, f"{rules.degraded_errors} errors are within {window}", rule=rule, evidence=evidence)


def _recovered(case: _Case) -> Explanation:
    """Explain by the error that completed the count: its policy set the instant at which the count ends."""
    cause = case.record.causes.get("degraded_until_ms")
    if cause is None:  # it was degraded before the first of the rows
        return Explanation(case.transition, "the errors that degraded it no longer count")
    rules, window_ms = cause.rules, cause.rules.degraded_window_ms
    start_ms, window = case.at_ms - window_ms, format_duration(window_ms)
    counted = [row for row in case.record.errors if start_ms <= row.at_ms <= cause.row.at_ms]
    terms = (
        Term("oldest error that counted", at_ms=start_ms),
        Term("degraded.window", span_ms=window_ms),
        _end(case),
    )
    sentence = f"fewer than {rules.degraded_errors} errors are within {window}"
    rule = case.rule("degraded", f'errors = {rules.degraded_errors}, window = "{window}"', dated=cause.dated)
    evidence = tuple(Evidence("error", row) for row in counted[-rules.degraded_errors :])
    otherwise = _prevented("A further error", case) if cause.rules == case.rules else ""
    return Explanation(case.transition, sentence, terms, rule, evidence, otherwise)


def _sequence(case: _Case) -> Explanation:
    """Explain by the newest errors with the codes of the sequence, in its order."""
    rules = case.rules
    found, left = list[Row](), list(rules.flagged_codes)
    for row in reversed(case.record.errors):
        if left and (row.code or NO_CODE) == left[-1]:
            found, left = [row, *found], left[:-1]
    window, codes = format_duration(rules.flagged_window_ms), ", ".join(rules.flagged_codes)
    rule = case.rule("flagged", f'codes = {json.dumps(rules.flagged_codes)}, window = "{window}"')
    sentence = f"the errors {codes} occurred in this order within {window}"
    return Explanation(case.transition, sentence, rule=rule, evidence=tuple(Evidence("error", row) for row in found))


def _velocity(case: _Case) -> Explanation:
    """Explain by the newest events that the rule has counted in the session."""
    rules, device = case.rules, case.device
    count = 1 if device is None else device.velocity_count + 1
    events = case.record.events[-count:]
    value = f'events = {rules.velocity_events}, kind = "{rules.velocity_kind}"'
    value += f", code = {json.dumps(rules.velocity_code)}" if rules.velocity_code is not None else ""
    code = "" if rules.velocity_code is None else f" with code {rules.velocity_code}"
    since = "" if len(events) < 2 else f", within {format_duration(case.at_ms - events[0].at_ms)}"
    sentence = f"{count} {rules.velocity_kind} message{'s' * (count > 1)}{code} occurred in one session{since}"
    evidence = tuple(Evidence("event", row) for row in events[-MAX_ERRORS:])
    return Explanation(case.transition, sentence, rule=case.rule("velocity", value), evidence=evidence)


def _session_over(case: _Case) -> Explanation:
    """Explain by the last signal of the session, and by the event that held the device for review."""
    device = case.device
    assert device is not None
    idle_ms, last_ms = case.rules.session_idle_ms, device.quiet_since_ms
    late_ms = case.at_ms - last_ms - idle_ms
    postponed = (Term(_postponed(case), span_ms=late_ms),) if late_ms else ()
    terms = (_quiet_since(device), Term("session.idle", span_ms=idle_ms), *postponed, _end(case))
    evidence = (*case.evidence("flagged_until_ms", "event that held it for review"), *_last_signals(case))
    idle = format_duration(idle_ms)
    sentence = f"its session was over after {idle} without a signal, and nobody confirmed the flag for review"
    otherwise = _prevented("A signal of the device", case)
    return Explanation(case.transition, sentence, terms, case.rule("session", f'idle = "{idle}"'), evidence, otherwise)


def _hold_over(case: _Case) -> Explanation:
    """Explain by the row that set the flag: its policy set the instant at which the flag ends."""
    cause = case.record.causes.get("flagged_until_ms")
    if cause is None:  # it was flagged before the first of the rows
        return Explanation(case.transition, "the flag ended, and nobody released it")
    name, hold_ms, start, again = "flagged", cause.rules.flagged_hold_ms, "last error of the sequence", "sequence of errors"
    if case.at_ms - cause.row.at_ms != hold_ms or (case.device is not None and case.device.review_ms is not None):
        name, hold_ms, start, again = "velocity", cause.rules.velocity_hold_ms, "last event of the session", "number of events"
    hold = format_duration(hold_ms)
    terms = (Term(start, at_ms=case.at_ms - hold_ms), Term(f"{name}.hold", span_ms=hold_ms), _end(case))
    rule = case.rule(name, f'hold = "{hold}"', dated=cause.dated)
    evidence = (Evidence(start, cause.row),)
    otherwise = _prevented(f"The same {again} again", case) if cause.rules == case.rules else ""
    return Explanation(case.transition, f"it was flagged for {hold}, and nobody released it", terms, rule, evidence, otherwise)


def _held(case: _Case) -> str:
    until = None if case.row is None else case.row.contents().get("until")
    ends = f" until {format_instant(until)}" if type(until) is int else ""
    return f"an operator announced {'maintenance' if case.transition.to_mode is Mode.MAINTENANCE else 'an update'}{ends}"


def _until(case: _Case) -> Explanation:
    """Explain by the newest announcement."""
    terms = (Term("announced end", at_ms=case.at_ms), _end(case))
    evidence = tuple(case.evidence("held_until_ms", "announcement"))
    otherwise = _prevented("A later announced end, sent", case)
    return Explanation(case.transition, "the announced end was reached", terms, evidence=evidence, otherwise=otherwise)


def _updated(case: _Case) -> str:
    device, row = case.device, case.row
    if row is None or device is None:
        return "a signal shows that the update is done"
    if row.firmware is not None and row.firmware != device.firmware and device.firmware is not None:
        return f"a signal shows new firmware: {row.firmware} instead of {device.firmware}"
    return "a signal shows a restart" + (f": boot {row.boot} instead of {device.boot}" if row.boot != device.boot else "")


def _gateway_return(case: _Case) -> str:
    return f"its gateway {case.transition.gateway} was heard again"


def _forget(case: _Case) -> Explanation:
    """Explain by the end of service, or by the last signal of a device that was in service."""
    device = case.device
    assert device is not None
    limit_ms = case.rules.forget_after_ms
    rule, limit = case.rule("forget_after", format_duration(limit_ms)), Term("forget_after", span_ms=limit_ms)
    if device.mode is Mode.DECOMMISSIONED:
        late_ms = case.at_ms - device.mode_since_ms - limit_ms
        postponed = (Term(_postponed(case), span_ms=late_ms),) if late_ms else ()
        terms = (Term(DECOMMISSIONED, at_ms=device.mode_since_ms), limit, *postponed, _end(case))
        evidence = tuple(case.evidence(DECOMMISSIONED, DECOMMISSIONED))
        sentence = f"it has been out of service for {format_duration(limit_ms)}"
        return Explanation(case.transition, sentence, terms, rule, evidence, _prevented("A registration", case))
    terms = _deadline(case, _quiet_since(device), device.quiet_covered_ms, limit, device.excused_ms)
    sentence = f"nothing was heard for {format_duration(limit_ms)} of covered time"
    evidence = (*_last_signals(case), *case.gap_rows(device.quiet_since_ms))
    return Explanation(case.transition, sentence, terms, rule, evidence, _prevented("A signal of the device", case))


_T: Final = Trigger
EXPLAINERS: Final[Mapping[Trigger, Callable[[_Case], Explanation]]] = MappingProxyType(
    {
        _T.SIGNAL: _by_row(_signal, "signal"),
        _T.SILENCE: _silence,
        _T.DEATH: _death,
        _T.GATEWAY_DEATH: _gateway_death,
        _T.GATEWAY_RETURN: _by_row(_gateway_return, "return of the gateway"),
        _T.ERRORS: _errors,
        _T.RECOVERED: _recovered,
        _T.SEQUENCE: _sequence,
        _T.RELEASED: _by_row(_always("an operator released it"), "command"),
        _T.VELOCITY: _velocity,
        _T.HOLD_OVER: _hold_over,
        _T.SESSION_OVER: _session_over,
        _T.MAINTAIN: _by_row(_held, "command"),
        _T.UPDATE: _by_row(_held, "command"),
        _T.UNTIL: _until,
        _T.UPDATED: _by_row(_updated, "signal"),
        _T.REGISTERED: _by_row(_always("the registry has a new entry for it"), "registry entry"),
        _T.DECOMMISSION: _by_row(_always("the registry took it out of service"), "registry entry"),
        _T.FORGET: _forget,
        _T.AMENDED: _by_row(_always("late messages changed its history, and a correction applied it"), "correction"),
    }
)
