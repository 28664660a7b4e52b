"""Mapping: devices that cannot speak our format are read as if they did.

A mapping says which topics it is for, where site, device and kind stand, and where ts and seq are in the payload.
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
    """One kind of foreign topic.

    Attributes:
        topic: its levels: a word, ``+`` for any, or ``{site}``, ``{device}``, ``{kind}`` for what stands there.
        site, device, kind: what to take where the topic does not say.
        ts: dotted path of the time in the payload, such as ``meta.time``; empty where it has none.
        ts_unit: ms, s or iso.
        seq, code, boot, session: dotted paths of the counter, the error code, and the names of the device's run and of its
            connection; empty where there is none.
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
        """The MQTT topic filter that it needs."""
        return "/".join("+" if level.startswith("{") else level for level in self.topic)

    def match(self, topic: str) -> dict[str, str] | None:
        """Return site, device and kind of a topic; None where it is not for this mapping."""
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
    """Read a mapping file: ``[[mapping]]`` tables.

    Raises:
        FleetError: with all its faults, one a line.
    """
    faults: list[str] = []
    tables = content.get("mapping")
    listed = cast("list[Any]", tables) if isinstance(tables, list) else []
    if not listed:
        faults.append("a mapping file holds at least one [[mapping]] table")
    mappings = [_parse(cast("Mapping[str, Any]", table), number, faults) for number, table in enumerate(listed, 1)]
    if faults:
        raise FleetError("the mapping has faults:\n" + "\n".join(f"  {fault}" for fault in faults), code="mapping-faulty")
    return tuple(mappings)


def _parse(table: Mapping[str, Any], number: int, faults: list[str]) -> TopicMapping:
    where = f"mapping {number}"
    faults.extend(f'{where}: "{key}" is not known; there are {", ".join(sorted(_KEYS))}' for key in table.keys() - _KEYS)
    values = {key: str(table.get(key, "")) for key in _KEYS}
    values["ts_unit"] = values["ts_unit"] or "ms"
    levels = tuple(values["topic"].split("/"))
    for level in levels:
        if level.startswith("{") and level not in ("{site}", "{device}", "{kind}"):
            faults.append(f'{where}: a topic has {{site}}, {{device}} and {{kind}}; got "{level}"')
    if not values["topic"] or levels[0].startswith(("{", "+", "#")) or levels[0] == "fleet" or "#" in levels:
        faults.append(f'{where}: topic begins with a word other than "fleet" and has no "#"; got "{values["topic"]}"')
    for name in ("site", "device", "kind"):
        if not values[name] and f"{{{name}}}" not in levels:
            faults.append(f"{where}: {name} stands in the topic as {{{name}}}, or is given by {name} = ...")
    if values["kind"] and values["kind"] not in FROM_DEVICES:
        faults.append(f'{where}: kind is one of {", ".join(sorted(FROM_DEVICES))}; got "{values["kind"]}"')
    if values["ts_unit"] not in UNITS:
        faults.append(f'{where}: ts_unit is one of {", ".join(UNITS)}; got "{values["ts_unit"]}"')
    return TopicMapping(levels, **{key: values[key] for key in _KEYS - {"topic"}})


def translate(mapping: TopicMapping, topic: str, payload: bytes) -> tuple[str, bytes] | None:
    """Return a foreign message in our format; None where the topic is not for this mapping.

    A payload that is no JSON object becomes a message without ts: the device spoke, and that counts. One beyond our limits stays
    as it is, so that `decode` says which.
    """
    found = mapping.match(topic)
    if found is None:
        return None
    address = f"fleet/{found['site']}/{found['device']}/{found['kind']}"
    if len(payload) > MAX_PAYLOAD_BYTES:
        return address, payload
    try:
        return address, json.dumps(_ours(mapping, payload)).encode()
    except RecursionError:
        return address, payload


def _ours(mapping: TopicMapping, payload: bytes) -> dict[str, Any]:
    """Return what a payload says, as we write it."""
    try:
        content: Any = json.loads(payload)
    except ValueError:
        content = None
    ours: dict[str, Any] = {}
    if isinstance(content, dict):
        ours["metrics"] = cast("dict[str, object]", content)
    ts = _at(content, mapping.ts)
    if ts is not None:
        ours["ts"] = _in_ms(ts, mapping.ts_unit)
    named = {"seq": mapping.seq, "code": mapping.code, "boot": mapping.boot, "session": mapping.session}
    for name, path in named.items():
        value = _at(content, path)
        if value is not None:
            ours[name] = value
    return ours


def _in_ms(ts: object, unit: str) -> object:
    """Return a time in epoch milliseconds; as it is where it does not fit, so that `decode` names what is wrong."""
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
    """Decode a message, through the first mapping that fits its topic."""
    for mapping in mappings:
        ours = translate(mapping, topic, payload)
        if ours is not None:
            return decode(*ours, received_at_ms, origin)
    return decode(topic, payload, received_at_ms, origin)
