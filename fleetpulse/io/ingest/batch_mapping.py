"""Columnar decoder of mapped messages, equivalent to `Mappings.decode`.

Rule 1: `Mappings.decode` is the definition. The same rules extract the fields of a message; they are
converted in columns, see `batch_decode`.
Rule 2: a message is *plain* if its payload is strict JSON, is one message, and has fields of the usual
types. All others are left to `Mappings.decode`.
"""

from functools import lru_cache
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
_FIELD_TYPES: Final = tuple((name, _TYPES[name]) for name in FIELDS)
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
    places, addresses, digested = list[int](), list[Address](), list[bytes]()
    read: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for place, topic, payload in messages:
        matched = mappings.match(topic)
        found = _extracted(matched, payload) if matched else None
        if found is not None:
            address, ours = found
            places.append(place)
            addresses.append(address)
            digested.append(identified_payload(topic, payload))
            for name in FIELDS:
                read[name].append(ours.get(name))
    at = np.array(places, np.int64)
    return plain_messages(at, addresses, named_columns(addresses), read, received_at_ms[at], digested, np.ones(len(at), np.bool_))


def _extracted(matched: tuple[tuple[MappingRule, dict[str, str]], ...], payload: bytes) -> tuple[Address, dict[str, Any]] | None:
    """Return address and fields of a plain message; None for any other."""
    try:
        content = _read(payload)
    except (ValueError, RecursionError):
        return None
    taken = first_rule(matched, content)
    if taken is None or taken[0].each is not None:
        return None
    found = extract(*taken, content)
    if not isinstance(found, tuple) or _fault(found[0]) is not None:
        return None
    ours = found[1]
    return found if all(type(ours.get(name)) in types for name, types in _FIELD_TYPES) else None


_fault: Final = lru_cache(KNOWN_NAMES)(address_fault)
