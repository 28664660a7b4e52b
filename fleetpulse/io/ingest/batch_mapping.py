"""Columnar decoder of mapped messages, equivalent to `Mappings.decode`.

Rule 1: `Mappings.decode` is the definition. The same rules extract the fields of a message; they are
converted in columns, see `batch_decode`.
Rule 2: a message is *plain* if its payload is strict JSON, is one message, and has fields of the usual
types. All others are left to `Mappings.decode`.
Rule 3: if the topic decides on rule and address, it is parsed once, and the messages of a rule are
extracted field by field (`_RuleColumns`). Other messages are extracted one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.compute import pc
from fleetpulse.core.messages.decode import MAX_DEPTH, Address, address_fault
from fleetpulse.core.messages.mapping import (
    MappingRule,
    Mappings,
    Path,
    as_metrics,
    as_number,
    extract,
    first_rule,
    in_ms,
    placeholder,
)
from fleetpulse.core.rows import KNOWN_NAMES
from fleetpulse.io.ingest.batch_decode import (
    FIELDS,
    MOST_BYTES,
    TEXTS,
    WHOLES,
    KnownTopics,
    Plain,
    PlainMessages,
    candidates,
    named_columns,
    payload_stats,
    plain_messages,
    read_contents,
)
from fleetpulse.io.ingest.payload_paths import field_of

_NONE: Final = type(None)
_NUMBERS: Final = frozenset({int, float, _NONE})
_TEXTS_OR_WHOLES: Final = frozenset({str, int, _NONE})
_TYPES: Final = {
    "ts": _NUMBERS,
    **{name: _TEXTS_OR_WHOLES if numbers else frozenset({str, _NONE}) for name, numbers in TEXTS.items()},
    **dict.fromkeys(WHOLES, _NUMBERS),
    "metrics": frozenset({dict, _NONE}),
}
_METRICS: Final = frozenset({dict})
_AS_NUMBERS: Final = ("ts", *WHOLES)  # fields that a rule converts from text
# Types that a decoder of `_RuleColumns` accepts. A payload with another type is not plain.
_ACCEPTED: Final = {
    **{name: str | int | None if numbers else str | None for name, numbers in TEXTS.items()},
    **dict.fromkeys(_AS_NUMBERS, str | int | float | None),
    "metrics": Any,
}
_MOST_MAPPINGS: Final = 2  # whose topics are known: those of a home, before and after a change
_RULE: Final = "rule"  # column of topics: index of the rule
_read: Final = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class _Extracted:
    """Extracted messages.

    Attributes:
        places: indices of the messages.
        named: columns of their addresses, see `named_columns`.
        read: values of each field of `FIELDS`.
        plain: which messages are plain.
    """

    places: NDArray[np.int64]
    named: dict[str, pa.Array]
    read: dict[str, list[Any]]
    plain: Plain


class _RuleColumns:
    """Extraction of the fields of many payloads by one rule, with the results of `extract`.

    If all paths are fields of the payload, a typed decoder of these fields reads it. Otherwise the paths
    are applied to its whole content.

    Args:
        rule: rule whose address and number of rows do not depend on the payload.
    """

    def __init__(self, rule: MappingRule) -> None:
        self.rule = rule
        self._has_gateway = "gateway" in rule.constants or "gateway" in map(placeholder, rule.topic)
        paths: dict[str, Path | None] = {**rule.fields, "metrics": rule.metrics}
        if rule.ts is not None:
            paths["ts"] = rule.ts
        self._paths = paths
        names = {name: None if path is None else field_of(path) for name, path in paths.items()}
        renamed = {name: field for name, field in names.items() if field is not None}
        self._typed = len(set(renamed.values())) == len(names)
        if self._typed:
            fields = [(name, _ACCEPTED[name], None) for name in names]
            content = msgspec.defstruct("Content", fields, rename=renamed, gc=False)
            self._decode, self._nothing = msgspec.json.Decoder(content).decode, content()

    def read(
        self, mappings: Mappings, topics: Sequence[str], raw: Sequence[bytes], escaped: Plain
    ) -> tuple[dict[str, list[Any]], Plain]:
        """Return the values of each field of `FIELDS`, and which messages are plain.

        Args:
            mappings: mappings with the rule.
            topics: topics of the messages.
            raw: their payloads.
            escaped: which payloads need a full check, see `payload_stats`.
        """
        if self._typed:
            plain, contents = read_contents(self._decode, raw, escaped, self._nothing)
            found = {name: list(map(attrgetter(name), contents)) for name in self._paths}
        else:
            plain, contents = read_contents(_read, raw, np.zeros(len(raw), np.bool_), None)
            found = {name: contents if path is None else list(map(path, contents)) for name, path in self._paths.items()}
        absent = [None] * len(raw)
        read = {name: self._converted(name, found.get(name, absent), mappings, topics) for name in FIELDS}
        if self._has_gateway:
            read["gateway"] = [mappings.match(topic)[0][1]["gateway"] for topic in topics]
        return read, plain

    def _converted(self, name: str, values: list[Any], mappings: Mappings, topics: Sequence[str]) -> list[Any]:
        """Convert the values of a field as `extract` does."""
        types = set(map(type, values))
        if name == "metrics" and types != _METRICS:
            messages = zip(values, topics, strict=True)
            return [
                value if type(value) is dict else as_metrics(self.rule, mappings.match(topic)[0][1], value)
                for value, topic in messages
            ]
        if name == "ts" and (self.rule.ts_unit != "ms" or str in types):
            return [in_ms(value, self.rule) for value in values]
        if name in WHOLES and str in types:
            return list(map(as_number, values))
        return values


class _MappedTopics:
    """Topics that decide on rule and address, with the rules' extraction.

    Args:
        mappings: mappings of a home.
    """

    def __init__(self, mappings: Mappings) -> None:
        self._mappings = mappings
        self._rules = {id(rule): number for number, rule in enumerate(mappings.rules)}
        self._columns: dict[int, _RuleColumns] = {}
        self._topics = KnownTopics(self._parse, _columns)

    def _parse(self, topic: str) -> tuple[int, Address] | None:
        decided = self._mappings.decided_by_topic(topic)
        return None if decided is None else (self._rules[id(decided[0])], decided[1])

    def extracted(self, topics: pa.Array, payloads: pa.Array, selected: Plain) -> list[_Extracted]:
        """Extract the messages whose topics decide on rule and address, in one part for each rule."""
        places, numbers, chosen, escaped = candidates(self._topics, topics, payloads, selected)
        named = self._topics.named(numbers)
        rules = named.pop(_RULE).to_numpy()
        names, raw = topics.take(pa.array(places)).to_pylist(), chosen.to_pylist()
        parts: list[_Extracted] = []
        for rule in np.unique(rules).tolist():
            if rule not in self._columns:
                self._columns[rule] = _RuleColumns(self._mappings.rules[rule])
            at = np.flatnonzero(rules == rule)
            if len(at) < len(rules):
                listed, of_rule = at.tolist(), pa.array(at)
                part = {name: column.take(of_rule) for name, column in named.items()}
                topics_of, raw_of = [names[place] for place in listed], [raw[place] for place in listed]
            else:
                part, topics_of, raw_of = named, names, raw
            read, plain = self._columns[rule].read(self._mappings, topics_of, raw_of, escaped[at])
            parts.append(_Extracted(places[at], part, read, plain))
        return parts


def _columns(parsed: Sequence[tuple[int, Address]]) -> dict[str, pa.Array]:
    return {**named_columns([address for _, address in parsed]), _RULE: pa.array([rule for rule, _ in parsed], pa.int64())}


_topics_of: Final = lru_cache(_MOST_MAPPINGS)(_MappedTopics)


def decode_plain_mapped(
    mappings: Mappings, topics: pa.Array, payloads: pa.Array, received_at_ms: NDArray[np.int64], selected: Plain
) -> PlainMessages:
    """Decode the plain mapped messages.

    Args:
        mappings: mappings of the home.
        topics: topics as strings, without nulls.
        payloads: payloads as bytes, without nulls.
        received_at_ms: time at which the bridge received each message, epoch milliseconds.
        selected: False for each message to skip.
    """
    left = selected & pc.greater(pc.binary_length(payloads), 0).to_numpy(False)
    parts = _topics_of(mappings).extracted(topics, payloads, left)
    for part in parts:
        left[part.places] = False
    if not parts or left.any():
        parts.append(_extracted_one_by_one(mappings, topics, payloads, left))
    found = parts[0] if len(parts) == 1 else _joined(parts)
    _exclude_unusual(found.read, found.plain)
    at = pa.array(found.places)
    identified = pc.binary_join_element_wise(topics.take(at).cast(pa.binary()), payloads.take(at), b"\0")
    return plain_messages(
        found.places, found.named, found.read, received_at_ms[found.places], identified.to_pylist(), found.plain
    )


def _joined(parts: Sequence[_Extracted]) -> _Extracted:
    """Join the parts, in the order of their messages."""
    places = np.concatenate([part.places for part in parts])
    order = np.argsort(places)
    listed, chosen = order.tolist(), pa.array(order)
    named = {name: pa.concat_arrays([part.named[name] for part in parts]).take(chosen) for name in parts[0].named}
    read = {name: [value for part in parts for value in part.read[name]] for name in FIELDS}
    read = {name: [values[place] for place in listed] for name, values in read.items()}
    return _Extracted(places[order], named, read, np.concatenate([part.plain for part in parts])[order])


def _extracted_one_by_one(mappings: Mappings, topics: pa.Array, payloads: pa.Array, selected: Plain) -> _Extracted:
    """Extract messages whose rule, address or number of rows depends on the payload."""
    sizes, brackets, _ = payload_stats(payloads)
    usual = np.flatnonzero(selected & (sizes <= MOST_BYTES) & (brackets <= MAX_DEPTH))
    chosen = pa.array(usual)
    places, addresses, rows = list[int](), list[Address](), list[tuple[Any, ...]]()
    messages = zip(usual.tolist(), topics.take(chosen).to_pylist(), payloads.take(chosen).to_pylist(), strict=True)
    for place, topic, payload in messages:
        matched = mappings.match(topic)
        found = _extracted(matched, payload) if matched else None
        if found is not None:
            places.append(place)
            addresses.append(found[0])
            rows.append(tuple(map(found[1].get, FIELDS)))
    columns = map(list, zip(*rows, strict=True)) if rows else ([] for _ in FIELDS)
    read = dict(zip(FIELDS, columns, strict=True))
    return _Extracted(np.array(places, np.int64), named_columns(addresses), read, np.ones(len(places), np.bool_))


def _extracted(matched: tuple[tuple[MappingRule, dict[str, str]], ...], payload: bytes) -> tuple[Address, dict[str, Any]] | None:
    """Return address and fields of a message; None if its payload is not strict JSON, or it may have several rows or none."""
    try:
        content = _read(payload)
    except (ValueError, RecursionError):
        return None
    taken = first_rule(matched, content)
    if taken is None or taken[0].each is not None:
        return None
    found = extract(*taken, content)
    return found if isinstance(found, tuple) and _fault(found[0]) is None else None


_fault: Final = lru_cache(KNOWN_NAMES)(address_fault)


def _exclude_unusual(read: dict[str, list[Any]], plain: Plain) -> None:
    """Mark messages with a value of an unusual type as not plain, and remove the value."""
    for name, types in _TYPES.items():
        column = read[name]
        if not types.issuperset(map(type, column)):
            read[name] = [value if type(value) in types else None for value in column]
            plain &= np.fromiter((type(value) in types for value in column), np.bool_, len(column))
