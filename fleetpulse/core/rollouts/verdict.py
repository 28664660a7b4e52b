"""Verdict about a cohort: waiting, passed or stopped, with its arithmetic.

Rule 1: a rate is that of devices which were connected when the cohort started: the share of them that went offline, or had
an error, since then. Another device cannot be lost to the firmware.
Rule 2: the baseline is the rest: devices of the rollout in no started cohort. If fewer than ``least_devices`` of them were
connected, as in the last cohort, it is the cohort itself in an equal time before its start.
Rule 3: rates of fewer than ``least_devices`` devices are no statement: the cohort waits.
Rule 4: a cohort stops as soon as an excess exceeds its bound. It passes only after its soak, and only if ``least_devices``
devices acknowledged the command, where answers are known: firmware that no device took has proved nothing.
Rule 5: time is event time up to the frontier, so that a stream that is behind delays a verdict, and changes none.

Source: ADR 49.
"""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

from fleetpulse.core.rollouts.plan import RolloutPlan
from fleetpulse.core.times import format_duration, format_instant


class Result(StrEnum):
    """Result of a verdict about a cohort; the values are stored."""

    WAITING = "waiting"  # no statement yet
    PASSED = "passed"  # observed for its soak within the bounds
    STOPPED = "stopped"  # a rate exceeds that of the baseline by more than its bound


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of connected devices over a span.

    Attributes:
        devices: number of devices that were connected when the cohort started.
        offline: number of these that went offline in the span.
        errors: number of these that had an error, or became degraded or flagged, in the span.
    """

    devices: int
    offline: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True)
class Answers:
    """Number of devices of a cohort by the status of their command."""

    pending: int = 0
    acknowledged: int = 0
    rejected: int = 0
    timed_out: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """Facts about a started cohort.

    Attributes:
        number: number of the cohort, from 1.
        from_ms: instant since which it is observed, epoch milliseconds; None if its commands are not sent.
        through_ms: event time up to which all verdicts are written, epoch milliseconds; None if unknown.
        cohort: counts of the cohort.
        rest: counts of the devices in no started cohort, over the same span.
        before: counts of the cohort over an equal span before ``from_ms``.
        answers: answers of the cohort; None if the home has no table of commands.
    """

    number: int
    from_ms: int | None
    through_ms: int | None
    cohort: Counts = Counts(0)
    rest: Counts = Counts(0)
    before: Counts = Counts(0)
    answers: Answers | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict about a cohort.

    Attributes:
        result: result.
        reason: arithmetic, or what is missing, for people.
        baseline: ``rest`` or ``before``; None without rates.
        until_ms: event time at which the soak ends, epoch milliseconds; None if it has not begun.
    """

    result: Result
    reason: str
    baseline: str | None = None
    until_ms: int | None = None

    def plain(self) -> dict[str, Any]:
        """Return the verdict as plain values."""
        return {"result": self.result.value, "reason": self.reason, "baseline": self.baseline, "until_ms": self.until_ms}


def judge_cohort(plan: RolloutPlan, seen: Observation) -> Verdict:
    """Return the verdict about a cohort."""
    if seen.from_ms is None:
        return Verdict(Result.WAITING, f"the commands of cohort {seen.number} are not sent yet")
    until_ms = seen.from_ms + plan.soak_ms
    if seen.through_ms is None or seen.through_ms <= seen.from_ms:
        return Verdict(Result.WAITING, f"nothing is judged yet after {format_instant(seen.from_ms)}", None, until_ms)
    if few := _too_few(plan, seen.cohort):
        return Verdict(Result.WAITING, few, None, until_ms)
    baseline, compared = ("rest", seen.rest) if seen.rest.devices >= plan.least_devices else ("before", seen.before)
    rates = [
        _excess("went offline", seen.cohort, seen.cohort.offline, compared, compared.offline, plan.most_offline),
        _excess("had errors", seen.cohort, seen.cohort.errors, compared, compared.errors, plan.most_errors),
    ]
    of_baseline = "the rest" if baseline == "rest" else f"these devices in the {_span(seen)} before"
    exceeded = [rate for rate in rates if rate.excess > rate.bound]
    said = "; ".join(rate.sentence(of_baseline) for rate in exceeded or rates)
    if exceeded:
        return Verdict(Result.STOPPED, f"cohort {seen.number}, observed for {_span(seen)}: {said}", baseline, until_ms)
    if missing := _missing(plan, seen, until_ms):
        return Verdict(Result.WAITING, f"{missing}; so far {said}", baseline, until_ms)
    return Verdict(Result.PASSED, f"cohort {seen.number}, observed for {_span(seen)}: {said}", baseline, until_ms)


@dataclass(frozen=True, slots=True)
class _Excess:
    event: str
    affected: int
    devices: int
    base_affected: int
    base_devices: int
    bound: Fraction

    @property
    def excess(self) -> Fraction:
        """Difference of the rates, percentage points."""
        return _rate(self.affected, self.devices) - _rate(self.base_affected, self.base_devices)

    def sentence(self, of_baseline: str) -> str:
        more = f"{_points(abs(self.excess))} points {'less' if self.excess < 0 else 'more'}"
        is_over = "above" if self.excess > self.bound else "within"
        return (
            f"{_share(self.affected, self.devices)} devices {self.event}, of {of_baseline} "
            f"{_share(self.base_affected, self.base_devices)}: {more}, {is_over} the bound of {_points(self.bound)}"
        )


def _excess(event: str, group: Counts, affected: int, compared: Counts, base: int, bound: Fraction) -> _Excess:
    return _Excess(event, affected, group.devices, base, compared.devices, bound)


def _rate(affected: int, devices: int) -> Fraction:
    return Fraction(100 * affected, devices)


def _share(affected: int, devices: int) -> str:
    return f"{affected:,} of {devices:,} ({_points(_rate(affected, devices))} %)"


def _too_few(plan: RolloutPlan, cohort: Counts) -> str | None:
    if cohort.devices >= plan.least_devices:
        return None
    return (
        f"{cohort.devices:,} devices of the cohort were connected when it started, fewer than least_devices "
        f"({plan.least_devices:,}), so their rates are no statement"
    )


def _missing(plan: RolloutPlan, seen: Observation, until_ms: int) -> str | None:
    """Return what a cohort within its bounds lacks to pass; None if nothing."""
    if seen.through_ms is None or seen.through_ms < until_ms:
        return f"the soak ends at {format_instant(until_ms)}"
    if seen.answers is not None and seen.answers.acknowledged < plan.least_devices:
        return (
            f"{seen.answers.acknowledged:,} devices acknowledged the command, fewer than least_devices "
            f"({plan.least_devices:,}); {seen.answers.rejected:,} rejected it, of {seen.answers.timed_out:,} it timed out"
        )
    return None


def _span(seen: Observation) -> str:
    return format_duration(((seen.through_ms or 0) - (seen.from_ms or 0)) // 1000 * 1000)


def _points(value: Fraction) -> str:
    return f"{float(value):.1f}"
