"""Columnar decoder of mapped messages, equivalent to `Mappings.decode`.

Rule 1: `Mappings.decode` is the definition. The same rules extract the fields of a message; they are
converted in columns, see `batch_decode`.
Rule 2: a message is *plain* if its payload is strict JSON, is one message, and has fields of the usual
types. All others are left to `Mappings.decode`.
"""

from functools import lru_cache
from itertools import compress
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.core.messages.decode import MAX_DEPTH, Address, address_fault
from fleetpulse.core.messages.mapping import MappingRule, Mappings, extract, first_rule, identified_payload
from fleetpulse.core.rows import KNOWN_NAMES
from fleetpulse.io.ingest.batch_decode import (
    FIELDS,
    MOST_BYTES,
    TEXTS,
    WHOLES,
    Plain,
    PlainMessages,
    named_columns,
    payload_stats,
    plain_messages,
)

_NUMBERS: Final = frozenset({int, float, type(None)})
_TEXTS_OR_WHOLES: Final = frozenset({str, int, type(None)})
_TYPES: Final = {
    "ts": _NUMBERS,
    **{name: _TEXTS_OR_WHOLES if numbers else frozenset({str, type(None)}) for name, numbers in TEXTS.items()},
    **dict.fromkeys(WHOLES, _NUMBERS),
    "metrics": frozenset({dict, type(None)}),
}
_FIELD_TYPES: Final = tuple(_TYPES[name] for name in FIELDS)
_read: Final = msgspec.json.Decoder().decode


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
    sizes, brackets, _ = payload_stats(payloads)
    candidates = np.flatnonzero(selected & (sizes > 0) & (sizes <= MOST_BYTES) & (brackets <= MAX_DEPTH))
    chosen = pa.array(candidates)
    messages = zip(candidates.tolist(), topics.take(chosen).to_pylist(), payloads.take(chosen).to_pylist(), strict=True)
    places, addresses, digested, rows = list[int](), list[Address](), list[bytes](), list[tuple[Any, ...]]()
    for place, topic, payload in messages:
        matched = mappings.match(topic)
        found = _extracted(matched, payload) if matched else None
        if found is not None:
            places.append(place)
            addresses.append(found[0])
            digested.append(identified_payload(topic, payload))
            rows.append(tuple(map(found[1].get, FIELDS)))
    usual = _usual(rows)
    if not all(usual):
        places, addresses = list(compress(places, usual)), list(compress(addresses, usual))
        digested, rows = list(compress(digested, usual)), list(compress(rows, usual))
    columns = map(list, zip(*rows, strict=True)) if rows else ([] for _ in FIELDS)
    read = dict(zip(FIELDS, columns, strict=True))
    at = np.array(places, np.int64)
    return plain_messages(at, named_columns(addresses), read, received_at_ms[at], digested, np.ones(len(at), np.bool_))


def _usual(rows: list[tuple[Any, ...]]) -> list[bool]:
    """Return for each row of fields whether all values have the usual types."""
    unusual = set[int]()
    for types, column in zip(_FIELD_TYPES, zip(*rows, strict=True), strict=True) if rows else ():
        found = list(map(type, column))
        if not types.issuperset(found):
            unusual.update(place for place, value_type in enumerate(found) if value_type not in types)
    return [place not in unusual for place in range(len(rows))]


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
