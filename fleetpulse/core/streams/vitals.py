"""Vitals in a policy: metrics, their windows, and their bounds.

Rule 1: windows begin at multiples of their slide since 1970 (UTC). A window contains its start, and not its end.
Rule 2: a policy counts for the values after its receipt whose presence time lies at or after its
``effective_from``, so that a value is never counted again by a later policy.
Rule 3: the vitals of a policy are in its stored form only if it has some.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.text import MAX_TEXT, as_text
from fleetpulse.core.times import DAY_MS, format_duration, parse_duration_ms

MAX_METRICS: Final = 20
MAX_WINDOWS: Final = 4  # distinct windows and slides of a policy
MAX_OVERLAP: Final = 12  # windows that contain one value
WINDOW_MS: Final = range(1_000, DAY_MS + 1)
FOR_MS: Final = range(1_000, 30 * DAY_MS + 1)
VITAL_KEYS: Final = (  # key, default, meaning; the reference of the policy is generated from them
    ("window", "required", "width of a window, from 1s to 1d"),
    ("slide", "the window", f"distance between the starts of two windows; divides the window into at most {MAX_OVERLAP} parts"),
    ("below", "none", "bound: it is broken while all values of the device lie below it"),
    ("above", "none", "bound: it is broken while all values of the device lie above it; a metric has one bound at most"),
    ("for", "the window", "time for which the bound must be broken before an alarm, at most 30d"),
)
_DURATIONS: Final = {"window": "window_ms", "slide": "slide_ms", "for": "for_ms"}
_BOUNDS: Final = ("below", "above")
_KEYS: Final = (*_DURATIONS, *_BOUNDS)
_SHOWN: Final = 100  # characters of an invalid value in a message


@dataclass(frozen=True, slots=True)
class Vital:
    """Windows of one metric, and its bound. Durations in milliseconds.

    Attributes:
        window_ms: width of a window.
        slide_ms: distance between the starts of two windows; equal to the width for windows without overlap.
        below: the bound is broken while all values lie below it; None: no such bound.
        above: the bound is broken while all values lie above it; None: no such bound.
        for_ms: time for which a bound must be broken before an alarm; None without a bound.
    """

    window_ms: int
    slide_ms: int
    below: float | None = None
    above: float | None = None
    for_ms: int | None = None

    @property
    def has_bound(self) -> bool:
        """Whether the metric has a bound."""
        return self.below is not None or self.above is not None

    @property
    def bound_windows(self) -> int:
        """Number of consecutive windows that cover ``for_ms``."""
        assert self.for_ms is not None, "a bound has a time"
        return -(-(self.for_ms - self.window_ms) // self.slide_ms) + 1

    def described(self) -> str:
        """Describe the windows and the bound for people."""
        text = f"window {format_duration(self.window_ms)}"
        if self.slide_ms != self.window_ms:
            text += f", slide {format_duration(self.slide_ms)}"
        if self.for_ms is not None:
            bound = f"above {self.above:g}" if self.below is None else f"below {self.below:g}"
            text += f", {bound} for {format_duration(self.for_ms)}"
        return text

    def stored(self) -> dict[str, Any]:
        """Return the stored form, without the bounds that are not set."""
        bounds = {"below": self.below, "above": self.above, "for_ms": self.for_ms}
        return {"window_ms": self.window_ms, "slide_ms": self.slide_ms} | {
            name: value for name, value in bounds.items() if value is not None
        }


Vitals = Mapping[str, Vital]  # by metric


@dataclass(frozen=True, slots=True)
class VitalsSpan:
    """Vitals from an instant on, until those of the next span.

    Attributes:
        from_ms: first presence time for which they count, epoch milliseconds.
        vitals: vitals by metric.
    """

    from_ms: int
    vitals: Vitals


def spans_of(dated: Iterable[tuple[int, int, Vitals]]) -> tuple[VitalsSpan, ...]:
    """Return the spans of policies, without those that change no vitals.

    Args:
        dated: ``effective_from`` and ``received_at`` of each policy, epoch milliseconds, and its vitals.
    """
    spans: list[VitalsSpan] = []
    newest = (-1, -1)
    for from_ms, effective_ms, received_ms, vitals in sorted(
        ((max(effective_ms, received_ms + 1), effective_ms, received_ms, vitals) for effective_ms, received_ms, vitals in dated),
        key=lambda one: one[:3],
    ):
        if (effective_ms, received_ms) < newest:
            continue  # received later than the policy in force, but in force before it
        newest = effective_ms, received_ms
        if spans and spans[-1].from_ms == from_ms:
            del spans[-1]
        if vitals != (spans[-1].vitals if spans else {}):
            spans.append(VitalsSpan(from_ms, vitals))
    return tuple(spans)


def parse_vitals(content: Any, faults: list[str]) -> dict[str, Vital]:
    """Parse the table ``[vitals]`` of a policy file.

    Args:
        content: tables by metric.
        faults: list to which faults are added.
    """
    if not isinstance(content, Mapping):
        faults.append("vitals must be tables: [vitals.METRIC]")
        return {}
    found: dict[str, Vital] = {}
    for metric, table in cast("Mapping[str, Any]", content).items():
        if not isinstance(table, Mapping):
            faults.append(f"[vitals.{metric}] must be a table; got {table!r}")
        elif vital := _vital(metric, cast("Mapping[str, Any]", table), faults):
            found[metric] = vital
    return found


def _vital(metric: str, table: Mapping[str, Any], faults: list[str]) -> Vital | None:
    where, before = f"vitals.{metric}", len(faults)
    faults.extend(f'"{where}.{key}" is unknown; use one of {", ".join(_KEYS)}' for key in table if key not in _KEYS)
    values: dict[str, Any] = {key: table[key] for key in _BOUNDS if key in table}
    for key, name in _DURATIONS.items():
        if key in table:
            try:
                values[name] = parse_duration_ms(table[key]) if isinstance(table[key], str) else None
            except FleetError:
                values[name] = None
            if values[name] is None:
                faults.append(f'{where}.{key} must be a duration such as "10m"; got {table[key]!r}')
    if "window" not in table:
        faults.append(f'{where}.window is missing; add a duration such as "10m"')
    if len(faults) > before:
        return None
    values.setdefault("slide_ms", values["window_ms"])
    if any(key in table for key in _BOUNDS):
        values.setdefault("for_ms", values["window_ms"])
    return Vital(**values)


def stored_vitals(vitals: Vitals) -> dict[str, Any]:
    """Return the stored form of vitals."""
    return {metric: vitals[metric].stored() for metric in sorted(vitals)}


def vitals_from_stored(content: Mapping[str, Any]) -> dict[str, Vital]:
    """Parse stored vitals; the inverse of `stored_vitals`.

    Raises:
        TypeError: not stored vitals.
    """
    return {metric: Vital(**values) for metric, values in content.items()}


def faults_of(vitals: Vitals) -> list[str]:
    """Return a fault for each bound that vitals exceed."""
    if len(vitals) > MAX_METRICS:
        return [f"a policy can have vitals of at most {MAX_METRICS} metrics; got {len(vitals):,}"]
    if faults := [fault for metric, vital in vitals.items() for fault in _faults(metric, vital)]:
        return faults  # a faulty window can have any type
    windows = {(vital.window_ms, vital.slide_ms) for vital in vitals.values()}
    if len(windows) > MAX_WINDOWS:
        return [f"the vitals of a policy can have at most {MAX_WINDOWS} windows and slides; got {len(windows)}"]
    return []


def _faults(metric: str, vital: Vital) -> list[str]:
    if as_text(metric) is None:
        return [f"the name of a metric must have 1 to {MAX_TEXT} printable characters; got {metric[:100]!a}"]
    where, window_ms, slide_ms = f"vitals.{metric}", cast("Any", vital.window_ms), cast("Any", vital.slide_ms)
    if type(window_ms) is not int or window_ms not in WINDOW_MS:
        return [f"{where}.window must lie between 1s and 1d; got {_shown(window_ms)}"]
    if type(slide_ms) is not int or not 0 < slide_ms <= window_ms or window_ms % slide_ms or window_ms > slide_ms * MAX_OVERLAP:
        rule = f"{where}.slide must divide the window ({format_duration(window_ms)}) into at most {MAX_OVERLAP} parts"
        return [f"{rule}; got {_shown(slide_ms)}"]
    return _bound_faults(where, vital)


def _bound_faults(where: str, vital: Vital) -> list[str]:
    bounds = [cast("Any", bound) for bound in (vital.below, vital.above) if bound is not None]
    if len(bounds) > 1:
        return [f"{where} can have below or above; got both"]
    if not bounds:
        return [] if vital.for_ms is None else [f"{where}.for needs below or above"]
    if not _is_double(bounds[0]):
        return [f"the bound of {where} must be a number between -1.8e308 and 1.8e308; got {bounds[0]!r:.{_SHOWN}}"]
    for_ms = cast("Any", vital.for_ms)
    if type(for_ms) is not int or for_ms not in FOR_MS or for_ms < vital.window_ms:
        return [f"{where}.for must lie between the window ({format_duration(vital.window_ms)}) and 30d; got {_shown(for_ms)}"]
    return []


def _is_double(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # of an int; a float beyond the range is infinite
        return False


def _shown(duration_ms: Any) -> str:
    return (format_duration(duration_ms) if type(duration_ms) is int else repr(duration_ms))[:_SHOWN]
