"""Columnar decoder of a segment's messages, equivalent to `core.messages.decode`.

Rule 1: `decode` is the definition. The columns have the values that `decode` would return, byte for
byte.
Rule 2: a message is *plain* if a strict parser accepts its payload and its fields have the usual
types. Only plain messages are in the columns. All others are left to `decode` and do not affect the
plain ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fleetpulse.columnar.codec.hashing import digests
from fleetpulse.columnar.compute import pc
from fleetpulse.core.messages.decode import MAX_DEPTH, NO_TS, Address, as_whole, metrics_text, plain_address
from fleetpulse.core.messages.text import MAX_TEXT, as_text
from fleetpulse.core.rows import KNOWN_NAMES, Clock, Kind, hash64
from fleetpulse.core.times import END_OF_TIME_MS, EPOCH_2000_MS

MOST_BYTES: Final = 4_096  # of a plain payload, so that no integer in it exceeds Python's digit limit
_NONE: Final = type(None)
_CLOCKS: Final = (Clock.DEVICE.value, Clock.RECEIVED.value, Clock.RECEIVED.value)
_NOTES: Final = (None, None, NO_TS)
_BY_DEVICE, _BY_RECEIPT, _WITHOUT_TS = range(3)  # indices of _CLOCKS and _NOTES
_ESCAPED: Final = r"[^ -\[\]-~]"  # a byte that is not printable ASCII, or a backslash
# Values that Python may write differently: numbers with an exponent, NaN and infinity (null here),
# and text with escapes.
_OTHERWISE: Final = rf"[0-9.]e|0\.0000|[:,\[-][0-9]{{16}}|null|{_ESCAPED}"
Plain = NDArray[np.bool_]


# Text fields, and whether a number is allowed instead of a text.
TEXTS: Final = {"boot": True, "session": True, "code": True, "firmware": False, "gateway": False}
WHOLES: Final = ("seq", "uptime_s")
FIELDS: Final = ("ts", *TEXTS, *WHOLES, "metrics")
_NAMED: Final = ("device_id", "site", "kind")
_address_fields: Final = attrgetter(*_NAMED)
_OWN_PREFIX: Final = "fleet/"
NOT_PLAIN: Final = -1  # number of a topic that is not plain
_Parsed = TypeVar("_Parsed")


class _Content(msgspec.Struct, gc=False):
    """Plain payload: known fields with their usual types; other fields are skipped."""

    ts: int | float | None = None
    boot: str | int | None = None
    session: str | int | None = None
    code: str | int | None = None
    firmware: str | None = None
    gateway: str | None = None
    seq: int | float | None = None
    uptime_s: int | float | None = None
    metrics: dict[str, Any] | None = None
    device_id: str | msgspec.UnsetType = msgspec.UNSET
    site: str | msgspec.UnsetType = msgspec.UNSET
    kind: str | msgspec.UnsetType = msgspec.UNSET


_FIELDS: Final = _Content.__struct_fields__
_NOTHING: Final = _Content()
_read: Final = msgspec.json.Decoder(_Content).decode
_check: Final = msgspec.json.Decoder().decode  # `_read` does not fully check the fields that it skips
_write: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class PlainMessages:
    """Decoded plain messages.

    Attributes:
        places: indices of the plain messages among the given ones, in order, from 0.
        columns: bronze columns except those of the segment itself, one row for each of ``places``.
            Times are in milliseconds.
    """

    places: NDArray[np.int64]
    columns: pa.Table


def named_columns(addresses: Sequence[Address]) -> dict[str, pa.Array]:
    """Return the columns of device, site and kind of addresses, and of the hash of the device."""
    values = zip(*map(_address_fields, addresses), strict=True) if addresses else ((), (), ())
    named = {name: pa.array(column, pa.string()) for name, column in zip(_NAMED, values, strict=True)}
    hashes = np.fromiter((hash64(address.device_id) for address in addresses), np.int64, len(addresses))
    return {**named, "device_hash": pa.array(hashes)}


class KnownTopics(Generic[_Parsed]):
    """Results of parsing topics, as columns; topics are parsed only once.

    Memory is bounded: beyond `KNOWN_NAMES` topics, all are forgotten before the next segment.

    Args:
        parse: function from a topic to its result; None if the topic is not plain.
        columns: function from results to columns, among them those of `named_columns`.
    """

    def __init__(
        self, parse: Callable[[str], _Parsed | None], columns: Callable[[Sequence[_Parsed]], dict[str, pa.Array]]
    ) -> None:
        self._parse, self._columns = parse, columns
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[str, int] = {}
        self._named = self._columns(())

    def numbers(self, topics: Sequence[str]) -> NDArray[np.int64]:
        """Return the number of the result of each topic; `NOT_PLAIN` if it has none."""
        try:
            return np.fromiter(map(self._numbers.__getitem__, topics), np.int64, len(topics))
        except KeyError:
            self._add(topics)
            return np.fromiter(map(self._numbers.__getitem__, topics), np.int64, len(topics))

    def named(self, numbers: NDArray[np.int64]) -> dict[str, pa.Array]:
        """Return the columns of results."""
        chosen = pa.array(numbers)
        return {name: column.take(chosen) for name, column in self._named.items()}

    def _add(self, topics: Sequence[str]) -> None:
        if len(self._numbers) > KNOWN_NAMES:
            self._forget()
        added = list[_Parsed]()
        first = len(self._named["kind"])
        for topic in topics:
            if topic not in self._numbers:
                parsed = self._parse(topic)
                self._numbers[topic] = NOT_PLAIN if parsed is None else first + len(added)
                added += () if parsed is None else (parsed,)
        if added:
            columns = self._columns(added)
            self._named = {name: pa.concat_arrays([column, columns[name]]) for name, column in self._named.items()}


_KNOWN: Final = KnownTopics(plain_address, named_columns)


def decode_plain(topics: pa.Array, payloads: pa.Array, received_at_ms: NDArray[np.int64], selected: Plain) -> PlainMessages:
    """Decode the plain messages.

    Args:
        topics: topics as strings, without nulls.
        payloads: payloads as bytes, without nulls.
        received_at_ms: time at which the bridge received each message, epoch milliseconds.
        selected: False for each message to skip.
    """
    in_format = pc.starts_with(topics, _OWN_PREFIX).to_numpy(False)
    places, numbers, payloads, escaped = candidates(_KNOWN, topics, payloads, in_format & selected)
    named, raw = _KNOWN.named(numbers), payloads.to_pylist()
    is_death = pc.equal(named["kind"], Kind.DEATH.value).to_numpy(False)
    plain, contents = read_contents(_read, raw, escaped, _NOTHING)
    for place in np.flatnonzero(is_death & ~plain).tolist():
        plain[place] = not raw[place]  # the payload of a death may be empty
    read = {name: list(map(attrgetter(name), contents)) for name in _FIELDS}  # no tuples for the collector to visit
    for name in _NAMED:
        _exclude_disagreeing(read[name], named[name], plain)
    return plain_messages(places, named, read, received_at_ms[places], raw, plain)


def candidates(
    known: KnownTopics[Any], topics: pa.Array, payloads: pa.Array, selected: Plain
) -> tuple[NDArray[np.int64], NDArray[np.int64], pa.Array, Plain]:
    """Return the messages with a plain topic and a payload of moderate size and depth.

    Args:
        known: results of topics.
        topics: topics of messages.
        payloads: their payloads.
        selected: False for each message to skip.

    Returns:
        Their indices, the numbers of their topics, their payloads, and which of these need a full check.
    """
    places = np.flatnonzero(selected)
    if len(places) < len(topics):
        topics, payloads = topics.take(pa.array(places)), payloads.take(pa.array(places))
    sizes, brackets, escaped = payload_stats(payloads)
    numbers = known.numbers(topics.to_pylist())
    usual = (numbers != NOT_PLAIN) & (sizes <= MOST_BYTES) & (brackets <= MAX_DEPTH)
    if usual.all():
        return places, numbers, payloads, escaped
    return places[usual], numbers[usual], payloads.filter(pa.array(usual)), escaped[usual]


def plain_messages(
    places: NDArray[np.int64],
    named: Mapping[str, pa.Array],
    read: Mapping[str, list[Any]],
    received_at_ms: NDArray[np.int64],
    digested: Sequence[bytes],
    plain: Plain,
) -> PlainMessages:
    """Convert the fields of messages to columns; leave out messages with an unusual value.

    Args:
        places: index of each message.
        named: columns of their addresses, see `named_columns`.
        read: values of each field of `FIELDS`, one for each message; changed in place.
        received_at_ms: time at which the bridge received each message, epoch milliseconds.
        digested: bytes whose digest identifies each message.
        plain: which messages are plain so far; changed in place.
    """
    is_death = pc.equal(named["kind"], Kind.DEATH.value).to_numpy(False)
    columns = {
        **_times(read["ts"], is_death, received_at_ms, plain),
        **{name: _texts(read[name], plain, numbers=numbers) for name, numbers in TEXTS.items()},
        **{name: _wholes(read[name], plain) for name in WHOLES},
        "metrics": _metrics(read["metrics"], plain),
    }
    table = pa.table({**named, **columns, "digest": digests(digested)})
    return PlainMessages(places, table) if plain.all() else PlainMessages(places[plain], table.filter(pa.array(plain)))


def payload_stats(payloads: pa.Array) -> tuple[NDArray[np.int32], NDArray[np.int64], Plain]:
    """Return size, number of opening brackets and need of a full check of payloads.

    A payload with a backslash or with other bytes than printable ASCII needs the full check.
    """
    ends = _ends(payloads)
    content = np.frombuffer(payloads.buffers()[2] or b"", np.uint8)
    opened = np.flatnonzero((content & ~np.uint8(32)) == ord("["))  # "{" differs from "[" in this bit only
    escaped = np.zeros(len(payloads), np.bool_)
    if len(content) and (content.min() < 32 or content.max() > 126 or (content == ord("\\")).any()):
        escaped = pc.match_substring_regex(payloads, _ESCAPED).to_numpy(False)
    return np.diff(ends), np.diff(np.searchsorted(opened, ends)), escaped


def read_contents(
    read: Callable[[bytes], _Parsed], raw: Sequence[bytes], escaped: Plain, nothing: _Parsed
) -> tuple[Plain, list[_Parsed]]:
    """Decode payloads; return which are valid, and their contents.

    Args:
        read: decoder of a payload.
        raw: payloads.
        escaped: which payloads need a full check, see `payload_stats`.
        nothing: content of an invalid payload.
    """
    valid, contents = np.ones(len(raw), np.bool_), list[_Parsed]()
    if not escaped.any():
        try:
            return valid, list(map(read, raw))
        except (ValueError, RecursionError):
            pass
    keep, to_check = contents.append, escaped.tolist()
    for place, payload in enumerate(raw):
        try:
            if to_check[place]:
                _check(payload)
            keep(read(payload))
        except (ValueError, RecursionError):
            keep(nothing)
            valid[place] = False
    return valid, contents


def _exclude_disagreeing(values: list[Any], expected: pa.Array, plain: Plain) -> None:
    if values.count(msgspec.UNSET) < len(values):
        for place, (value, expected_value) in enumerate(zip(values, expected.to_pylist(), strict=True)):
            plain[place] &= value is msgspec.UNSET or value == expected_value


def _times(values: list[Any], is_death: Plain, received_at_ms: NDArray[np.int64], plain: Plain) -> dict[str, pa.Array]:
    """Return event times and their sources; mark messages with an invalid time as not plain."""
    for place in np.flatnonzero(is_death).tolist():
        values[place] = None  # the ts of a will is from the connect, not from the death
    if float in set(map(type, values)):
        values = [int(value // 1) if type(value) is float and abs(value) <= END_OF_TIME_MS else value for value in values]
    found = _wholes(values, plain)
    absent = found.is_null().to_numpy(False)
    ms = np.where(absent, received_at_ms, found.fill_null(0).to_numpy())
    plain &= absent | ((ms >= EPOCH_2000_MS) & (ms <= END_OF_TIME_MS))
    source = pa.array(np.where(is_death, _BY_RECEIPT, np.where(absent, _WITHOUT_TS, _BY_DEVICE)))
    return {
        "event_time_ms": pa.array(ms),
        "clock": pa.array(_CLOCKS).take(source),
        "note": pa.array(_NOTES, pa.string()).take(source),
    }


def _wholes(values: list[Any], plain: Plain) -> pa.Array:
    if set(map(type, values)) <= {int, _NONE}:
        try:
            found = pa.array(values, pa.int64())
        except OverflowError:
            pass
        else:
            if (pc.min(found).as_py() or 0) >= 0:
                return found
    wholes = [None if value is None else as_whole(value) for value in values]
    for place, (value, whole) in enumerate(zip(values, wholes, strict=True)):
        plain[place] &= value is None or whole is not None
    return pa.array(wholes, pa.int64())


def _texts(values: list[Any], plain: Plain, *, numbers: bool) -> pa.Array:
    if values and values[0] is None and values.count(None) == len(values):
        return pa.nulls(len(values), pa.string())
    if set(map(type, values)) <= {str, _NONE}:
        found = pa.array(values, pa.string())
        if _are_texts(found):
            return found
    texts = {value: as_text(value, numbers=numbers) for value in set(values) if value is not None}
    if None in texts.values():
        for place, value in enumerate(values):
            plain[place] &= value is None or texts[value] is not None
    return pa.array(map(texts.get, values), pa.string())


def _are_texts(values: pa.Array) -> bool:
    """Return True if all are printable ASCII that `as_text` returns unchanged.

    False does not mean that `as_text` would change a value.
    """
    sizes = pc.min_max(pc.binary_length(values))
    if not sizes["max"].is_valid:
        return True
    content = np.frombuffer(values.buffers()[2] or b"", np.uint8)[: _ends(values)[-1]]
    return 1 <= sizes["min"].as_py() <= sizes["max"].as_py() <= MAX_TEXT and 32 <= content.min() <= content.max() <= 126


def _ends(values: pa.Array) -> NDArray[np.int32]:
    """Return the start offset of each value, and the end offset of the last."""
    return np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]


def _metrics(values: list[Any], plain: Plain) -> pa.Array:
    """Return metrics as JSON; `metrics_text` encodes those that Python may write differently."""
    present = [place for place, value in enumerate(values) if value is not None]
    metrics = [values[place] for place in present] if len(present) < len(values) else values
    # All are encoded at once and split at "},{". If the separator occurs inside one, the number of
    # parts is wrong, and each is encoded alone. The encoded text contains no line feed.
    joined = _write(metrics)[1:-1]
    texts = joined.replace(b"},{", b"}\n{").split(b"\n") if metrics else []
    if len(texts) != len(metrics):
        texts = [_write(one) for one in metrics]
    found = pa.array(texts, pa.string())
    if pc.match_substring_regex(pa.array([joined], pa.string()), _OTHERWISE)[0].as_py():
        texts = found.to_pylist()
        for index in np.flatnonzero(pc.match_substring_regex(found, _OTHERWISE).to_numpy(False)).tolist():
            text = metrics_text(metrics[index])
            texts[index] = text
            plain[present[index]] &= text is not None
        found = pa.array(texts, pa.string())
    if len(present) == len(values):
        return found
    places = np.full(len(values), -1, np.int64)
    places[present] = np.arange(len(present))
    return found.take(pa.array(places, mask=places < 0))
