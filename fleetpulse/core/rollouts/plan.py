"""Plan of a firmware rollout: its devices, cohorts and bounds.

Rule: a plan is checked completely before a device gets a command; all faults are reported at once.

Source: ADR 49.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from hashlib import blake2b
from typing import Any, Final, cast

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.text import MAX_TEXT, as_text
from fleetpulse.core.operations.device_filter import DeviceFilter, parse_device_filter
from fleetpulse.core.times import DAY_MS, format_duration, parse_duration_ms

MAX_COHORTS: Final = 10
LONGEST_SOAK_MS: Final = 30 * DAY_MS
SCOPED: Final = ("device_id", "site", "device_class", "gateway", "mode", "mode_since", "last_seen", "runtime_ms", "firmware")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # part of a path
_KEYS: Final = ("name", "version", "scope", "cohorts", "soak", "flash", "least_devices", "bounds")
_BOUNDS: Final = ("offline", "errors")
_DEFAULTS: Final[Mapping[str, Any]] = {"cohorts": [10, 50, 100], "flash": "5m", "least_devices": 20, "bounds": {}}
_DEFAULT_BOUND: Final = 5


class RolloutPlanFault(FleetError):
    """Invalid plan; the message lists all faults, one a line."""

    def __init__(self, faults: list[str]) -> None:
        listed = "\n".join(f"  {fault}" for fault in faults)
        super().__init__(f"the plan of the rollout has faults:\n{listed}", code="rollout-plan-faulty")
        self.faults = faults


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Checked plan of a rollout.

    Attributes:
        name: name of the rollout, unique in a home; it decides the cohort of each device.
        version: firmware version that the devices get.
        scope: filter of the devices, over the columns `SCOPED`.
        cohorts: share of the devices that have the version after each cohort, per cent; increasing, the last is 100.
        soak_ms: event time for which a cohort is observed, milliseconds.
        flash_ms: time that a device may be silent while it installs the version, milliseconds.
        least_devices: least number of devices about which a rate is a statement.
        most_offline: greatest excess of the rate of devices that went offline, percentage points.
        most_errors: greatest excess of the rate of devices with errors, percentage points.
    """

    name: str
    version: str
    scope: DeviceFilter
    cohorts: tuple[int, ...]
    soak_ms: int
    flash_ms: int
    least_devices: int
    most_offline: Fraction
    most_errors: Fraction

    def content(self) -> dict[str, Any]:
        """Return the plan as the content of a file; the inverse of `parse_rollout_plan`."""
        return {
            "name": self.name,
            "version": self.version,
            "scope": self.scope.text,
            "cohorts": list(self.cohorts),
            "soak": format_duration(self.soak_ms),
            "flash": format_duration(self.flash_ms),
            "least_devices": self.least_devices,
            "bounds": {"offline": float(self.most_offline), "errors": float(self.most_errors)},
        }

    @property
    def digest(self) -> str:
        """Digest of the plan, which distinguishes it from other plans of its name."""
        return blake2b(json.dumps(self.content(), sort_keys=True).encode(), digest_size=6).hexdigest()


def parse_rollout_plan(content: Mapping[str, Any]) -> RolloutPlan:
    """Parse the content of a plan file: TOML keys, durations such as "30m".

    Args:
        content: keys ``name``, ``version``, ``scope``, ``soak``, and optionally ``cohorts``, ``flash``,
            ``least_devices`` and ``bounds`` (a table with ``offline`` and ``errors``).

    Raises:
        RolloutPlanFault: an invalid plan; each fault names the key, the rule and the value found.
    """
    faults = [f'"{key}" is unknown; use one of {", ".join(_KEYS)}' for key in content if key not in _KEYS]
    values = {**_DEFAULTS, **content}
    bounds = values["bounds"]
    if not isinstance(bounds, Mapping):
        faults.append(f"[bounds] must be a table; got {bounds!r}")
        bounds = {}
    bounds = cast("Mapping[str, Any]", bounds)
    faults += [f'"bounds.{key}" is unknown; use one of {", ".join(_BOUNDS)}' for key in bounds if key not in _BOUNDS]
    values |= {f"bounds.{key}": bounds.get(key, _DEFAULT_BOUND) for key in _BOUNDS}
    read: dict[str, Any] = {}
    for key, reader in _READERS.items():
        if key not in values:
            faults.append(f"{key} is missing; {_EXAMPLES[key]}")
            continue
        try:
            read[key] = reader(values[key])
        except FleetError as fault:
            faults.append(f"{key} {fault}")
    if faults:
        raise RolloutPlanFault(sorted(faults))
    return RolloutPlan(
        read["name"],
        read["version"],
        read["scope"],
        read["cohorts"],
        read["soak"],
        read["flash"],
        read["least_devices"],
        read["bounds.offline"],
        read["bounds.errors"],
    )


def _fault(text: str) -> FleetError:
    return FleetError(text, code="rollout-plan-faulty")


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        rule = "must have 1 to 64 lower-case letters, digits, dots, hyphens or underscores, and begin with a letter or digit"
        raise _fault(f"{rule}; got {value!r}")
    return value


def _version(value: Any) -> str:
    if (text := as_text(value)) is None:
        raise _fault(f"must be a text of 1 to {MAX_TEXT} printable characters; got {value!r}")
    return text


def _scope(value: Any) -> DeviceFilter:
    if not isinstance(value, str):
        raise _fault(f"must be a filter of devices, TRUE for all; got {value!r}")
    return parse_device_filter(value)


def _cohorts(value: Any) -> tuple[int, ...]:
    shares = cast("list[Any]", [*value]) if isinstance(value, list | tuple) else []
    whole = all(type(share) is int and 1 <= share <= 100 for share in shares)
    if not whole or not 1 <= len(shares) <= MAX_COHORTS or shares != sorted(set(shares)) or shares[-1] != 100:
        rule = f"must be 1 to {MAX_COHORTS} increasing whole numbers of per cent, the last of them 100"
        raise _fault(f"{rule}; got {value!r}; write such as [10, 50, 100]")
    return tuple(shares)


def _duration(least_ms: int, most_ms: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, str):
            raise _fault(f'must be a duration such as "30m"; got {value!r}')
        duration_ms = parse_duration_ms(value)
        if not least_ms <= duration_ms <= most_ms:
            raise _fault(f'must lie between {format_duration(least_ms)} and {format_duration(most_ms)}; got "{value}"')
        return duration_ms

    return read


def _least_devices(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= 1_000_000:
        raise _fault(f"must be a whole number from 1 to 1,000,000; got {value!r}")
    return value


def _points(value: Any) -> Fraction:
    if type(value) not in (int, float) or not 0 <= value < 100:  # a float that is no number is not in this range
        raise _fault(f"must be a number of percentage points from 0 to below 100; got {value!r}")
    return Fraction(Decimal(str(value)))


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "name": _name,
    "version": _version,
    "scope": _scope,
    "cohorts": _cohorts,
    "soak": _duration(1_000, LONGEST_SOAK_MS),
    "flash": _duration(1_000, DAY_MS),
    "least_devices": _least_devices,
    "bounds.offline": _points,
    "bounds.errors": _points,
}
_EXAMPLES: Final = {
    "name": 'name the rollout, such as "pumps-2.4.1"',
    "version": "name the firmware version that the devices get",
    "scope": 'filter the devices, such as "device_class = \'pump\'", or use "TRUE" for all',
    "soak": 'write how long a cohort is observed, such as "2h"',
}
