"""Topic mappings: conversion of messages from other formats to fleetpulse's.

A mapping defines the topics that it applies to and the topic levels of site, device and kind. It
also names the paths of ts, seq and other fields in the payload.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.decode import MAX_PAYLOAD_BYTES, Rejection, decode
from fleetpulse.core.rows import FROM_DEVICES, Origin, Row
from fleetpulse.core.times import END_OF_TIME_MS, parse_instant_ms

UNITS: Final = ("ms", "s", "iso")
_KEYS: Final = frozenset({"topic", "site", "device", "kind", "ts", "ts_unit", "seq", "code", "boot", "session"})


@dataclass(frozen=True, slots=True)
class TopicMapping:
    """Mapping of one pattern of topics.

    Attributes:
        topic: levels of the pattern: a fixed word, ``+`` for any word, or the placeholder
            ``{site}``, ``{device}`` or ``{kind}``.
        site, device, kind: values to use if the topic has no placeholder for them.
        ts: dotted path of the time in the payload, such as ``meta.time``; empty if there is none.
        ts_unit: unit of ``ts``: ms, s or iso.
        seq, code, boot, session: dotted paths of the counter, the error code, and the names of the
            device's run and of its connection; empty if there is none.
    """

    topic: tuple[str, ...]
    site: str
    device: str
    kind: str
    ts: str
    ts_unit: str
    seq: str
    code: str
    boot: str = ""
    session: str = ""

    @property
    def subscription(self) -> str:
        """MQTT topic filter that matches the topics of the mapping."""
        return "/".join("+" if level.startswith("{") else level for level in self.topic)

    def match(self, topic: str) -> dict[str, str] | None:
        """Return site, device and kind of a topic; None if the pattern does not match."""
        levels = topic.split("/")
        if len(levels) != len(self.topic):
            return None
        found = {"site": self.site, "device": self.device, "kind": self.kind}
        for level, pattern in zip(levels, self.topic, strict=True):
            if pattern.startswith("{"):
                found[pattern[1:-1]] = level
            elif pattern not in ("+", level):
                return None
        return found


def parse_mappings(content: Mapping[str, Any]) -> tuple[TopicMapping, ...]:
    """Parse the content of a mapping file: ``[[mapping]]`` tables.

    Raises:
        FleetError: an invalid file; the message lists all faults, one a line.
    """
    faults: list[str] = []
    tables = content.get("mapping")
    listed = cast("list[Any]", tables) if isinstance(tables, list) else []
    if not listed:
        faults.append("a mapping file must have at least one [[mapping]] table")
    mappings = [_parse(cast("Mapping[str, Any]", table), number, faults) for number, table in enumerate(listed, 1)]
    if faults:
        raise FleetError("the mapping has faults:\n" + "\n".join(f"  {fault}" for fault in faults), code="mapping-faulty")
    return tuple(mappings)


def _parse(table: Mapping[str, Any], number: int, faults: list[str]) -> TopicMapping:
    where = f"mapping {number}"
    faults.extend(f'{where}: "{key}" is unknown; use one of {", ".join(sorted(_KEYS))}' for key in table.keys() - _KEYS)
    values = {key: str(table.get(key, "")) for key in _KEYS}
    values["ts_unit"] = values["ts_unit"] or "ms"
    levels = tuple(values["topic"].split("/"))
    for level in levels:
        if level.startswith("{") and level not in ("{site}", "{device}", "{kind}"):
            faults.append(f'{where}: the placeholders of a topic are {{site}}, {{device}} and {{kind}}; got "{level}"')
    if not values["topic"] or levels[0].startswith(("{", "+", "#")) or levels[0] == "fleet" or "#" in levels:
        faults.append(f'{where}: topic must start with a word other than "fleet" and have no "#"; got "{values["topic"]}"')
    for name in ("site", "device", "kind"):
        if not values[name] and f"{{{name}}}" not in levels:
            faults.append(f"{where}: {name} is missing; put {{{name}}} into the topic, or set {name} = ...")
    if values["kind"] and values["kind"] not in FROM_DEVICES:
        faults.append(f'{where}: kind must be one of {", ".join(sorted(FROM_DEVICES))}; got "{values["kind"]}"')
    if values["ts_unit"] not in UNITS:
        faults.append(f'{where}: ts_unit must be one of {", ".join(UNITS)}; got "{values["ts_unit"]}"')
    return TopicMapping(levels, **{key: values[key] for key in _KEYS - {"topic"}})


def translate(mapping: TopicMapping, topic: str, payload: bytes) -> tuple[str, bytes] | None:
    """Convert a message to the fleetpulse format; None if the topic does not match.

    A payload that is no JSON object becomes a message without ts, since it still proves the device
    alive. A payload beyond the limits is returned unchanged, so that `decode` reports the limit.

    Returns:
        Topic and payload in the fleetpulse format.
    """
    found = mapping.match(topic)
    if found is None:
        return None
    address = f"fleet/{found['site']}/{found['device']}/{found['kind']}"
    if len(payload) > MAX_PAYLOAD_BYTES:
        return address, payload
    try:
        return address, json.dumps(_converted(mapping, payload)).encode()
    except RecursionError:
        return address, payload


def _converted(mapping: TopicMapping, payload: bytes) -> dict[str, Any]:
    """Convert a payload to the content of the fleetpulse format."""
    try:
        content: Any = json.loads(payload)
    except ValueError:
        content = None
    converted: dict[str, Any] = {}
    if isinstance(content, dict):
        converted["metrics"] = cast("dict[str, object]", content)
    ts = _at(content, mapping.ts)
    if ts is not None:
        converted["ts"] = _in_ms(ts, mapping.ts_unit)
    named = {"seq": mapping.seq, "code": mapping.code, "boot": mapping.boot, "session": mapping.session}
    for name, path in named.items():
        value = _at(content, path)
        if value is not None:
            converted[name] = value
    return converted


def _in_ms(ts: object, unit: str) -> object:
    """Convert a time to epoch milliseconds.

    An invalid value is returned unchanged, so that `decode` reports it.
    """
    if unit == "s" and isinstance(ts, int | float) and not isinstance(ts, bool) and abs(ts) <= END_OF_TIME_MS:
        return ts * 1000
    if unit == "iso" and isinstance(ts, str):
        try:
            return parse_instant_ms(ts)
        except FleetError:
            return ts
    return ts


def _at(content: Any, path: str) -> Any:
    if not path:
        return None
    for name in path.split("."):
        if not isinstance(content, dict):
            return None
        content = cast("dict[str, Any]", content).get(name)
    return content


def decode_mapped(
    mappings: Sequence[TopicMapping], topic: str, payload: bytes, received_at_ms: int, origin: Origin
) -> Row | Rejection:
    """Decode a message by the first mapping that matches its topic, if any."""
    for mapping in mappings:
        translated = translate(mapping, topic, payload)
        if translated is not None:
            return decode(*translated, received_at_ms, origin)
    return decode(topic, payload, received_at_ms, origin)
