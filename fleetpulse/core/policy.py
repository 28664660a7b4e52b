"""Policy: rules for silence and errors by device class, and their validity.

Rule 1: a policy is checked completely, and all its faults are reported at once.
Rule 2: the version is a digest of the normalised policy, so spelling does not change the version.
Rule 3: a policy is in force from its ``effective_from`` until that of the next policy.
Rule 4: every key group keeps the policies that may still apply, so their number, texts and sizes
have bounds.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, cast

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.text import MAX_TEXT, as_text
from fleetpulse.core.streams.vitals import Vital, faults_of, parse_vitals, stored_vitals, vitals_from_stored
from fleetpulse.core.times import DAY_MS, HOUR_MS, format_duration, parse_duration_ms

MAX_ERRORS: Final = 16  # most errors that a rule may count: it bounds the state of a device
MAX_SEQUENCE: Final = 8
MAX_AHEAD: Final = 1_000  # policies that are not in force yet; each key group keeps them
MAX_CLASSES: Final = 500  # classes in a policy
MAX_BYTES: Final = 200_000  # of a stored policy: it must fit into the payload of one message
DEFAULT_CLASS: Final = "default"
MAX_EVENTS: Final = 1_000  # events of a session that a velocity rule may count
EVENT_KINDS: Final = ("birth", "error", "heartbeat", "telemetry")  # kinds of messages that a velocity rule may count
_ADDED: Final = (  # rules that the first version of policies did not have
    "gateway_outage_limit_ms", "late_proves_alive", "session_idle_ms", "velocity_events", "velocity_kind", "velocity_code",
    "velocity_hold_ms",
)  # fmt: skip
_SHOWN: Final = 100  # characters of an invalid value in a message


class PolicyFault(FleetError):
    """Invalid policy; the message lists all faults, one a line."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("the policy has faults:\n" + "\n".join(f"  {fault}" for fault in faults), code="policy-faulty")
        self.faults = faults


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of one class of devices. Durations in milliseconds.

    Attributes:
        timeout_ms: covered time of silence after which a device is offline.
        death_grace_ms: grace period: covered time from a will until the device is offline.
        forget_after_ms: covered time of silence after which the state of a device is removed.
        degraded_errors: number of errors within ``degraded_window_ms`` that degrade a device.
        degraded_window_ms: span of event time in which errors count for ``degraded_errors``.
        flagged_codes: error codes that flag a device if they occur in this order; other codes may
            occur in between.
        flagged_window_ms: longest span of event time from the first of these codes to the last.
        flagged_hold_ms: span of event time after which the flag ends, unless an operator releases
            it.
        longest_hold_ms: longest maintenance or update that an operator can announce.
        last_errors: number of the last error codes that a transition shows.
        gateway_outage_limit_ms: covered time after the death of its gateway after which a device is
            offline.
        late_proves_alive: whether a late signal proves its device alive; None: only if the device
            delivered it itself.
        session_idle_ms: longest span of event time between two signals of one session.
        velocity_events: number of events within a session that hold a device for review; None: the
            rule is off.
        velocity_kind: kind of the messages that are events, one of `EVENT_KINDS`.
        velocity_code: code of the errors that are events; None: any. It has no effect on other kinds.
        velocity_hold_ms: span of event time after which the flag for review ends.
    """

    timeout_ms: int = HOUR_MS
    death_grace_ms: int = 30_000
    forget_after_ms: int = 730 * DAY_MS
    degraded_errors: int = 3
    degraded_window_ms: int = 600_000
    flagged_codes: tuple[str, ...] = ("reconnaissance", "auth_failed", "escalation")
    flagged_window_ms: int = 1_200_000
    flagged_hold_ms: int = DAY_MS
    longest_hold_ms: int = 7 * DAY_MS
    last_errors: int = 5
    gateway_outage_limit_ms: int = DAY_MS
    late_proves_alive: bool | None = None
    session_idle_ms: int = 1_800_000
    velocity_events: int | None = None
    velocity_kind: str = "error"
    velocity_code: str | None = None
    velocity_hold_ms: int = DAY_MS

    def may_hold(self, at_ms: int, until_ms: int) -> bool:
        """Whether a command at an instant may hold a device until another instant."""
        return at_ms < until_ms <= at_ms + self.longest_hold_ms

    def is_event(self, kind: str, code: str) -> bool:
        """Whether a message of this kind and error code is an event of the velocity rule; never if the rule is off."""
        if self.velocity_events is None or kind != self.velocity_kind:
            return False
        return kind != "error" or self.velocity_code in (None, code)


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of every class.

    Attributes:
        rules: rules of classes that are not listed.
        classes: rules of the listed classes, each complete.
        unknown_devices: "admit" judges devices that are not registered, "quarantine" lists their
            messages.
        vitals: windows and bounds of metrics, by metric.
    """

    rules: Rules = field(default_factory=Rules)
    classes: Mapping[str, Rules] = field(default_factory=lambda: MappingProxyType({}))
    unknown_devices: str = "admit"
    vitals: Mapping[str, Vital] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, device_class: str) -> Rules:
        """Return the rules of a class."""
        return self.classes.get(device_class, self.rules)

    @property
    def has_late_rules(self) -> bool:
        """Whether ``late_proves_alive`` is set for some class."""
        return any(rules.late_proves_alive is not None for rules in (self.rules, *self.classes.values()))

    def normalised(self) -> dict[str, Any]:
        """Return the stored form: every rule of every class, durations in milliseconds."""
        return {
            "unknown_devices": self.unknown_devices,
            "rules": _plain(self.rules),
            "classes": {name: _plain(self.classes[name]) for name in sorted(self.classes)},
            **({"vitals": stored_vitals(self.vitals)} if self.vitals else {}),
        }

    @property
    def version(self) -> str:
        """Digest of the normalised policy: 16 hexadecimal digits."""
        return blake2b(self._stored(), digest_size=8).hexdigest()

    def _stored(self) -> bytes:
        return json.dumps(self.normalised(), sort_keys=True, separators=(",", ":")).encode()

    def beyond_bounds(self) -> list[str]:
        """Return a fault for each bound that the policy exceeds."""
        if len(self.classes) > MAX_CLASSES:  # a policy this large is not checked further
            return [f"a policy can have at most {MAX_CLASSES} classes; got {len(self.classes):,}; let devices share some"]
        faults = [
            f"the name of a class must have 1 to {MAX_TEXT} printable characters; got {_shown(name)!a} with {len(name):,}"
            for name in self.classes
            if as_text(name) is None
        ]
        faults += faults_of(self.vitals)
        if not faults and (size := len(self._stored())) > MAX_BYTES:
            faults = [
                f"a policy can have at most {MAX_BYTES:,} bytes in its stored form; got {size:,}; list fewer classes or "
                f"shorter codes"
            ]
        return faults


@dataclass(frozen=True, slots=True)
class _Rule:
    """Definition of one rule: key in TOML, parser, check of stored values, meaning."""

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
        rule = f"must be a list of 1 to {MAX_SEQUENCE} error codes, each with 1 to {MAX_TEXT} printable characters"
        raise FleetError(f"{rule}; got {_shown(value)}", code="policy-value-invalid")
    return tuple(value)


def _is_event_count(value: Any) -> bool:
    return value is None or (type(value) is int and 1 <= value <= MAX_EVENTS)


def _event_count(value: Any) -> int | None:
    if type(value) is not int or not 0 <= value <= MAX_EVENTS:
        raise FleetError(
            f"must be a whole number from 1 to {MAX_EVENTS}, or 0 to switch the rule off; got {value!r}",
            code="policy-value-invalid",
        )
    return value or None


def _is_event_kind(value: Any) -> bool:
    return isinstance(value, str) and value in EVENT_KINDS


def _event_kind(value: Any) -> str:
    if not _is_event_kind(value):
        raise FleetError(f"must be one of {', '.join(EVENT_KINDS)}; got {_shown(value)}", code="policy-value-invalid")
    return value


def _is_code(value: Any) -> bool:
    return value is None or as_text(value) is not None


def _code(value: Any) -> str:
    if as_text(value) is None:
        raise FleetError(
            f"must be an error code with 1 to {MAX_TEXT} printable characters; got {_shown(value)}", code="policy-value-invalid"
        )
    return value


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


RULES: Final[Mapping[str, _Rule]] = MappingProxyType(
    {
        "timeout_ms": _Rule("timeout", *_duration("1s"), "silence (covered time) after which a device is offline"),
        "death_grace_ms": _Rule(
            "death_grace", *_duration("0s"), "grace period: covered time from a will until the device is offline"
        ),
        "forget_after_ms": _Rule("forget_after", *_duration("1s"), "silence after which a device is forgotten; a row reports it"),
        "degraded_errors": _Rule(
            "degraded.errors", *_count(1, MAX_ERRORS), "number of errors in the window that degrade a device"
        ),
        "degraded_window_ms": _Rule(
            "degraded.window",
            *_duration("1s", "30d"),
            "the window: span of event time; a device recovers when fewer errors are in it",
        ),
        "flagged_codes": _Rule(
            "flagged.codes", _codes, _are_codes, "error codes that flag a device when they occur in this order"
        ),
        "flagged_window_ms": _Rule(
            "flagged.window", *_duration("1s", "30d"), "longest span from the first of these codes to the last"
        ),
        "flagged_hold_ms": _Rule(
            "flagged.hold", *_duration("1s", "365d"), "span after which a flag ends, unless an operator releases it before"
        ),
        "longest_hold_ms": _Rule("longest_hold", *_duration("1s", "365d"), "longest maintenance or update that can be announced"),
        "last_errors": _Rule("last_errors", *_count(0, MAX_ERRORS), "number of the last error codes that a transition shows"),
        "gateway_outage_limit_ms": _Rule(
            "gateway_outage_limit",
            *_duration("1s", "365d"),
            "covered time after the death of its gateway after which a device is offline",
        ),
        "late_proves_alive": _Rule(
            "late_proves_alive",
            _choice,
            _is_choice,
            "whether a late signal proves its device alive; if not set, only a signal that the device delivered itself does",
        ),
        "session_idle_ms": _Rule(
            "session.idle", *_duration("1s", "30d"), "longest span of event time between two signals of one session"
        ),
        "velocity_events": _Rule(
            "velocity.events",
            _event_count,
            _is_event_count,
            "number of events within a session that hold a device for review; not set, or 0: the rule is off",
        ),
        "velocity_kind": _Rule(
            "velocity.kind", _event_kind, _is_event_kind, f"kind of the messages that are events: {', '.join(EVENT_KINDS)}"
        ),
        "velocity_code": _Rule(
            "velocity.code",
            _code,
            _is_code,
            "code of the errors that are events, `vital:METRIC` for alarms of a metric; if not set, every error is one",
        ),
        "velocity_hold_ms": _Rule(
            "velocity.hold",
            *_duration("1s", "365d"),
            "span after which the flag for review ends, unless an operator releases or confirms it before",
        ),
    }
)


def parse_policy(content: Mapping[str, Any]) -> Policy:
    """Parse the content of a policy file: TOML tables, durations such as "60m".

    Args:
        content: keys ``unknown_devices``, ``rules`` (table), ``classes`` (table of tables with the
            rules that differ from ``rules``) and ``vitals`` (table of tables by metric).

    Raises:
        PolicyFault: an invalid policy; each fault names the key, the rule and the value found.
    """
    faults: list[str] = []
    for key in content.keys() - {"unknown_devices", "rules", "classes", "vitals"}:
        faults.append(f'"{key}" is unknown; use unknown_devices, [rules], [classes.NAME] and [vitals.METRIC]')
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
    vitals = parse_vitals(content.get("vitals", {}), faults)
    policy = Policy(rules, MappingProxyType(classes), cast("str", unknown), MappingProxyType(vitals))
    faults += policy.beyond_bounds()
    if faults:
        raise PolicyFault(sorted(faults))
    return policy


def _read_rules(base: Rules, where: str, table: Any, faults: list[str]) -> Rules:
    if not isinstance(table, Mapping):
        faults.append(f"[{where}] must be a table; got {table!r}")
        return base
    unread = dict(_flat(cast("Mapping[str, Any]", table)))
    values: dict[str, Any] = {}
    for name, rule in RULES.items():
        if rule.key in unread:
            try:
                values[name] = rule.read(unread.pop(rule.key))
            except FleetError as error:
                faults.append(f"{where}.{rule.key} {error}")
    known = ", ".join(rule.key for rule in RULES.values())
    faults.extend(f'"{where}.{key}" is unknown; use one of {known}' for key in unread)
    rules = replace(base, **values)
    if rules.forget_after_ms <= rules.timeout_ms:
        faults.append(
            f"{where}.forget_after must be longer than timeout ({format_duration(rules.timeout_ms)}); "
            f"got {format_duration(rules.forget_after_ms)}"
        )
    if "velocity_code" in values and rules.velocity_kind != "error":
        faults.append(f'{where}.velocity.code needs velocity.kind = "error"; got {rules.velocity_kind!r}; remove the code')
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
            del values[item.name]  # a new rule must not change the version of policies that do not set it
    return values | {"flagged_codes": list(rules.flagged_codes)}


def from_normalised(content: Mapping[str, Any]) -> Policy:
    """Parse a stored policy; the inverse of `Policy.normalised`.

    Raises:
        PolicyFault: not a stored policy, or one of an unknown format version.
    """
    try:
        classes = {name: _rules(values) for name, values in content["classes"].items()}
        vitals = MappingProxyType(vitals_from_stored(content.get("vitals", {})))
        return Policy(_rules(content["rules"]), MappingProxyType(classes), content["unknown_devices"], vitals)
    except (KeyError, TypeError, AttributeError) as error:
        raise PolicyFault([f"not a stored policy of this version: {error!r}"]) from None


def from_row(content: Any) -> Policy:
    """Parse and check the policy in a row, which may have any content.

    Raises:
        PolicyFault: a policy that `parse_policy` cannot return.
    """
    if not isinstance(content, Mapping):
        raise PolicyFault(["not a stored policy of this version: not an object"])
    policy = from_normalised(cast("Mapping[str, Any]", content))
    faults = [] if policy.unknown_devices in ("admit", "quarantine") else ['unknown_devices must be "admit" or "quarantine"']
    for where, rules in (("rules", policy.rules), *((f"classes.{name}", rules) for name, rules in policy.classes.items())):
        misfits = [rule.key for name, rule in RULES.items() if not rule.fits(getattr(rules, name))]
        faults += [f"{where}.{key} is outside its bounds" for key in misfits]
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
    """Policy with its ``effective_from``; of two at the same instant, the one received last counts."""

    effective_from_ms: int
    received_at_ms: int
    version: str
    policy: Policy = field(compare=False)


@dataclass(frozen=True, slots=True)
class Policies:
    """Policies in the order in which they take effect, starting with the built-in one."""

    dated: tuple[Dated, ...] = (Dated(-1, -1, "", Policy()),)

    def including(self, dated: Dated) -> "Policies":
        """Return the policies with another one added."""
        return Policies(tuple(sorted({*self.dated, dated})))

    def after(self, instant_ms: int | None) -> int:
        """Return the number of policies that take effect after an instant.

        Args:
            instant_ms: epoch milliseconds; None counts all but the built-in one.
        """
        after_ms = -1 if instant_ms is None else instant_ms
        return sum(one.effective_from_ms > after_ms for one in self.dated)

    def at(self, instant_ms: int) -> Dated:
        """Return the policy in force at an instant; a policy is in force from its ``effective_from`` on."""
        for dated in reversed(self.dated):
            if dated.effective_from_ms <= instant_ms:
                return dated
        return self.dated[0]

    def spans(self, since_ms: int) -> Iterator[tuple[Dated, int, int | None]]:
        """Yield each policy in force at or after an instant, with its span.

        Yields:
            The policy, its first instant, and the end of its span (excluded; None: no end).
        """
        for index, dated in enumerate(self.dated):
            end = self.dated[index + 1].effective_from_ms if index + 1 < len(self.dated) else None
            if end is None or end > since_ms:
                yield dated, dated.effective_from_ms, end

    def with_past(self, known: "Policies") -> "Policies":
        """Return these policies preceded by the older policies of ``known``."""
        first_ms = self.dated[0].effective_from_ms
        return Policies((*(one for one in known.dated if one.effective_from_ms < first_ms), *self.dated))

    def pruned(self, frontier_ms: int | None) -> "Policies":
        """Return the policies without those whose span ended at or before the frontier."""
        if frontier_ms is None or len(self.dated) == 1:
            return self
        return Policies(tuple(dated for dated, _, _ in self.spans(frontier_ms)))
