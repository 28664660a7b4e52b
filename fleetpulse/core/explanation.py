"""Explanation of a verdict: its sentence, arithmetic, rows and rule, from the definition.

Rule 1: an explanation computes no verdict. The state before a transition, its deadlines and the policies
in force are those of `core.replay`.
Rule 2: a transition is explained only if the definition emits it for the given rows; otherwise the rows
are not complete, and `explain` returns None.
Rule 3: each trigger has an explanation.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from fleetpulse.core.device import Device, EvaluationContext
from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.policy import DEFAULT_CLASS, Dated, Rules
from fleetpulse.core.replay import EMPTY_OUTCOME, Deployment, Outcome, outcome
from fleetpulse.core.rows import SIGNALS, GatewayEvent, Kind, Row, for_everyone
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


@dataclass(frozen=True, slots=True)
class _Case:
    """A transition with the state before it, and what the definition knows.

    Attributes:
        transition: the transition.
        at_ms: its instant, epoch milliseconds.
        device: state before the instant; None if the life begins with it.
        context: coverage and policies.
        rows: rows of the device and those that concern all devices.
    """

    transition: Judgement
    at_ms: int
    device: Device | None
    context: EvaluationContext
    rows: Sequence[Row]

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

    def errors(self) -> list[tuple[int, Row, Dated, Rules]]:
        """Return the errors of the device up to the transition, with their instant and the policy then, oldest first."""
        found: list[tuple[int, Row, Dated, Rules]] = []
        for row in self.rows:
            if row.kind is Kind.ERROR and row.device_id == self.transition.device_id:
                for instant_ms in sorted(_possible_ms(row)):
                    dated = self.context.policies.at(instant_ms)
                    rules = dated.policy.of(self.transition.device_class or "")
                    found.append((instant_ms, row, dated, rules))
        return sorted((one for one in found if one[0] <= self.at_ms), key=lambda one: one[0])

    def cause(self) -> Row | None:
        """Return the row that the transition names; None if a deadline caused it."""
        one = self.transition
        if one.received_at_ms is None:
            return None
        named = (one.received_at_ms, one.message_kind, one.boot, one.seq)
        found = (row for row in self.rows if row.device_id == one.device_id)
        return next((row for row in found if (row.received_at_ms, row.kind.value, row.boot, row.seq) == named), None)

    def signals_at(self, instants: Iterable[int], kinds: Iterable[Kind] = SIGNALS) -> list[Row]:
        """Return the signals of the device that count at some instants, in their order."""
        wanted, among = set(instants), set(kinds)
        own = (row for row in self.rows if row.device_id == self.transition.device_id and row.kind in among)
        found = [row for row in own if not wanted.isdisjoint(_possible_ms(row)) and row.received_at_ms >= min(wanted)]
        return sorted(found, key=lambda row: (row.received_at_ms, row.position))

    def gaps(self, since_ms: int) -> list[tuple[int, int]]:
        """Return the spans since an instant in which the site was not covered, up to the transition."""
        assert self.device is not None
        spans = self.context.coverage(self.device).gaps
        cut = [(max(opened, since_ms), min(self.at_ms if closed is None else closed, self.at_ms)) for opened, closed in spans]
        return [(opened, closed) for opened, closed in cut if opened < closed]

    def gap_rows(self, since_ms: int) -> list[Evidence]:
        """Return the rows that opened the gaps since an instant."""
        rows = [row for row in self.rows if row.kind is Kind.GAP and row.contents().get("op") == "open"]
        spans = self.gaps(since_ms)
        opened = [row for row in rows if any(begin <= _opened_ms(row) < end for begin, end in spans)]
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
    assert transition.event_time_ms is not None, "a transition has an instant"
    at_ms, known = transition.event_time_ms, list(rows)
    before = outcome(known, deployment, amending=amending, through_ms=at_ms - 1, initial=initial)
    after = outcome(known, deployment, amending=amending, through_ms=at_ms, initial=initial)
    if before.shards is None or not any(_is_same(one, transition) for one in after.judgements):
        return None
    context = EvaluationContext(before.shards, before.policies)
    device = _with_entry(before.devices.get(transition.device_id), transition, known)
    case = _Case(transition, at_ms, device, context, known)
    assert transition.trigger is not None
    if not _has_facts(device, transition.trigger) or (device is not None and device.quiet_since_ms > at_ms):
        return None
    return EXPLAINERS[transition.trigger](case)


def _with_entry(device: Device | None, transition: Judgement, rows: Sequence[Row]) -> Device | None:
    """Return the state with the class and limits of a registry entry that takes effect at the transition."""
    at_ms = transition.event_time_ms
    own = (row for row in rows if row.kind is Kind.REGISTRY and row.device_id == transition.device_id)
    for row in sorted((row for row in own if row.event_time_ms == at_ms), key=lambda row: row.arrival):
        content = row.contents()
        if device is None or content.get("op") != "add" or (content.get("class") or DEFAULT_CLASS) != transition.device_class:
            continue
        timeout_ms, death_grace_ms = content.get("timeout_ms"), content.get("death_grace_ms")
        limits = {"timeout_ms": timeout_ms, "death_grace_ms": death_grace_ms, "class_since_ms": at_ms}
        device = replace(device, device_class=transition.device_class, **limits)
    return device


def _has_facts(device: Device | None, trigger: Trigger) -> bool:
    """Return whether the state before a deadline has the facts from which the deadline counts."""
    if trigger not in (_T.SILENCE, _T.DEATH, _T.GATEWAY_DEATH, _T.FORGET):
        return True
    if device is None or (trigger is _T.DEATH and device.death_covered_ms is None):
        return False
    return trigger is not _T.GATEWAY_DEATH or device.outage_covered_ms is not None


def _is_same(one: Judgement, wanted: Judgement) -> bool:
    names = ("device_id", "event_time_ms", "from_mode", "to_mode", "trigger")
    return one.kind is JudgementKind.TRANSITION and all(getattr(one, name) == getattr(wanted, name) for name in names)


def _opened_ms(gap: Row) -> int:
    """Return the start of a gap as its row names it; a gap starts no earlier than the frontier, so maybe later."""
    since_ms = gap.contents().get("from")
    return since_ms if type(since_ms) is int else gap.received_at_ms


def _possible_ms(row: Row) -> set[int]:
    """Return the instants at which a signal may count: its event time, or its time of receipt."""
    return {row.received_at_ms} if row.event_time_ms is None else {row.received_at_ms, min(row.event_time_ms, row.received_at_ms)}


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
    end = Term(f"{case.transition.to_mode}", at_ms=case.at_ms)
    if min(missed_ms, late_ms, excused_ms) < 0:  # the coverage known at that time was another one
        return (start, Term(f"until {limit.meaning} was reached", span_ms=case.at_ms - start.at_ms), end)
    terms = [start, limit]
    if excused_ms:
        terms.append(Term("time in which its gateway was dead, which is no silence", span_ms=excused_ms))
    gaps = case.gaps(start.at_ms)
    if sum(closed - opened for opened, closed in gaps) == missed_ms:
        named = [(f"from {format_instant(opened)} to {format_instant(closed)}", closed - opened) for opened, closed in gaps]
    else:
        named = [("at the site of the device, or at its site before", missed_ms)]
    terms += [Term(f"not listening {where}", span_ms=span_ms) for where, span_ms in named]
    if late_ms:
        terms.append(Term(_postponed(case), span_ms=late_ms))
    return (*terms, end)


def _postponed(case: _Case) -> str:
    assert case.device is not None
    if case.dated.effective_from_ms == case.at_ms:
        return "until the policy with this limit took effect"
    if case.device.class_since_ms == case.at_ms:
        return "until the class or the limit of the device took effect"
    if case.device.held_until_ms is not None:
        return "until the announced end of maintenance or update"
    return f"the device is in mode {case.device.mode} since then"


def _silence(case: _Case) -> Explanation:
    device = case.device
    assert device is not None
    if device.outage_ms is not None:
        limit_ms = case.rules.gateway_outage_limit_ms
        limit = Term("gateway_outage_limit", span_ms=limit_ms)
        sentence = f"gateway {device.gateway} was dead for {format_duration(limit_ms)} of covered time"
        evidence = [*_gateway_rows(case, GatewayEvent.DEATH, device.outage_ms), *case.gap_rows(device.outage_ms)]
        start, key, own = Term("death of the gateway", at_ms=device.outage_ms), "gateway_outage_limit", False
        covered_ms, excused_ms = device.outage_covered_ms, 0
        otherwise = "A signal of the device or of its gateway"
    else:
        limit_ms, key, own = case.rules.timeout_ms, "timeout", device.timeout_ms is not None
        limit = Term(key, span_ms=limit_ms)
        sentence = f"nothing was heard for {format_duration(limit_ms)} of covered time"
        start, covered_ms, excused_ms = _quiet_since(device), device.quiet_covered_ms, device.excused_ms
        evidence = [*_last_signals(case), *case.gap_rows(device.quiet_since_ms)]
        otherwise = "A signal of the device"
    terms = _deadline(case, start, covered_ms, limit, excused_ms)
    rule = case.rule(key, format_duration(limit_ms), own=own)
    return Explanation(case.transition, sentence, terms, rule, tuple(evidence), _prevented(otherwise, case))


def _prevented(what: str, case: _Case) -> str:
    return f"{what} at or before {format_instant(case.at_ms)} would have prevented it"


def _quiet_since(device: Device) -> Term:
    return Term("last signal" if device.last_seen_ms is not None else "registration", at_ms=device.quiet_since_ms)


def _last_signals(case: _Case) -> list[Evidence]:
    assert case.device is not None
    if case.device.last_seen_ms is None:
        return [Evidence("registration", row) for row in _own_rows(case, Kind.REGISTRY)[-1:]]
    return [Evidence("last signal", row) for row in case.signals_at([case.device.last_seen_ms])[-1:]]


def _own_rows(case: _Case, *kinds: Kind) -> list[Row]:
    """Return the rows of the device of some kinds that counted before the transition, oldest first."""
    own = [row for row in case.rows if row.device_id == case.transition.device_id and row.kind in kinds]
    return sorted((row for row in own if row.at_ms <= case.at_ms), key=lambda row: (row.at_ms, row.received_at_ms))


def _gateway_rows(case: _Case, event: GatewayEvent, at_ms: int) -> list[Evidence]:
    role = "death of the gateway" if event is GatewayEvent.DEATH else "return of the gateway"
    gateways = {case.transition.gateway, case.device.gateway if case.device else None}
    found = (row for row in case.rows if row.gateway_event is event and (for_everyone(row) or row).at_ms == at_ms)
    return [Evidence(role, row) for row in found if row.gateway in gateways or row.device_id in gateways]


def _death(case: _Case) -> Explanation:
    device = case.device
    assert device is not None and device.death_ms is not None
    grace_ms, own = case.rules.death_grace_ms, device.death_grace_ms is not None
    wills = [row for row in _own_rows(case, Kind.DEATH) if row.received_at_ms == device.death_ms]
    evidence = (*(Evidence("will", row) for row in wills), *_last_signals(case), *case.gap_rows(device.death_ms))
    terms = _deadline(case, Term("will", at_ms=device.death_ms), device.death_covered_ms, Term("death_grace", span_ms=grace_ms))
    sentence = f"its connection ended with a will, and it was not heard again within {format_duration(grace_ms)}"
    rule = case.rule("death_grace", format_duration(grace_ms), own=own)
    return Explanation(
        case.transition, sentence, terms, rule, evidence, _prevented("A signal sent after the will and judged", case)
    )


def _gateway_death(case: _Case) -> Explanation:
    device = case.device
    assert device is not None and device.outage_ms is not None
    grace_ms = case.rules.death_grace_ms
    evidence = (
        *_gateway_rows(case, GatewayEvent.DEATH, device.outage_ms),
        *_last_signals(case),
        *case.gap_rows(device.outage_ms),
    )
    start, limit = Term("death of the gateway", at_ms=device.outage_ms), Term("death_grace", span_ms=grace_ms)
    terms = _deadline(case, start, device.outage_covered_ms, limit)
    sentence = f"its gateway {device.gateway} died and did not return within {format_duration(grace_ms)}"
    rule = case.rule("death_grace", format_duration(grace_ms), own=device.death_grace_ms is not None)
    otherwise = _prevented("A signal of the device or of its gateway", case)
    return Explanation(case.transition, sentence, terms, rule, evidence, otherwise)


def _gateway_return(case: _Case) -> Explanation:
    evidence = _gateway_rows(case, GatewayEvent.RETURN, case.at_ms)
    return Explanation(case.transition, f"its gateway {case.transition.gateway} was heard again", evidence=tuple(evidence))


def _by_row(sentence: Callable[[_Case, Row | None], str], role: str) -> Callable[[_Case], Explanation]:
    """Return an explanation of transitions that one row causes."""

    def explained(case: _Case) -> Explanation:
        row = case.cause()
        evidence = () if row is None else (Evidence(role, row),)
        return Explanation(case.transition, sentence(case, row), evidence=evidence)

    return explained


def _always(sentence: str) -> Callable[[_Case, Row | None], str]:
    return lambda _case, _row: sentence


def _signal(case: _Case, row: Row | None) -> str:
    kind = row.kind if row is not None else "signal"
    article = "an" if kind[0] in "aeiou" else "a"
    before = case.device.last_seen_ms if case.device is not None else None
    after = f", {format_duration(case.at_ms - before)} after the one before" if before is not None else ", the first one"
    return f"{article} {kind} message was received{after}"


def _errors(case: _Case) -> Explanation:
    rules, earlier = case.rules, case.device.error_times_ms if case.device is not None else ()
    times = [at_ms for at_ms in (*earlier, case.at_ms) if case.at_ms - at_ms <= rules.degraded_window_ms]
    rows = case.signals_at(times, [Kind.ERROR])[-rules.degraded_errors :]
    window = format_duration(rules.degraded_window_ms)
    sentence = f"{rules.degraded_errors} errors are within {window}"
    rule = case.rule("degraded", f'errors = {rules.degraded_errors}, window = "{window}"')
    return Explanation(case.transition, sentence, rule=rule, evidence=tuple(Evidence("error", row) for row in rows))


def _recovered(case: _Case) -> Explanation:
    """Explain by the error that completed the count: its policy set the instant at which the count ends."""
    errors = case.errors()
    instants = {at_ms for at_ms, _, _, _ in errors}
    ends = [one for one in errors if case.at_ms - one[3].degraded_window_ms in instants]
    if not ends:  # such as of a device that had another class then
        return Explanation(case.transition, "the errors that degraded it no longer count")
    last_ms, _, dated, rules = ends[-1]
    start_ms, window = case.at_ms - rules.degraded_window_ms, format_duration(rules.degraded_window_ms)
    counted = [row for at_ms, row, _, _ in errors if start_ms <= at_ms <= last_ms]
    terms = (
        Term("oldest error that counted", at_ms=start_ms),
        Term("degraded.window", span_ms=rules.degraded_window_ms),
        Term(f"{case.transition.to_mode}", at_ms=case.at_ms),
    )
    sentence = f"fewer than {rules.degraded_errors} errors are within {window}"
    rule = case.rule("degraded", f'errors = {rules.degraded_errors}, window = "{window}"', dated=dated)
    evidence = tuple(Evidence("error", row) for row in dict.fromkeys(counted))
    otherwise = _prevented("A further error", case) if dated == case.dated else ""
    return Explanation(case.transition, sentence, terms, rule, evidence, otherwise)


def _sent(row: Row) -> tuple[int, int]:
    return min(_possible_ms(row)), row.arrival


def _sequence(case: _Case) -> Explanation:
    rules, last = case.rules, case.cause()
    found: list[Row] = [] if last is None else [last]
    errors = [row for row in case.rows if row.kind is Kind.ERROR and row.device_id == case.transition.device_id]
    for code in reversed(rules.flagged_codes[:-1]):
        earlier = [row for row in errors if row.code == code and found and _sent(row) < _sent(found[0])]
        if not earlier:
            break
        found = [max(earlier, key=_sent), *found]
    window, codes = format_duration(rules.flagged_window_ms), ", ".join(rules.flagged_codes)
    rule = case.rule("flagged", f'codes = [{", ".join(f"{code!r}" for code in rules.flagged_codes)}], window = "{window}"')
    sentence = f"the errors {codes} occurred in this order within {window}"
    evidence = tuple(Evidence("error", row) for row in found)
    return Explanation(case.transition, sentence, rule=rule, evidence=evidence)


def _hold_over(case: _Case) -> Explanation:
    """Explain by the last error of the sequence: its policy set the instant at which the flag ends."""
    ends = [
        one for one in case.errors() if one[0] + one[3].flagged_hold_ms == case.at_ms and one[1].code == one[3].flagged_codes[-1]
    ]
    if not ends:
        return Explanation(case.transition, "the flag ended, and nobody released it")
    start_ms, row, dated, rules = ends[-1]
    hold = format_duration(rules.flagged_hold_ms)
    terms = (
        Term("last error of the flagged sequence", at_ms=start_ms),
        Term("flagged.hold", span_ms=rules.flagged_hold_ms),
        Term(f"{case.transition.to_mode}", at_ms=case.at_ms),
    )
    rule = case.rule("flagged", f'hold = "{hold}"', dated=dated)
    sentence = f"it was flagged for {hold}, and nobody released it"
    evidence = (Evidence("last error of the sequence", row),)
    otherwise = _prevented("The same sequence of errors again", case) if dated == case.dated else ""
    return Explanation(case.transition, sentence, terms, rule, evidence, otherwise)


def _held(case: _Case, row: Row | None) -> str:
    until = row.contents().get("until") if row is not None else None
    ends = f" until {format_instant(until)}" if type(until) is int else ""
    return f"an operator announced {'maintenance' if case.transition.to_mode is Mode.MAINTENANCE else 'an update'}{ends}"


def _until(case: _Case) -> Explanation:
    commands = [row for row in _own_rows(case, Kind.CONTROL) if row.contents().get("until") == case.at_ms]
    terms = (Term("announced end", at_ms=case.at_ms), Term(f"{case.transition.to_mode}", at_ms=case.at_ms))
    evidence = tuple(Evidence("announcement", row) for row in commands[-1:])
    otherwise = _prevented("A later announced end, sent", case)
    return Explanation(case.transition, "the announced end was reached", terms, evidence=evidence, otherwise=otherwise)


def _updated(case: _Case, row: Row | None) -> str:
    device = case.device
    if row is None or device is None:
        return "a signal shows that the update is done"
    if row.firmware is not None and row.firmware != device.firmware and device.firmware is not None:
        return f"a signal shows new firmware: {row.firmware} instead of {device.firmware}"
    return "a signal shows a restart" + (f": boot {row.boot} instead of {device.boot}" if row.boot != device.boot else "")


def _forget(case: _Case) -> Explanation:
    device = case.device
    assert device is not None
    limit_ms = case.rules.forget_after_ms
    rule, limit = case.rule("forget_after", format_duration(limit_ms)), Term("forget_after", span_ms=limit_ms)
    if device.mode is Mode.DECOMMISSIONED:
        rows = [row for row in _own_rows(case, Kind.REGISTRY) if row.contents().get("op") == "decommission"]
        evidence = tuple(Evidence("decommissioned", row) for row in rows[-1:])
        start, late_ms = Term("decommissioned", at_ms=device.mode_since_ms), case.at_ms - device.mode_since_ms - limit_ms
        postponed = (Term(_postponed(case), span_ms=late_ms),) if late_ms else ()
        terms = (start, limit, *postponed, Term("forgotten", at_ms=case.at_ms))
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
        _T.GATEWAY_RETURN: _gateway_return,
        _T.ERRORS: _errors,
        _T.RECOVERED: _recovered,
        _T.SEQUENCE: _sequence,
        _T.RELEASED: _by_row(_always("an operator released it"), "command"),
        _T.HOLD_OVER: _hold_over,
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
