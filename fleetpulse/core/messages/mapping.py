"""Topic mappings: rules that decode messages of other formats.

A *rule* matches topics by a pattern and names the sources of a row's fields: levels of the topic,
constants, and paths in the payload. Rules are tried in order, and the first one that takes a message
decodes it. A rule takes a message if the pattern matches its topic and ``when``, if any, is true.

Rule 1: a payload that is not JSON still proves its device alive, unless it is empty.
Rule 2: an invalid value is left out, with a note in the row; the message is kept.
Rule 3: the caller compiles paths (JMESPath, see `io.ingest.payload_paths`), so the core imports the
standard library alone. `mapping_file` parses the rules.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import Any, Final, cast
from zoneinfo import ZoneInfo

from fleetpulse.core.messages.decode import (
    MAX_PAYLOAD_BYTES,
    Address,
    Rejection,
    address_fault,
    decode,
    digest64,
    from_content,
    from_json,
    is_too_deep,
)
from fleetpulse.core.messages.text import MAX_TEXT
from fleetpulse.core.messages.topic_filters import covers, overlap
from fleetpulse.core.rows import KNOWN_NAMES, WITHOUT_BODY, Kind, Origin, Row

IGNORE: Final = "ignore"  # as a kind: the message is not a message of a device
MAX_ITEMS: Final = 1_000  # rows of one message
RESERVED_LEVELS: Final = ("fleet", "fleetpulse", "replay", "spBv1.0")  # first levels that no rule matches
SEVERAL: Final = "..."  # suffix of a placeholder for one or more levels
_JOINT: Final = ":"  # joins the levels of such a placeholder, since an id has no slash
_REFUSED_BY_NATS: Final = frozenset(" \t\n\r\f\x7f")
PLACEHOLDERS: Final = ("site", "device", "kind", "gateway", "metric")
_VARIED: Final = ("metric", "kind")  # placeholders whose words one device chooses
_LONGEST_KNOWN: Final = 512  # characters of a topic that is cached; a broker delivers topics of up to 65,535 bytes
_KINDS: Final = {kind.value: kind for kind in Kind}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_MAX_TS: Final = 10**20  # greater numbers are not times in any unit
Path = Callable[[Any], Any]
"""Compiled path: function from a JSON value to the value at the path, None if there is none."""
PathCompiler = Callable[[str], Path]
"""Compiler of paths; it raises ValueError with the fault of an expression."""
Decoded = Row | Rejection | tuple[Row | Rejection, ...]
"""Result of a message: a row, a rejection, or the results of its items; empty if a rule ignores it."""
Decoder = Callable[[str, bytes, int, Origin], Decoded]
"""Function from topic, payload, time of receipt in epoch milliseconds, and origin to the result."""


@dataclass(frozen=True, slots=True)
class KindByValue:
    """Kind of a message by a value of its payload.

    Attributes:
        path: path of the value; None for the whole payload.
        kinds: kind, or ``ignore``, by value as text.
        otherwise: kind, or ``ignore``, of other values.
    """

    path: Path | None
    kinds: Mapping[str, str]
    otherwise: str


@dataclass(frozen=True, slots=True)
class MappingRule:
    """One rule.

    Attributes:
        topic: levels of the pattern: a fixed word, ``+`` for any word, or a placeholder.
        constants: values of ``site``, ``device``, ``kind`` and ``gateway`` that the rule states.
        kind: kind by value; None if the kind is a constant or a placeholder.
        when: condition on the payload; None for every payload.
        each: path of the items of the payload, each of which is a message; None for the payload itself.
        ids: paths of ``site`` and ``device`` in the payload, or in an item.
        ts: path of the event time.
        fields: paths of other fields.
        metrics: path of the metrics; None for the whole payload.
        ts_unit: unit of ``ts``.
        ts_zone: time zone of ISO times that name none; None rejects them.
        ts_required: whether an invalid ``ts`` is a clock fault; otherwise ``received_at`` replaces it.
    """

    topic: tuple[str, ...]
    constants: Mapping[str, str] = field(default_factory=dict[str, str])
    kind: KindByValue | None = None
    when: Path | None = None
    each: Path | None = None
    ids: Mapping[str, Path] = field(default_factory=dict[str, Path])
    ts: Path | None = None
    fields: Mapping[str, Path] = field(default_factory=dict[str, Path])
    metrics: Path | None = None
    ts_unit: str = "ms"
    ts_zone: ZoneInfo | None = None
    ts_required: bool = True

    @property
    def pattern(self) -> str:
        """Pattern of the topics, as in the mapping file."""
        return "/".join(self.topic)

    @property
    def ignores(self) -> bool:
        """Whether the rule makes no row of any message."""
        return self.constants.get("kind") == IGNORE

    @property
    def subscription(self) -> str:
        """MQTT topic filter that matches at least the topics of the rule."""
        return self.filter_of({})

    def filter_of(self, words: Mapping[str, str]) -> str:
        """Return the MQTT topic filter for given words of placeholders.

        Args:
            words: word by placeholder; other placeholders match any word.
        """
        levels: list[str] = []
        for level in self.topic:
            name = placeholder(level)
            if name is None:
                levels.append(level)
            elif name in words:
                levels.append(words[name].replace(_JOINT, "/") if is_several(level) else words[name])
            elif is_several(level):
                return "/".join([*levels, "#"])
            else:
                levels.append("+")
        return "/".join(levels)

    def is_of(self, device_id: str, topic_filter: str) -> bool:
        """Return whether the rule finds no other device in the topics of an MQTT topic filter.

        Args:
            device_id: id of the device, or ``site/id``: then a device at another site is another device.
            topic_filter: filter of topics on which a rule, this or another, accepts the device's messages.
        """
        if self.ignores or not overlap(self.subscription, topic_filter):
            return True
        return all(self._always_finds(name, word, topic_filter) for name, word in _words_of(device_id).items())

    def _always_finds(self, name: str, word: str, topic_filter: str) -> bool:
        """Return whether the site or the device is a certain word in all topics of an MQTT topic filter."""
        if name in self.ids or name in self.constants:
            return name not in self.ids and self.constants[name] == word
        at = next(place for place, level in enumerate(self.topic) if placeholder(level) == name)
        several = next((place for place, level in enumerate(self.topic) if is_several(level)), len(self.topic))
        levels = topic_filter.split("/")
        if at < several:
            return levels[at : at + 1] == [word]
        if levels[-1] == "#":
            return False  # the place of the word depends on the length of the topic
        end = max(0, len(levels) - (len(self.topic) - at - 1))
        return _JOINT.join(levels[at if at == several else end - 1 : end]) == word

    def match(self, topic: str) -> dict[str, str] | None:
        """Return the words of the placeholders in a topic; None if the pattern does not match."""
        levels = topic.split("/")
        several = next((place for place, level in enumerate(self.topic) if is_several(level)), None)
        extra = len(levels) - len(self.topic)
        if extra < 0 or (several is None and extra):
            return None
        if several is not None:
            levels[several : several + extra + 1] = [_JOINT.join(levels[several : several + extra + 1])]
        found = dict(self.constants)
        for level, pattern in zip(levels, self.topic, strict=True):
            if (name := placeholder(pattern)) is not None:
                found[name] = level
            elif pattern not in ("+", level):
                return None
        if placeholder(self.topic[0]) and (levels[0] in RESERVED_LEVELS or levels[0].startswith("$")):
            return None
        return found


def _words_of(device_id: str) -> dict[str, str]:
    """Return the words that a device's id defines: of ``device``, and of ``site`` if the id includes it."""
    site, separator, name = device_id.rpartition("/")
    return {"site": site, "device": name} if separator else {"device": name}


def placeholder(level: str) -> str | None:
    """Return the name of a placeholder; None for a word."""
    return level[1:-1].removesuffix(SEVERAL) if level.startswith("{") else None


def is_several(level: str) -> bool:
    """Return whether a level of a pattern is a placeholder for one or more levels."""
    return level.endswith(SEVERAL + "}")


def has_space(topic: str) -> bool:
    """Return whether a topic or topic filter has whitespace or DEL, which nats-server refuses in topics."""
    return any(mark in _REFUSED_BY_NATS for mark in topic)


class Mappings:
    """Rules of a home, in order.

    Args:
        rules: the rules; none for a home without mappings.
    """

    def __init__(self, rules: Iterable[MappingRule] = ()) -> None:
        self.rules = tuple(rules)
        self._subscriptions = self.subscriptions()
        self._known: dict[str, tuple[tuple[MappingRule, dict[str, str]], ...]] = {}

    def subscriptions(self) -> tuple[str, ...]:
        """Return the MQTT topic filters of all rules, without a filter that another one covers.

        A broker may deliver a message once for each filter that matches it. A rule that ignores its
        messages needs no filter.
        """
        filters = list(dict.fromkeys(rule.subscription for rule in self.rules if not rule.ignores))
        return tuple(one for one in filters if not any(covers(other, one) for other in filters if other != one))

    def patterns_with_spaces(self) -> tuple[str, ...]:
        """Return the patterns of rules that the embedded broker refuses, see `has_space`."""
        return tuple(rule.pattern for rule in self.rules if not rule.ignores and has_space(rule.subscription))

    def filters_of_device(self, device_id: str) -> tuple[str, ...]:
        """Return the MQTT topic filters on which the rules accept messages of a device, and of no other.

        A rule that finds the device in the payload has no such filter, since any device may use its
        topics. A filter is also left out if a rule may decode a message on it as another device's.

        Args:
            device_id: id of the device, at any site; or ``site/id``, at that site only.
        """
        words = _words_of(device_id)
        in_topic = (rule for rule in self.rules if not rule.ids.keys() & words and not rule.ignores)
        of_device = (rule for rule in in_topic if all(rule.constants.get(name, word) == word for name, word in words.items()))
        filters = dict.fromkeys(rule.filter_of(words) for rule in of_device)
        alone = (one for one in filters if all(rule.is_of(device_id, one) for rule in self.rules))
        return tuple(one for one in alone if one.partition("/")[0] not in RESERVED_LEVELS)

    def match(self, topic: str) -> tuple[tuple[MappingRule, dict[str, str]], ...]:
        """Return the rules that match a topic, each with the words of its placeholders and constants."""
        matched = self._known.get(topic)
        if matched is None:
            found = ((rule, rule.match(topic)) for rule in self.rules)
            matched = tuple((rule, words) for rule, words in found if words is not None)
            if len(self._known) >= KNOWN_NAMES:
                self._known.clear()
            if len(topic) <= _LONGEST_KNOWN:
                self._known[topic] = matched
        return matched

    def sender_of(self, topic: str, *, with_site: bool = False) -> str | None:
        """Return the sender of a topic: the part that a client cannot vary without naming another device.

        The sender is the device that the first matching rule finds in the topic. If that rule finds the device
        in the payload, the sender is the topic without words of ``{metric}`` and ``{kind}``. None if no rule matches.

        Args:
            topic: topic of a message.
            with_site: whether devices of two sites differ, even with one id.
        """
        matched = next((one for one in self.match(topic) if not one[0].ignores), None)
        if matched is None:
            return None
        rule, words = matched
        if "device" in words:
            return f"{words['site']}/{words['device']}" if with_site and "site" in words else words["device"]
        if not any(placeholder(level) in _VARIED for level in rule.topic):
            return topic
        return rule.filter_of({name: word for name, word in words.items() if name not in _VARIED})

    def decode(self, topic: str, payload: bytes, received_at_ms: int, origin: Origin) -> Decoded:
        """Decode a message by the first rule that takes it.

        Args:
            topic: topic of the message. If no rule matches it, the message is ignored if the subscription
                of a rule covers the topic; otherwise it is decoded in fleetpulse's own format.
            payload: bytes of the message.
            received_at_ms: time at which the bridge received the message, epoch milliseconds.
            origin: source of the message.
        """
        matched = self.match(topic)
        if not matched:
            return () if self._is_bycatch(topic) else decode(topic, payload, received_at_ms, origin)
        if len(payload) > MAX_PAYLOAD_BYTES:
            return Rejection("size", f"a payload has at most {MAX_PAYLOAD_BYTES} bytes; got {len(payload)}")
        taken = self.taken_by(matched, payload)
        if taken is None:
            return ()
        rule, words, content = taken
        digest = digest64(identified_payload(topic, payload))
        if rule.each is None:
            return _decoded(rule, words, content, received_at_ms, digest)
        items = items_of(rule.each(content))
        if len(items) > MAX_ITEMS:
            return Rejection("size", f"a message has at most {MAX_ITEMS} items; got {len(items)}")
        digests = (digest64(b"%d\0%d" % (digest, number)) for number in range(len(items)))
        found = (_decoded(rule, words, item, received_at_ms, one) for item, one in zip(items, digests, strict=True))
        return tuple(one for one in found if not isinstance(one, tuple))

    def decided_by_topic(self, topic: str) -> tuple[MappingRule, Address] | None:
        """Return rule and address of all messages on a topic, except those with an empty payload.

        Returns:
            None if the rule, the address or the number of rows depends on the payload, or if no message on the
            topic is a row.
        """
        matched = self.match(topic)
        if not matched:
            return None
        rule, words = matched[0]
        if rule.when or rule.each or rule.kind or rule.ids or words["kind"] not in WITHOUT_BODY:
            return None
        address = Address(words["site"], words["device"], _KINDS[words["kind"]])
        return (rule, address) if address_fault(address) is None else None

    def has_items(self, topic: str) -> bool:
        """Return whether a message on a topic may have items, each of which is a row."""
        return any(rule.each is not None for rule, _ in self.match(topic))

    def row_count(self, topic: str, payload: bytes) -> int:
        """Return the number of rows that `decode` can make of a message: the number of its items, else 1."""
        several = len(payload) <= MAX_PAYLOAD_BYTES and self.has_items(topic)
        taken = self.taken_by(self.match(topic), payload) if several else None
        if taken is None or taken[0].each is None:
            return 1
        count = len(items_of(taken[0].each(taken[2])))
        return count if 0 < count <= MAX_ITEMS else 1

    def _is_bycatch(self, topic: str) -> bool:
        """Return whether a topic that no rule matches belongs to the subscription of a rule, such as ``a/#``."""
        return not topic.startswith("fleet/") and any(covers(one, topic) for one in self._subscriptions)

    @staticmethod
    def taken_by(
        matched: Iterable[tuple[MappingRule, dict[str, str]]], payload: bytes
    ) -> tuple[MappingRule, dict[str, str], Any] | None:
        """Return the first of some rules that takes a payload, with its words and the payload's content.

        No rule takes an empty payload: it clears a retained message.

        Args:
            matched: rules that match the topic, see `match`.
            payload: bytes of the message.
        """
        if not payload:
            return None
        content = read_payload(payload)
        taken = first_rule(matched, content)
        return None if taken is None else (*taken, content)


NO_MAPPINGS: Final = Mappings()


def first_rule(matched: Iterable[tuple[MappingRule, dict[str, str]]], content: Any) -> tuple[MappingRule, dict[str, str]] | None:
    """Return the first of some rules whose condition holds, with its words."""
    for one in matched:
        when = one[0].when
        if when is None or is_true(when(content)):
            return one
    return None


def identified_payload(topic: str, payload: bytes) -> bytes:
    """Return the bytes whose digest identifies a mapped message.

    The topic is a part of them: a device may send equal values on several topics at one instant.
    """
    return topic.encode() + b"\0" + payload


def rows_of(decoded: Decoded) -> tuple[Row | Rejection, ...]:
    """Return the rows and rejections of a message."""
    return decoded if isinstance(decoded, tuple) else (decoded,)


def read_payload(payload: bytes) -> Any:
    """Return the content of a payload.

    Returns:
        The JSON value, with NaN and infinities as null. The text if it is not JSON. None if it is
        not UTF-8, or more than `MAX_DEPTH` levels deep.
    """
    try:
        text = payload.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    try:
        content = from_json(text)
    except RecursionError:
        return None
    except ValueError:
        return text.strip()
    return None if is_too_deep(payload, content) else content


def items_of(value: Any) -> list[Any]:
    """Return the elements of an array, or the entries of an object as objects with ``key`` and ``value``."""
    if isinstance(value, dict):
        return [{"key": key, "value": item} for key, item in cast("dict[str, Any]", value).items()]
    return cast("list[Any]", value) if isinstance(value, list) else []


def is_true(value: Any) -> bool:
    """Return the truth of a value as JMESPath defines it: empty values, false and null are false, 0 is true."""
    return value is not None and value is not False and (value == 0 or bool(value))


def _decoded(
    rule: MappingRule, words: Mapping[str, str], content: Any, received_at_ms: int, digest: int
) -> Row | Rejection | tuple[()]:
    found = extract(rule, words, content)
    if not isinstance(found, tuple):
        return () if found is None else found
    return from_content(*found, received_at_ms, digest, clock_required=rule.ts_required)


def extract(rule: MappingRule, words: Mapping[str, str], content: Any) -> tuple[Address, dict[str, Any]] | Rejection | None:
    """Return address and fields of a message, with the field names of the fleetpulse format.

    Args:
        rule: rule that takes the message.
        words: words of its placeholders and constants.
        content: content of the payload, or an item of it.

    Returns:
        None if the rule ignores the message; a rejection if it names no device or no kind.
    """
    kind = _kind_of(rule, words, content)
    if kind == IGNORE:
        return None
    if kind not in WITHOUT_BODY:
        return Rejection("topic", f'the kind must be one of {", ".join(sorted(WITHOUT_BODY))}; got "{kind[:MAX_TEXT]}"')
    for name, path in rule.ids.items():
        value = _as_id(path(content))
        if value is None:
            return Rejection("field", f"the path of {name} must lead to a text or a whole number; it leads to neither")
        words = {**words, name: value}
    ours: dict[str, Any] = {name: path(content) for name, path in rule.fields.items()}
    for name in ("seq", "uptime_s"):
        if name in ours:
            ours[name] = as_number(ours[name])
    if "gateway" in words:
        ours["gateway"] = words["gateway"]
    ours["metrics"] = as_metrics(rule, words, content if rule.metrics is None else rule.metrics(content))
    if rule.ts is not None:
        ours["ts"] = in_ms(rule.ts(content), rule)
    return Address(words["site"], words["device"], _KINDS[kind]), ours


def _kind_of(rule: MappingRule, words: Mapping[str, str], content: Any) -> str:
    if rule.kind is None:
        return words["kind"]
    value = content if rule.kind.path is None else rule.kind.path(content)
    text = value if isinstance(value, str) else json.dumps(value)
    return rule.kind.kinds.get(text, rule.kind.otherwise)


def _as_id(value: Any) -> str | None:
    if isinstance(value, str):
        return value.replace("/", _JOINT) or None
    return str(value) if type(value) is int and abs(value) < 2**63 else None


def as_number(value: Any) -> Any:
    """Convert a number as text to a number; return an invalid value as it is, for `decode` to report."""
    if isinstance(value, str) and len(value) < 20 and value.strip().isdecimal():
        return int(value)
    return value


def as_metrics(rule: MappingRule, words: Mapping[str, str], value: Any) -> dict[str, Any] | None:
    """Return the metrics of a message.

    Args:
        rule: rule that takes the message.
        words: words of its placeholders and constants.
        value: value at the path of the metrics; without a path, the content of the payload.
    """
    if isinstance(value, dict):
        return cast("dict[str, Any]", value)
    if value is None or (rule.kind is not None and rule.metrics is None) or (isinstance(value, str) and len(value) > MAX_TEXT):
        return None
    return {words.get("metric", "value"): value}


def in_ms(ts: Any, rule: MappingRule) -> Any:
    """Convert a time to epoch milliseconds; return an invalid value as it is, for `decode` to report."""
    if rule.ts_unit == "iso":
        return _iso_in_ms(ts, rule.ts_zone)
    if isinstance(ts, str):
        try:
            number = float(ts)
        except ValueError:
            return ts
        if not isfinite(number):
            return ts
        ts = int(ts) if ts.strip().isdecimal() and len(ts) < 30 else number
    if not isinstance(ts, int | float) or isinstance(ts, bool) or not abs(ts) <= _MAX_TS:
        return ts
    if rule.ts_unit == "s":
        return ts * 1_000
    if rule.ts_unit == "us":
        return int(ts) // 1_000
    return int(ts) // 1_000_000 if rule.ts_unit == "ns" else ts


def _iso_in_ms(ts: Any, zone: ZoneInfo | None) -> Any:
    if not isinstance(ts, str):
        return ts
    try:
        moment = datetime.fromisoformat(ts)
        if moment.tzinfo is None:
            if zone is None:
                return ts
            moment = moment.replace(tzinfo=zone)
        return (moment - _EPOCH) // _MILLISECOND
    except (ValueError, OverflowError):
        return ts
