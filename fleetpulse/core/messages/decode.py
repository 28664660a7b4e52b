"""Decoding: a message as it came becomes a row of bronze, or the reason why it cannot be one.

Rule: whatever comes, it is one of the two; nothing is raised, and nothing costs more than the limits allow.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, cast

from fleetpulse.core.rows import EVERYONE, FOR_EVERYONE, FROM_DEVICES, KNOWN_NAMES, RESERVED, Clock, Kind, Origin, Reason, Row
from fleetpulse.core.text import MAX_ID_BYTES, MAX_TEXT, as_text
from fleetpulse.core.times import END_OF_TIME_MS, EPOCH_2000_MS

MAX_PAYLOAD_BYTES: Final = 262_144
MAX_DEPTH: Final = 16
MAX_AHEAD_DAYS: Final = 366  # of what is to be in effect later: it waits in the state until then
NO_TS: Final = "no ts: event_time is received_at"
_DAY_MS: Final = 86_400_000
_INSTANTS: Final = ("effective_from", "from", "until", "after")  # of our own rows
_WORDS: Final = ("op", "class", "gateway", "why")  # likewise


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a message cannot become a row.

    Attributes:
        reason: one word to count by.
        detail: what, which, the rule, what was got, what to do.
    """

    reason: Reason
    detail: str


class _Rejected(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.rejection = Rejection(reason, detail)


@dataclass(frozen=True, slots=True)
class Address:
    """Whom a message is about, as its topic says (or a mapping, for devices that cannot speak our format)."""

    site: str
    device_id: str
    kind: Kind


def decode(topic: str, payload: bytes, received_at_ms: int, origin: Origin = Origin.MQTT) -> Row | Rejection:
    """Turn a message into a row, or say why it cannot be one.

    Args:
        topic: ``fleet/<site>/<device_id>/<kind>``.
        payload: a JSON object of format version 1 (docs/message-v1.schema.json).
        received_at_ms: when the bridge had it.
        origin: the door; reserved kinds are ours alone.
    """
    try:
        address = parse_topic(topic)
        if address.kind in RESERVED and origin is Origin.MQTT:
            raise _Rejected("reserved", f'kind "{address.kind}" is not for devices; operators use the command "fleet"')
        if address.kind is Kind.CORRECT and origin is not Origin.COMMAND:
            raise _Rejected(
                "reserved", f'kind "{Kind.CORRECT}" is worked out by "fleet amend" for a device as it is, and said by it alone'
            )
        content = parse_payload(payload, may_be_empty=address.kind is Kind.DEATH)
        if address.kind not in RESERVED:
            _check_agreement(address, content)
        return to_row(address, content, received_at_ms, digest64(payload))
    except _Rejected as rejected:
        return rejected.rejection


def from_content(address: Address, content: Mapping[str, Any], received_at_ms: int, digest: int) -> Row | Rejection:
    """Make a row of what another format says, put as the content of our own; or say why it cannot be one."""
    try:
        check_name("site", address.site)
        check_name("device_id", address.device_id)
        return to_row(address, content, received_at_ms, digest)
    except _Rejected as rejected:
        return rejected.rejection


def _check_agreement(address: Address, content: Mapping[str, Any]) -> None:
    """A broker's rules see the topic alone: a payload that names another device would go past them."""
    for name, said in (("device_id", address.device_id), ("site", address.site), ("kind", address.kind.value)):
        if name in content and content[name] != said:
            raise _Rejected("disagreement", f'{name} is "{said}" by the topic; got {_shown(content[name])}; leave it out')


def digest64(payload: bytes) -> int:
    """BLAKE2b-64 of the payload's bytes as a signed 64-bit number."""
    return int.from_bytes(blake2b(payload, digest_size=8).digest(), "little", signed=True)


def parse_topic(topic: str) -> Address:
    """Read ``fleet/<site>/<device_id>/<kind>``; raises a rejection that `decode` turns into a value."""
    levels = topic.split("/")
    if levels[0] != "fleet":
        raise _Rejected("topic", f'our topics begin with "fleet/"; got "{topic[:MAX_TEXT]}"')
    if len(levels) != 4:
        raise _Rejected("topic", f'a topic is fleet/<site>/<device_id>/<kind>; got "{topic[:MAX_TEXT]}"')
    _, site, device_id, word = levels
    try:
        kind = Kind(word)
    except ValueError:
        kinds = ", ".join(sorted(FROM_DEVICES))
        raise _Rejected("topic", f'a device sends one of {kinds}; got "{word[:MAX_TEXT]}"') from None
    check_name("site", site, may_be_everyone=kind in RESERVED)
    check_name("device_id", device_id, may_be_everyone=kind in FOR_EVERYONE)
    return Address(site, device_id, kind)


@lru_cache(KNOWN_NAMES)
def plain_address(topic: str) -> Address | None:
    """Return whom a device's message is about; None where `decode` has more to say about the topic."""
    if not topic.startswith("fleet/"):
        return None
    try:
        address = parse_topic(topic)
    except _Rejected:
        return None
    return None if address.kind in RESERVED else address


def check_name(what: str, name: str, *, may_be_everyone: bool = False) -> None:
    """Check a site or device id: 1 to 128 bytes of printable UTF-8 without the characters that topics use."""
    size = len(name.encode(errors="replace"))
    if not 1 <= size <= MAX_ID_BYTES:
        raise _Rejected("topic", f"{what} has 1 to {MAX_ID_BYTES} bytes; got {size}")
    if not name.isprintable() or "+" in name or "#" in name or "/" in name:
        raise _Rejected("topic", f"{what} is printable and without + # /; got {name!a}")
    if name == EVERYONE and not may_be_everyone:
        raise _Rejected("topic", f'{what} "{EVERYONE}" is not a name: it stands for everybody')


def site_fault(site: str) -> str | None:
    """Say why no topic can have this site; None where one can."""
    try:
        check_name("site", site)
    except _Rejected as rejected:
        return rejected.rejection.detail
    return None


def parse_payload(payload: bytes, *, may_be_empty: bool = False) -> Mapping[str, Any]:
    """Read a JSON object, with limits on its size and depth; raises a rejection that `decode` turns into a value."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise _Rejected("size", f"a payload has at most {MAX_PAYLOAD_BYTES} bytes; got {len(payload)}")
    if may_be_empty and not payload:
        return {}
    try:
        content: object = _FROM_JSON(payload.decode())
    except UnicodeDecodeError as error:
        raise _Rejected("json", f"a payload is UTF-8; byte {error.start} is not") from None
    except RecursionError:
        raise _Rejected("depth", f"a payload is at most {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        raise _Rejected("json", f"a payload is JSON; {error}"[:MAX_TEXT]) from None
    if not isinstance(content, dict):
        raise _Rejected("json", f"a payload is a JSON object; got {_json_type(content)}")
    content = cast("dict[str, Any]", content)
    if payload.count(b"{") + payload.count(b"[") > MAX_DEPTH and _depth(content) > MAX_DEPTH:
        raise _Rejected("depth", f"a payload is at most {MAX_DEPTH} levels deep")
    return content


def to_row(address: Address, content: Mapping[str, Any], received_at_ms: int, digest: int) -> Row:
    """Make a row of a decoded payload; raises a rejection that `decode` turns into a value."""
    if address.kind in RESERVED:
        return _own_row(address, content, received_at_ms, digest)
    event_time_ms, clock, note = _event_time(address.kind, content, received_at_ms)
    return Row(
        received_at_ms=received_at_ms,
        kind=address.kind,
        device_id=address.device_id,
        site=address.site,
        event_time_ms=event_time_ms,
        clock=clock,
        boot=_text(content, "boot", numbers=True),
        seq=_whole(content, "seq"),
        uptime_s=_whole(content, "uptime_s"),
        code=_text(content, "code", numbers=True),
        firmware=_text(content, "firmware"),
        gateway=_text(content, "gateway"),
        metrics=_metrics(content),
        note=note,
        digest=digest,
        session=_text(content, "session", numbers=True),
    )


def _own_row(address: Address, content: Mapping[str, Any], received_at_ms: int, digest: int) -> Row:
    effective = content.get("effective_from", received_at_ms)
    if type(effective) is not int:
        raise _Rejected("field", f"effective_from is epoch milliseconds; got {_shown(effective)}")
    for name in _INSTANTS:
        instant = content.get(name)
        if isinstance(instant, int | float) and not 0 <= instant <= END_OF_TIME_MS:
            raise _Rejected("field", f"{name} is epoch milliseconds; got {_shown(instant)}")
    if effective > received_at_ms + MAX_AHEAD_DAYS * _DAY_MS:
        raise _Rejected(
            "field", f"effective_from lies at most {MAX_AHEAD_DAYS} days ahead; got {_shown(effective)}: say it later"
        )
    for name in _WORDS:
        if content.get(name) != "":  # an empty word says as little as none: the class is then the default one
            _text(content, name)
    body = json.dumps(content, separators=(",", ":"), sort_keys=True)
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
    """Return event time, where it comes from, and a note. A will was written long before: its ts says nothing."""
    if kind is Kind.DEATH:
        return received_at_ms, Clock.RECEIVED, None
    ts = content.get("ts")
    if ts is None:
        return received_at_ms, Clock.RECEIVED, NO_TS
    if isinstance(ts, str):
        return None, Clock.INVALID, f"ts is a number of epoch milliseconds; got {_shown(ts)}{_text_hint(ts)}"
    if not isinstance(ts, int | float) or isinstance(ts, bool):
        return None, Clock.INVALID, f"ts is a number of epoch milliseconds; got {_json_type(ts)}"
    if ts > END_OF_TIME_MS:
        hint = "; it looks like micro- or nanoseconds: divide it" if ts < 10**20 else ""
        return None, Clock.INVALID, f"ts lies before the year 10000; got {_shown(ts)}{hint}"
    if ts < EPOCH_2000_MS:
        hint = "; it looks like seconds: multiply by 1000" if ts * 1000 >= EPOCH_2000_MS else ""
        return None, Clock.INVALID, f"ts lies after 2000-01-01; got {_shown(ts)}{hint}"
    return int(ts // 1), Clock.DEVICE, None


def _text_hint(ts: str) -> str:
    if ts[:4].isdecimal() and ts[4:5] == "-":
        return "; it looks like ISO 8601: send epoch milliseconds, or map it (fleet map test)"
    if ts.strip().replace(".", "", 1).isdecimal():
        return "; it is a number in quotes: send it without them"
    return ""


def _text(content: Mapping[str, Any], name: str, *, numbers: bool = False) -> str | None:
    value = content.get(name)
    if value is None:
        return None
    text = as_text(value, numbers=numbers)
    if text is None:
        rule = "a printable text" + (" or a whole number" if numbers else "")
        raise _Rejected("field", f"{name} is {rule} of 1 to {MAX_TEXT} characters; got {_shown(value)}")
    return text


def _metrics(content: Mapping[str, Any]) -> str | None:
    metrics = content.get("metrics")
    if metrics is None:
        return None
    if not isinstance(metrics, dict):
        raise _Rejected("field", f"metrics is a JSON object; got {_json_type(metrics)}")
    text = metrics_text(cast("dict[str, Any]", metrics))
    if text is None:
        raise _Rejected("field", "metrics holds a number beyond what a double can hold")
    return text


def metrics_text(metrics: Mapping[str, Any]) -> str | None:
    """Return metrics as a row holds them; None where they hold a number beyond what a double can hold."""
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
        raise _Rejected("field", f"{name} is a whole number from 0 to 2^63-1; got {_shown(value)}")
    return whole


def as_whole(value: object) -> int | None:
    """Return a field's value as a whole number of a row; None where it may not be one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**63 else None


def _no_constant(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


_FROM_JSON: Final = json.JSONDecoder(parse_constant=_no_constant).decode  # made once: it is called for each message
_TO_JSON: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _shown(value: object) -> str:
    try:
        return json.dumps(value)[:64]
    except ValueError:  # a whole number with more digits than Python writes
        return "a very long number"


def _json_type(value: object) -> str:
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _depth(value: object) -> int:
    """Return how deep objects and arrays are nested, without recursion."""
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
