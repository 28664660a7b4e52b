"""Policy: how much silence and how many errors are tolerated, by device class.

Rule 1: a policy is checked whole, and all its faults are reported at once.
Rule 2: its version is a digest of the normalised policy: the same rules have the same version however they are written.
Rule 3: policies are in effect from an instant on; a later one takes over from its own ``effective_from``.
Rule 4: every key group keeps the policies that may act: their number, their words and their size have a bound.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, cast

from fleetpulse.core.errors import FleetError
from fleetpulse.core.text import MAX_TEXT, as_text
from fleetpulse.core.times import format_duration, parse_duration_ms

MAX_ERRORS: Final = 16  # the most errors that a rule may count: it bounds what is remembered of a device
MAX_SEQUENCE: Final = 8
MAX_AHEAD: Final = 1_000  # policies that are not in force yet: each key group keeps them
MAX_CLASSES: Final = 500  # that a policy lists
MAX_BYTES: Final = 200_000  # of a policy as it is stored: so that it fits into the payload of the message that carries it
DEFAULT_CLASS: Final = "default"
_ADDED: Final = ("gateway_outage_limit_ms", "late_proves_alive")  # rules that the first policies did not have
_SHOWN: Final = 100  # characters of what was got


class PolicyFault(FleetError):
    """A policy with faults; the message lists them all, one a line."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("the policy has faults:\n" + "\n".join(f"  {fault}" for fault in faults), code="policy-faulty")
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Rules:
    """What is tolerated of one class of devices. Durations in milliseconds.

    Attributes:
        timeout_ms: covered time of silence after which a device is offline.
        death_grace_ms: covered time of silence that is left after the will was delivered.
        forget_after_ms: covered time of silence after which a device's state is removed.
        degraded_errors: so many errors ...
        degraded_window_ms: ... within this span of event time degrade a device.
        flagged_codes: an ordered subsequence of error codes ...
        flagged_window_ms: ... first to last within this span of event time flags a device ...
        flagged_hold_ms: ... until an operator releases it, or for so long.
        longest_hold_ms: how far ahead the ``until`` of maintenance or updating may lie.
        last_errors: how many of the last error codes a row shows.
        gateway_outage_limit_ms: covered time after the death of its gateway after which a device is offline.
        late_proves_alive: whether a late signal proves its device alive; None: only if the device delivered it itself.
    """

    timeout_ms: int = 3_600_000
    death_grace_ms: int = 30_000
    forget_after_ms: int = 730 * 86_400_000
    degraded_errors: int = 3
    degraded_window_ms: int = 600_000
    flagged_codes: tuple[str, ...] = ("reconnaissance", "auth_failed", "escalation")
    flagged_window_ms: int = 1_200_000
    flagged_hold_ms: int = 86_400_000
    longest_hold_ms: int = 7 * 86_400_000
    last_errors: int = 5
    gateway_outage_limit_ms: int = 86_400_000
    late_proves_alive: bool | None = None

    def may_hold(self, at_ms: int, until_ms: int) -> bool:
        """Whether a device may be held for maintenance or an update until an instant, when that is said at another."""
        return at_ms < until_ms <= at_ms + self.longest_hold_ms


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of every class.

    Attributes:
        rules: those of a class that is not listed.
        classes: those of the listed classes, complete.
        unknown_devices: "admit" judges a device that nobody registered, "quarantine" lists its messages.
    """

    rules: Rules = field(default_factory=Rules)
    classes: Mapping[str, Rules] = field(default_factory=lambda: MappingProxyType({}))
    unknown_devices: str = "admit"

    def of(self, device_class: str) -> Rules:
        """Return the rules of a class."""
        return self.classes.get(device_class, self.rules)

    def normalised(self) -> dict[str, Any]:
        """Return the policy in the form that is stored: every rule of every class, durations in milliseconds."""
        return {
            "unknown_devices": self.unknown_devices,
            "rules": _plain(self.rules),
            "classes": {name: _plain(self.classes[name]) for name in sorted(self.classes)},
        }

    @property
    def version(self) -> str:
        """Digest of the normalised policy: 16 hexadecimal digits."""
        return blake2b(self._stored(), digest_size=8).hexdigest()

    def _stored(self) -> bytes:
        return json.dumps(self.normalised(), sort_keys=True, separators=(",", ":")).encode()

    def beyond_bounds(self) -> list[str]:
        """Return what is more of it than a key group keeps: a fault each."""
        if len(self.classes) > MAX_CLASSES:  # what is so large is not looked at further
            return [f"a policy lists at most {MAX_CLASSES} classes; got {len(self.classes):,}; let some share one"]
        faults = [
            f"the name of a class has 1 to {MAX_TEXT} printable characters, as devices' classes do; got {_shown(name)!a}, "
            f"which has {len(name):,}"
            for name in self.classes
            if as_text(name) is None
        ]
        if not faults and (size := len(self._stored())) > MAX_BYTES:
            faults = [
                f"a policy has at most {MAX_BYTES:,} bytes as it is stored; got {size:,}; list fewer classes, or shorter codes"
            ]
        return faults


@dataclass(frozen=True, slots=True)
class _Rule:
    """How one rule is written: its table and key in TOML, how its value is read, and whether a stored value may be one."""

    key: str
    read: Callable[[Any], Any]
    fits: Callable[[Any], bool]
    meaning: str


def _duration(least: str, most: str = "3650d") -> tuple[Callable[[Any], int], Callable[[Any], bool]]:
    least_ms, most_ms = parse_duration_ms(least), parse_duration_ms(most)

    def read(value: Any) -> int:
        if not isinstance(value, str):
            raise FleetError(f'must be a duration such as "5m"; got {value!r}', code="policy-duration-invalid")
        if value.startswith("-"):
            raise FleetError(
                f'must not be negative; got "{value}"; write a duration such as "5m"', code="policy-duration-invalid"
            )
        duration_ms = parse_duration_ms(value)
        if not least_ms <= duration_ms <= most_ms:
            raise FleetError(f'must lie between {least} and {most}; got "{value}"', code="policy-value-out-of-range")
        return duration_ms

    return read, lambda value: type(value) is int and least_ms <= value <= most_ms


def _count(least: int, most: int) -> tuple[Callable[[Any], int], Callable[[Any], bool]]:
    def fits(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    def read(value: Any) -> int:
        if not fits(value):
            raise FleetError(f"must be a whole number from {least} to {most}; got {value!r}", code="policy-value-invalid")
        return value

    return read, fits


def _is_choice(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _choice(value: Any) -> bool:
    if not isinstance(value, bool):
        raise FleetError(f"must be true or false; got {value!r}", code="policy-value-invalid")
    return value


def _are_codes(value: Any) -> bool:
    codes = cast("list[Any]", [*value]) if isinstance(value, list | tuple) else []
    return 1 <= len(codes) <= MAX_SEQUENCE and all(as_text(code) is not None for code in codes)


def _codes(value: Any) -> tuple[str, ...]:
    if not _are_codes(value):
        rule = (
            f"must be a list of 1 to {MAX_SEQUENCE} error codes, each of 1 to {MAX_TEXT} printable characters, as they are sent"
        )
        raise FleetError(f"{rule}; got {_shown(value)}", code="policy-value-invalid")
    return tuple(value)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


RULES: Final[Mapping[str, _Rule]] = MappingProxyType(
    {
        "timeout_ms": _Rule("timeout", *_duration("1s"), "silence, while we listened, after which a device is offline"),
        "death_grace_ms": _Rule("death_grace", *_duration("0s"), "what is left of it when the device's will was delivered"),
        "forget_after_ms": _Rule("forget_after", *_duration("1s"), "silence after which it is removed, with a row that says so"),
        "degraded_errors": _Rule("degraded.errors", *_count(1, MAX_ERRORS), "so many errors ..."),
        "degraded_window_ms": _Rule(
            "degraded.window",
            *_duration("1s", "30d"),
            "... in this span degrade a device, until fewer lie in it",
        ),
        "flagged_codes": _Rule("flagged.codes", _codes, _are_codes, "error codes that, one after the other, ..."),
        "flagged_window_ms": _Rule("flagged.window", *_duration("1s", "30d"), "... within this span flag a device, ..."),
        "flagged_hold_ms": _Rule("flagged.hold", *_duration("1s", "365d"), "... until an operator releases it, or for so long"),
        "longest_hold_ms": _Rule("longest_hold", *_duration("1s", "365d"), "the longest maintenance or update to be announced"),
        "last_errors": _Rule("last_errors", *_count(0, MAX_ERRORS), "how many of the last error codes a row shows"),
        "gateway_outage_limit_ms": _Rule(
            "gateway_outage_limit",
            *_duration("1s", "365d"),
            "covered time after the death of its gateway after which a device is offline",
        ),
        "late_proves_alive": _Rule(
            "late_proves_alive",
            _choice,
            _is_choice,
            "whether a late signal proves its device alive; without it, only one that the device delivered itself does",
        ),
    }
)


def parse_policy(content: Mapping[str, Any]) -> Policy:
    """Read a policy as a person writes it: TOML tables, durations such as "60m".

    Args:
        content: keys ``unknown_devices``, ``rules`` (table) and ``classes`` (table of tables that say only what differs).

    Raises:
        PolicyFault: with all faults, each saying where, the rule and what was got.
    """
    faults: list[str] = []
    for key in content.keys() - {"unknown_devices", "rules", "classes"}:
        faults.append(f'"{key}" is not known; there are unknown_devices, [rules] and [classes.NAME]')
    unknown = content.get("unknown_devices", "admit")
    if unknown not in ("admit", "quarantine"):
        faults.append(f'unknown_devices must be "admit" or "quarantine"; got {unknown!r}')
    rules = _read_rules(Rules(), "rules", content.get("rules", {}), faults)
    classes: dict[str, Rules] = {}
    listed = content.get("classes", {})
    if not isinstance(listed, Mapping):
        faults.append("classes must be tables: [classes.NAME]")
        listed = {}
    for name, table in cast("Mapping[str, Any]", listed).items():
        classes[name] = _read_rules(rules, f"classes.{name}", table, faults)
    policy = Policy(rules, MappingProxyType(classes), cast("str", unknown))
    faults += policy.beyond_bounds()
    if faults:
        raise PolicyFault(sorted(faults))
    return policy


def _read_rules(base: Rules, where: str, table: Any, faults: list[str]) -> Rules:
    if not isinstance(table, Mapping):
        faults.append(f"[{where}] must be a table; got {table!r}")
        return base
    given = dict(_flat(cast("Mapping[str, Any]", table)))
    values: dict[str, Any] = {}
    for name, rule in RULES.items():
        if rule.key in given:
            try:
                values[name] = rule.read(given.pop(rule.key))
            except FleetError as error:
                faults.append(f"{where}.{rule.key} {error}")
    known = ", ".join(rule.key for rule in RULES.values())
    faults.extend(f'"{where}.{key}" is not known; there are {known}' for key in given)
    rules = replace(base, **values)
    if rules.forget_after_ms <= rules.timeout_ms:
        faults.append(
            f"{where}.forget_after must be longer than timeout ({format_duration(rules.timeout_ms)}); "
            f"got {format_duration(rules.forget_after_ms)}"
        )
    return rules


def _flat(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", leaf) for inner, leaf in cast("Mapping[str, Any]", value).items())
        else:
            yield key, value


def _plain(rules: Rules) -> dict[str, Any]:
    values: dict[str, Any] = {item.name: getattr(rules, item.name) for item in fields(rules)}
    for item in fields(rules):
        if item.name in _ADDED and values[item.name] == item.default:
            del values[item.name]  # so that a policy which does not set it keeps its version
    return values | {"flagged_codes": list(rules.flagged_codes)}


def from_normalised(content: Mapping[str, Any]) -> Policy:
    """Read a policy as it is stored; the inverse of `Policy.normalised`.

    Raises:
        PolicyFault: it is not one, or of a form that this version does not know.
    """
    try:
        classes = {name: _rules(values) for name, values in content["classes"].items()}
        return Policy(_rules(content["rules"]), MappingProxyType(classes), content["unknown_devices"])
    except (KeyError, TypeError, AttributeError) as error:
        raise PolicyFault([f"not a stored policy of this version: {error!r}"]) from None


def from_row(content: Any) -> Policy:
    """Read a policy that a row carries: a recording's may be anything, and what is in force is calculated with.

    Raises:
        PolicyFault: it is not one that `parse_policy` could have made.
    """
    if not isinstance(content, Mapping):
        raise PolicyFault(["not a stored policy of this version: it is no object"])
    policy = from_normalised(cast("Mapping[str, Any]", content))
    faults = [] if policy.unknown_devices in ("admit", "quarantine") else ["unknown_devices is neither admit nor quarantine"]
    for where, rules in (("rules", policy.rules), *((f"classes.{name}", rules) for name, rules in policy.classes.items())):
        misfits = [rule.key for name, rule in RULES.items() if not rule.fits(getattr(rules, name))]
        faults += [f"{where}.{key} is beyond what it may be" for key in misfits]
        if not misfits and rules.forget_after_ms <= rules.timeout_ms:
            faults.append(f"{where}.forget_after must be longer than timeout")
    if faults := faults or policy.beyond_bounds():
        raise PolicyFault(faults)
    return policy


def _rules(values: Mapping[str, Any]) -> Rules:
    stored: dict[str, Any] = {**values, "flagged_codes": tuple(values["flagged_codes"])}
    return Rules(**stored)


@dataclass(frozen=True, slots=True, order=True)
class Dated:
    """A policy and from when it is in effect; of two from the same instant, the one received later counts."""

    effective_from_ms: int
    received_at_ms: int
    version: str
    policy: Policy = field(compare=False)


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies in the order in which they take effect; before the first, the built-in one."""

    dated: tuple[Dated, ...] = (Dated(-1, -1, "", Policy()),)

    def including(self, dated: Dated) -> "Policies":
        """Return the policies with one more."""
        return Policies(tuple(sorted({*self.dated, dated})))

    def after(self, instant_ms: int | None) -> int:
        """Return how many take effect after an instant; all but the built-in one where that is None."""
        after_ms = -1 if instant_ms is None else instant_ms
        return sum(one.effective_from_ms > after_ms for one in self.dated)

    def at(self, instant_ms: int) -> Dated:
        """Return the policy in force at an instant; its own first instant is included."""
        for dated in reversed(self.dated):
            if dated.effective_from_ms <= instant_ms:
                return dated
        return self.dated[0]

    def spans(self, since_ms: int) -> Iterator[tuple[Dated, int, int | None]]:
        """Yield each policy in force at or after ``since_ms`` with the first and the end of its span (None: no end)."""
        for index, dated in enumerate(self.dated):
            end = self.dated[index + 1].effective_from_ms if index + 1 < len(self.dated) else None
            if end is None or end > since_ms:
                yield dated, dated.effective_from_ms, end

    def with_past(self, said: "Policies") -> "Policies":
        """Return these, of which those whose time is over were dropped, and before them such of ``said``."""
        first_ms = self.dated[0].effective_from_ms
        return Policies((*(one for one in said.dated if one.effective_from_ms < first_ms), *self.dated))

    def pruned(self, frontier_ms: int | None) -> "Policies":
        """Drop the policies whose span ended at or before the frontier."""
        if frontier_ms is None or len(self.dated) == 1:
            return self
        return Policies(tuple(dated for dated, _, _ in self.spans(frontier_ms)))
