"""Decoder of messages to rows of bronze, or to rejections with a reason.

Rule 1: every message becomes a row or a rejection. No message raises an error, and limits on size
and depth bound the cost of each.
Rule 2: an invalid value in a device's message is left out, with a note in the row. The message is
kept, since it still proves its device alive. NaN and infinite numbers are null.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Final, NamedTuple, cast

from fleetpulse.core.messages.text import MAX_ID_BYTES, MAX_TEXT, as_text
from fleetpulse.core.rows import EVERYONE, FOR_EVERYONE, FROM_DEVICES, RESERVED, WITHOUT_BODY, Clock, Kind, Origin, Reason, Row
from fleetpulse.core.streams.commands import ANSWERS, COMMAND, COMMAND_FIELDS, LEAST_TIMEOUT_MS
from fleetpulse.core.times import DAY_MS, END_OF_TIME_MS, EPOCH_2000_MS

MAX_PAYLOAD_BYTES: Final = 262_144
MAX_DEPTH: Final = 16
MAX_AHEAD_DAYS: Final = 366  # until ``effective_from`` of a row; the row is pending in the state until then
NO_TS: Final = "no ts: event_time is received_at"
_INSTANTS: Final = ("effective_from", "from", "until", "after")  # fields of reserved kinds
_TEXT_FIELDS: Final = ("op", "class", "gateway", "why")  # text fields of reserved kinds


@dataclass(frozen=True, slots=True)
class Rejection:
    """Result of a message that cannot become a row.

    Attributes:
        reason: one word, the key for counting.
        detail: message for people: the field, the rule, the value found, and the remedy.
    """

    reason: Reason
    detail: str


class _Rejected(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.rejection = Rejection(reason, detail)


class Address(NamedTuple):
    """Site, device and kind of a message, from its topic, a mapping or Sparkplug."""

    site: str
    device_id: str
    kind: Kind


def decode(topic: str, payload: bytes, received_at_ms: int, origin: Origin = Origin.MQTT) -> Row | Rejection:
    """Decode a message to a row, or to a rejection with the reason.

    Args:
        topic: ``fleet/<site>/<device_id>/<kind>``.
        payload: JSON object of format version 1 (docs/reference/message-v1.schema.json).
        received_at_ms: time at which the bridge received the message, epoch milliseconds.
        origin: source of the message; MQTT clients cannot send reserved kinds.
    """
    try:
        address = parse_topic(topic)
        if address.kind in RESERVED and origin is Origin.MQTT:
            raise _reserved(address, payload)
        if address.kind is Kind.CORRECT and origin is not Origin.COMMAND:
            raise _Rejected(
                "reserved",
                f'only "fleet amend" can send kind "{Kind.CORRECT}", since it depends on the present state of the device',
            )
        content = parse_payload(payload, may_be_empty=address.kind is Kind.DEATH)
        if address.kind not in RESERVED:
            _check_agreement(address, content)
        return to_row(address, content, received_at_ms, digest64(payload))
    except _Rejected as rejected:
        return rejected.rejection


def program_command(topic: str, payload: bytes) -> Mapping[str, Any] | Rejection:
    """Return the control row of a command to a device that a program published, or the rejection of the message.

    Args:
        topic: ``fleet/<site>/<device_id>/control``.
        payload: JSON object with ``"op": "command"``, ``id``, ``name``, and optionally ``payload`` and ``timeout_ms``.

    Returns:
        The content of the row. Further fields of the payload are left out: they belong to the command line.
    """
    try:
        return _program_command(parse_topic(topic), payload)
    except _Rejected as rejected:
        return rejected.rejection


def _program_command(address: Address, payload: bytes) -> Mapping[str, Any]:
    content = parse_payload(payload)
    _check_agreement(address, content)
    if content.get("op") != COMMAND:
        raise _Rejected(
            "reserved",
            f'op must be "{COMMAND}": a program sends nothing but commands to devices on a control topic; got '
            f'{_shown(content.get("op"))}; operators use the command "fleet"',
        )
    if address.site == EVERYONE:
        raise _Rejected("topic", f'a command is delivered at the site of its device; got the site "{EVERYONE}"; name the site')
    _check_command(content)
    return {name: content[name] for name in ("op", *COMMAND_FIELDS) if content.get(name) is not None}


def _reserved(address: Address, payload: bytes) -> _Rejected:
    """Return the rejection of a message of a reserved kind that no bridge has taken as a command of a program."""
    if address.kind is not Kind.CONTROL:
        return _Rejected("reserved", f'a device cannot send kind "{address.kind}"; operators use the command "fleet"')
    try:
        _program_command(address, payload)
    except _Rejected as rejected:
        return rejected
    return _Rejected(
        "reserved",
        "a command of a program counts only if the first bridge takes it from the broker: not from Kafka, and not while a "
        "recording is replayed; publish it at the broker of the fleet",
    )


def from_content(
    address: Address, content: Mapping[str, Any], received_at_ms: int, digest: int, *, clock_required: bool = True
) -> Row | Rejection:
    """Convert the content of another format to a row, or to a rejection.

    Args:
        address: site, device and kind.
        content: content with the field names of the fleetpulse format.
        received_at_ms: time at which the bridge received the message, epoch milliseconds.
        digest: see `digest64`.
        clock_required: whether an invalid ts is a clock fault; otherwise ``received_at`` replaces it.
    """
    try:
        check_name("site", address.site)
        check_name("device_id", address.device_id)
        return to_row(address, content, received_at_ms, digest, clock_required=clock_required)
    except _Rejected as rejected:
        return rejected.rejection


def _check_agreement(address: Address, content: Mapping[str, Any]) -> None:
    """Reject a payload that names another device, site or kind than its topic.

    Access rules of the broker check the topic only, so such a payload would bypass them.
    """
    for name, expected in (("device_id", address.device_id), ("site", address.site), ("kind", address.kind.value)):
        if name in content and content[name] != expected:
            raise _Rejected(
                "disagreement", f'{name} must be "{expected}", as in the topic; got {_shown(content[name])}; leave it out'
            )


def digest64(payload: bytes) -> int:
    """Return BLAKE2b-64 of the payload's bytes as a signed 64-bit number."""
    return int.from_bytes(blake2b(payload, digest_size=8).digest(), "little", signed=True)


def parse_topic(topic: str) -> Address:
    """Parse ``fleet/<site>/<device_id>/<kind>``.

    Raises:
        _Rejected: an invalid topic; `decode` returns the rejection.
    """
    levels = topic.split("/")
    if levels[0] != "fleet":
        raise _Rejected("topic", f'a topic must start with "fleet/"; got "{topic[:MAX_TEXT]}"')
    if len(levels) != 4:
        raise _Rejected("topic", f'a topic must be fleet/<site>/<device_id>/<kind>; got "{topic[:MAX_TEXT]}"')
    _, site, device_id, level = levels
    try:
        kind = Kind(level)
    except ValueError:
        kinds = ", ".join(sorted(FROM_DEVICES))
        raise _Rejected("topic", f'the kind must be one of {kinds}; got "{level[:MAX_TEXT]}"') from None
    check_name("site", site, may_be_everyone=kind in RESERVED)
    check_name("device_id", device_id, may_be_everyone=kind in FOR_EVERYONE)
    return Address(site, device_id, kind)


def plain_address(topic: str) -> Address | None:
    """Return the address in a topic of a device; None if its kind has a body, or it is invalid or not below ``fleet/``."""
    if not topic.startswith("fleet/"):
        return None
    try:
        address = parse_topic(topic)
    except _Rejected:
        return None
    return address if address.kind in WITHOUT_BODY else None


def check_name(field: str, name: str, *, may_be_everyone: bool = False) -> None:
    """Check a site or device id: 1 to 128 bytes of printable UTF-8 without ``+ # /``.

    Raises:
        _Rejected: an invalid name; `decode` returns the rejection.
    """
    size = len(name.encode(errors="replace"))
    if not 1 <= size <= MAX_ID_BYTES:
        raise _Rejected("topic", f"{field} must have 1 to {MAX_ID_BYTES} bytes; got {size}")
    if not name.isprintable() or "+" in name or "#" in name or "/" in name:
        raise _Rejected("topic", f"{field} must be printable and without + # /; got {name!a}")
    if name == EVERYONE and not may_be_everyone:
        raise _Rejected("topic", f'{field} "{EVERYONE}" is not a name: it is reserved for the whole fleet')


def address_fault(address: Address) -> str | None:
    """Return the reason why site or device id of an address is invalid; None if both are valid."""
    try:
        check_name("site", address.site)
        check_name("device_id", address.device_id)
    except _Rejected as rejected:
        return rejected.rejection.detail
    return None


def site_fault(site: str) -> str | None:
    """Return the reason why a site is invalid; None if it is valid."""
    try:
        check_name("site", site)
    except _Rejected as rejected:
        return rejected.rejection.detail
    return None


def parse_payload(payload: bytes, *, may_be_empty: bool = False) -> Mapping[str, Any]:
    """Parse a JSON object, with limits on its size and depth.

    Raises:
        _Rejected: an invalid payload; `decode` returns the rejection.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise _Rejected("size", f"a payload has at most {MAX_PAYLOAD_BYTES} bytes; got {len(payload)}")
    if may_be_empty and not payload:
        return {}
    try:
        content: object = from_json(payload.decode())
    except UnicodeDecodeError as error:
        raise _Rejected("json", f"a payload must be UTF-8; byte {error.start} is not") from None
    except RecursionError:
        raise _Rejected("depth", f"a payload is at most {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise _Rejected("json", f"a payload must be JSON; {error}"[:MAX_TEXT]) from None
    if not isinstance(content, dict):
        raise _Rejected("json", f"a payload must be a JSON object; got {_json_type(content)}")
    content = cast("dict[str, Any]", content)
    if is_too_deep(payload, content):
        raise _Rejected("depth", f"a payload is at most {MAX_DEPTH} levels deep")
    return content


def is_too_deep(payload: bytes, content: object) -> bool:
    """Return whether the content of a payload has more than `MAX_DEPTH` levels."""
    return payload.count(b"{") + payload.count(b"[") > MAX_DEPTH and _depth(content) > MAX_DEPTH


def to_row(address: Address, content: Mapping[str, Any], received_at_ms: int, digest: int, *, clock_required: bool = True) -> Row:
    """Convert a parsed payload to a row.

    Raises:
        _Rejected: a field of a reserved kind with an invalid value; `decode` returns the rejection.
    """
    if address.kind in RESERVED:
        return _own_row(address, content, received_at_ms, digest)
    event_time_ms, clock, note = _event_time(address.kind, content, received_at_ms)
    if clock is Clock.INVALID and not clock_required:
        event_time_ms, clock = received_at_ms, Clock.RECEIVED
    fields, notes = _fields(content)
    if note is not None:
        notes.insert(0, note)
    if address.kind is Kind.ACK:
        fields["body"] = _answer(content, notes)
    return Row(
        received_at_ms=received_at_ms,
        kind=address.kind,
        device_id=address.device_id,
        site=address.site,
        event_time_ms=event_time_ms,
        clock=clock,
        note="; ".join(notes) or None,
        digest=digest,
        **fields,
    )


def _fields(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a device's message, and a note for each invalid value."""
    fields: dict[str, Any] = {}
    notes: list[str] = []
    for name, read in _READERS.items():
        if name in content:
            try:
                fields[name] = read(content)
            except _Rejected as rejected:
                notes.append(f"{rejected.rejection.detail}; it is left out")
    return fields, notes


def _answer(content: Mapping[str, Any], notes: list[str]) -> str | None:
    """Return the answer to a command as JSON; None with a note if it does not name a command and a status."""
    answer: dict[str, Any] = {}
    try:
        for name in ("id", "status"):
            answer[name] = _text(content, name, numbers=True)
        if answer["id"] is None or answer["status"] not in ANSWERS:
            expected = f"id must name a command, and status must be one of {', '.join(ANSWERS)}"
            raise _Rejected("field", f"{expected}; got {_shown(content.get('id'))} and {_shown(content.get('status'))}")
    except _Rejected as rejected:
        notes.append(f"{rejected.rejection.detail}; the answer is left out")
        return None
    for name, read in (("reason", partial(_text, name="reason")), ("reported", partial(_object, name="reported"))):
        try:
            answer[name] = read(content)
        except _Rejected as rejected:
            notes.append(f"{rejected.rejection.detail}; it is left out")
    return _TO_SORTED_JSON({name: value for name, value in answer.items() if value is not None})


def _object(content: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = content.get(name)
    if value is not None and not isinstance(value, dict):
        raise _Rejected("field", f"{name} must be a JSON object; got {_json_type(value)}")
    return cast("Mapping[str, Any] | None", value)


def _check_command(content: Mapping[str, Any]) -> None:
    """Refuse a command to a device without an id, a name, or with an invalid payload or timeout."""
    for name in ("id", "name"):
        if _text(content, name) is None:
            raise _Rejected("field", f"{name} of a command is missing; it must be a printable text of 1 to {MAX_TEXT} characters")
    _object(content, "payload")
    timeout_ms = content.get("timeout_ms")
    if timeout_ms is not None and (type(timeout_ms) is not int or not LEAST_TIMEOUT_MS <= timeout_ms <= DAY_MS):
        rule = f"timeout_ms of a command must be a whole number from {LEAST_TIMEOUT_MS:,} to {DAY_MS:,}"
        raise _Rejected("field", f"{rule}; got {_shown(timeout_ms)}; leave it out for the setting command_timeout")


def _own_row(address: Address, content: Mapping[str, Any], received_at_ms: int, digest: int) -> Row:
    effective = content.get("effective_from", received_at_ms)
    if type(effective) is not int:
        raise _Rejected("field", f"effective_from must be epoch milliseconds; got {_shown(effective)}")
    for name in _INSTANTS:
        instant = content.get(name)
        if isinstance(instant, int | float) and not 0 <= instant <= END_OF_TIME_MS:
            raise _Rejected("field", f"{name} must be epoch milliseconds; got {_shown(instant)}")
    if effective > received_at_ms + MAX_AHEAD_DAYS * DAY_MS:
        raise _Rejected(
            "field", f"effective_from must be at most {MAX_AHEAD_DAYS} days ahead; got {_shown(effective)}; send it later"
        )
    for name in _TEXT_FIELDS:
        if content.get(name) != "":  # an empty text counts as absent: the class is then the default one
            _text(content, name)
    if address.kind is Kind.CONTROL and content.get("op") == COMMAND:
        _check_command(content)
    body = _TO_SORTED_JSON(content)
    return Row(
        received_at_ms=received_at_ms,
        kind=address.kind,
        device_id=address.device_id,
        site=address.site,
        event_time_ms=effective,
        clock=Clock.RECEIVED,
        body=body,
        digest=digest,
    )


def _event_time(kind: Kind, content: Mapping[str, Any], received_at_ms: int) -> tuple[int | None, Clock, str | None]:
    """Return event time, its source, and a note.

    The ts of a will is ignored: the device wrote it when it connected.
    """
    if kind is Kind.DEATH:
        return received_at_ms, Clock.RECEIVED, None
    ts = content.get("ts")
    if ts is None:
        return received_at_ms, Clock.RECEIVED, NO_TS
    if isinstance(ts, str):
        return None, Clock.INVALID, f"ts must be a number of epoch milliseconds; got {_shown(ts)}{_text_hint(ts)}"
    if not isinstance(ts, int | float) or isinstance(ts, bool):
        return None, Clock.INVALID, f"ts must be a number of epoch milliseconds; got {_json_type(ts)}"
    if ts > END_OF_TIME_MS:
        hint = "; it looks like micro- or nanoseconds: divide it" if ts < 10**20 else ""
        return None, Clock.INVALID, f"ts must be before the year 10000; got {_shown(ts)}{hint}"
    if ts < EPOCH_2000_MS:
        hint = "; it looks like seconds: multiply by 1000" if ts * 1000 >= EPOCH_2000_MS else ""
        return None, Clock.INVALID, f"ts must be 2000-01-01 or later; got {_shown(ts)}{hint}"
    return int(ts // 1), Clock.DEVICE, None


def _text_hint(ts: str) -> str:
    if ts[:4].isdecimal() and ts[4:5] == "-":
        zone = "(and ts_zone, if it names no time zone)"
        return f'; it looks like ISO 8601: send epoch milliseconds, or map it with ts_unit = "iso" {zone}'
    if ts.strip().replace(".", "", 1).isdecimal():
        return "; it is a number in quotes: send it without quotes"
    return ""


def _text(content: Mapping[str, Any], name: str, *, numbers: bool = False) -> str | None:
    value = content.get(name)
    if value is None:
        return None
    text = as_text(value, numbers=numbers)
    if text is None:
        rule = "a printable text" + (" or a whole number" if numbers else "")
        raise _Rejected("field", f"{name} must be {rule} of 1 to {MAX_TEXT} characters; got {_shown(value)}")
    return text


def _metrics(content: Mapping[str, Any]) -> str | None:
    metrics = content.get("metrics")
    if metrics is None:
        return None
    if not isinstance(metrics, dict):
        raise _Rejected("field", f"metrics must be a JSON object; got {_json_type(metrics)}")
    text = metrics_text(cast("dict[str, Any]", metrics))
    if text is None:
        raise _Rejected("field", "metrics has a number outside the range of a double")
    return text


def metrics_text(metrics: Mapping[str, Any]) -> str | None:
    """Return metrics as JSON; None if a number is outside the range of a double."""
    try:
        return _TO_JSON(metrics)
    except ValueError:
        return None


def _whole(content: Mapping[str, Any], name: str) -> int | None:
    value = content.get(name)
    if value is None:
        return None
    whole = as_whole(value)
    if whole is None:
        raise _Rejected("field", f"{name} must be a whole number from 0 to 2^63-1; got {_shown(value)}")
    return whole


def as_whole(value: object) -> int | None:
    """Return a value as a whole number from 0 to 2^63-1; None if it is not one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**63 else None


def _null(_: str) -> None:
    return None


def finite(text: str) -> float | None:
    """Return a number; None if it is infinite, such as ``1e400``."""
    number = float(text)
    return number if math.isfinite(number) else None


# Created once, since it is called for each message.
from_json: Final = json.JSONDecoder(parse_constant=_null, parse_float=finite).decode
_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
    **{name: partial(_text, name=name, numbers=True) for name in ("boot", "session", "code")},
    **{name: partial(_text, name=name) for name in ("firmware", "gateway")},
    **{name: partial(_whole, name=name) for name in ("seq", "uptime_s")},
    "metrics": _metrics,
}
_TO_JSON: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_TO_SORTED_JSON: Final = json.JSONEncoder(separators=(",", ":"), sort_keys=True).encode


def _shown(value: object) -> str:
    try:
        return json.dumps(value)[:64]
    except ValueError:  # a whole number with more digits than Python prints
        return "a very long number"


def _json_type(value: object) -> str:
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _depth(value: object) -> int:
    """Return the nesting depth of objects and arrays, without recursion."""
    deepest, open_values = 0, [(value, 1)]
    while open_values:
        inner, depth = open_values.pop()
        if isinstance(inner, dict):
            children: list[object] = list(cast("dict[str, object]", inner).values())
        elif isinstance(inner, list):
            children = cast("list[object]", inner)
        else:
            continue
        deepest = max(deepest, depth)
        if depth > MAX_DEPTH:
            break
        open_values += [(child, depth + 1) for child in children]
    return deepest
