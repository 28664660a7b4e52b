"""State of a device in a correction row: plain values and their fingerprint.

Rule 1: a covered time is encoded as its distance from the covered time at the instant of encoding.
The distance does not depend on the start of the coverage.
Rule 2: values without further effect are left out, so that devices with the same future are encoded
equally.
Rule 3: fields that the first version of correction rows did not have are left out while they have no value.
So its fingerprints stay the same, and its rows are still read.
Rule 4: decoding checks each value: no content of a row can break the fold.

Source: ADR 13.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, cast

from fleetpulse.core.device import Device
from fleetpulse.core.lifecycle import HELD, Mode
from fleetpulse.core.messages.text import MAX_ID_BYTES, MAX_TEXT
from fleetpulse.core.policy import MAX_ERRORS, MAX_EVENTS, MAX_SEQUENCE, RULES
from fleetpulse.core.registry.registry import LIMITS
from fleetpulse.core.rows import POSITION_BITS, Trust

_WHOLE: Final = range(2**53)  # instants, durations and counts: their sums fit into 64 bits
_SEQ: Final = range(2**63)  # range of seq in messages
_SINCE: Final = {  # covered time -> name of the covered time elapsed since
    "quiet_covered_ms": "quiet_for_ms",
    "death_covered_ms": "dead_for_ms",
    "outage_covered_ms": "cut_off_for_ms",
}
_SIGNED: Final = range(-(2**63), 2**63)
_ARRIVALS: Final = ("heard_arrival", "proved_arrival")
_LISTS: Final = ("error_times_ms", "codes", "progress", "progress_of")
_ADDED: Final = {"velocity_count": 0, "velocity_since_ms": None, "review_ms": None, "confirmed_ms": None}


def encode_device(device: Device, covered_ms: int, at_ms: int = 0) -> dict[str, Any]:
    """Encode a device as JSON values.

    Args:
        device: the device.
        covered_ms: covered time at the instant of encoding, milliseconds.
        at_ms: instant of encoding, epoch milliseconds; earlier places in arrival order are left
            out.
    """
    values: dict[str, Any] = {item.name: getattr(device, item.name) for item in fields(Device) if item.name != "device_id"}
    if not any(start is not None for start in device.progress):
        values["progress"] = values["progress_of"] = ()
    if device.mode not in HELD:
        values["held_until_ms"] = None
    if device.death_ms is None:
        values["death_covered_ms"] = None
    for name in _ARRIVALS:
        if values[name] is not None and values[name] < at_ms << POSITION_BITS:
            values[name] = None
    for name, since_name in _SINCE.items():
        value = values.pop(name)
        values[since_name] = None if value is None else covered_ms - value
    values |= {"mode": device.mode.value, "clock": device.clock.value} | {name: list(values[name]) for name in _LISTS}
    return {name: value for name, value in values.items() if name not in _ADDED or value != _ADDED[name]}


def same_state(one: Device | None, other: Device | None) -> bool:
    """Whether two devices are equal, apart from their last transition number."""
    if one is None or other is None:
        return one is other
    return encode_device(replace(one, transition_no=0), 0) == encode_device(replace(other, transition_no=0), 0)


def fingerprint(device: Device | None, covered_ms: int, at_ms: int) -> str:
    """Return a digest of a device, or of None: 16 hexadecimal digits."""
    values = None if device is None else encode_device(device, covered_ms, at_ms)
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=8).hexdigest()


def decode_device(device_id: str, encoded: Any, covered: Callable[[str], int]) -> Device | None:
    """Decode a device that `encode_device` has encoded; None if the correction removes the device.

    Args:
        device_id: id of the device.
        encoded: encoded value.
        covered: function from a site to its covered time at the instant of the correction,
            milliseconds.

    Raises:
        ValueError: invalid values; the message names them.
    """
    if encoded is None:
        return None
    values: Mapping[str, Any] = {**_ADDED, **cast("Mapping[str, Any]", encoded)} if isinstance(encoded, Mapping) else {}
    wrong = sorted({*_CHECKS} ^ {*values}) or [name for name, check in _CHECKS.items() if not check(values[name])]
    if not wrong:
        wrong = [name for name, torn in _TORN.items() if torn(values)]
    if wrong:
        raise ValueError(
            f"invalid device in the correction row, which amend did not write; invalid fields: {', '.join(wrong)[:200]}"
        )
    read: dict[str, Any] = {name: values[name] for name in _CHECKS if name not in _SINCE.values()}
    read |= {name: tuple(values[name]) for name in _LISTS}
    read |= {"mode": Mode(values["mode"]), "clock": Trust(values["clock"])}
    covered_ms = covered(read["speaks_from"] or read["site"])
    for name, since in _SINCE.items():
        read[name] = None if values[since] is None else covered_ms - values[since]
    return Device(device_id, **read)


def _whole(value: Any) -> bool:
    return type(value) is int and value in _WHOLE


def _is_seq(value: Any) -> bool:
    return type(value) is int and value in _SEQ


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()


def _gateway(value: Any) -> bool:
    return (
        isinstance(value, str) and len(value) <= MAX_TEXT + MAX_ID_BYTES + 1 and value.isprintable()
    )  # the id may include a site


def _maybe(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _several(check: Callable[[Any], bool], most: int) -> Callable[[Any], bool]:
    def checked(value: Any) -> bool:
        several = cast("list[Any]", value) if isinstance(value, list) else None
        return several is not None and len(several) <= most and all(map(check, several))

    return checked


_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = MappingProxyType(
    {
        **dict.fromkeys(("site", "device_class"), _text),
        **dict.fromkeys(("boot", "firmware", "speaks_from", "spoke_from"), _maybe(_text)),
        "gateway": _maybe(_gateway),
        **{name: _maybe(RULES[name].fits) for name in LIMITS},
        **dict.fromkeys(("life_ms", "quiet_since_ms", "quiet_for_ms", "mode_since_ms", "class_since_ms"), _whole),
        **dict.fromkeys(("transition_no", "reboots", "runtime_ms", "excused_ms"), _whole),
        **dict.fromkeys(("last_seen_ms", "death_ms", "dead_for_ms", "outage_ms", "cut_off_for_ms"), _maybe(_whole)),
        **dict.fromkeys(("moved_ms", "conflict_ms"), _maybe(_whole)),
        "seq": _maybe(_is_seq),
        **dict.fromkeys(("degraded_until_ms", "flagged_until_ms", "held_until_ms"), _maybe(_whole)),
        "mode": lambda value: isinstance(value, str) and value in {mode.value for mode in Mode} - {Mode.FORGOTTEN.value},
        "session": _maybe(lambda value: type(value) is int and value in _SIGNED),
        **dict.fromkeys(_ARRIVALS, _maybe(_is_seq)),
        "clock": lambda value: isinstance(value, str) and value in {trust.value for trust in Trust},
        "clock_offset_ms": _maybe(lambda value: type(value) is int and -value in _SIGNED),
        "error_times_ms": _several(_whole, MAX_ERRORS),
        "codes": _several(_text, MAX_ERRORS),
        "progress": _several(_maybe(_whole), MAX_SEQUENCE - 1),
        "progress_of": _several(_text, MAX_SEQUENCE),
        "velocity_count": lambda value: type(value) is int and 0 <= value < MAX_EVENTS,
        **dict.fromkeys(("velocity_since_ms", "review_ms", "confirmed_ms"), _maybe(_whole)),
    }
)
_TORN: Final[Mapping[str, Callable[[Mapping[str, Any]], bool]]] = MappingProxyType(  # values that must be consistent
    {
        "progress": lambda values: len(values["progress"]) != max(0, len(values["progress_of"]) - 1),
        "dead_for_ms": lambda values: (values["death_ms"] is None) != (values["dead_for_ms"] is None),
        "cut_off_for_ms": lambda values: (values["outage_ms"] is None) != (values["cut_off_for_ms"] is None),
        "velocity_since_ms": lambda values: (values["velocity_count"] == 0) != (values["velocity_since_ms"] is None),
        "review_ms": lambda values: values["review_ms"] is not None and values["flagged_until_ms"] is None,
        "confirmed_ms": lambda values: values["confirmed_ms"] is not None and values["flagged_until_ms"] is None,
    }
)
assert {*_CHECKS} - {*_SINCE.values()} | {*_SINCE} == {item.name for item in fields(Device)} - {"device_id"}, (
    "each field of a device is encoded"
)
