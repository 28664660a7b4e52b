"""Sparkplug B 3.0: conversion of messages of nodes and devices to rows of bronze.

Rule 1: a row depends on its own message alone. For example, a metric without a name is named after
its alias, although the birth of the node maps aliases to names.
Rule 2: a node is the gateway of itself and of its devices, so its death is a gateway's death (see
docs/concepts/semantics.md).
Rule 3: the ``seq`` of Sparkplug counts messages of the node and wraps at 255. It is not the counter
of a device, so a row has no ``seq``.
Rule 4: an id beyond `MAX_ID_BYTES` is shortened, the same way in each message. No id of another
node or device equals it.

Source: ADR 10.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final

from fleetpulse.core.messages.decode import Address, Rejection, from_content
from fleetpulse.core.messages.text import MAX_ID_BYTES, MAX_TEXT
from fleetpulse.core.rows import Kind, Row

PREFIX: Final = "spBv1.0/"
STATE: Final = f"{PREFIX}STATE/"
MAX_METRICS: Final = 8_192
MAX_COLUMNS: Final = 64  # columns of a data set whose names are kept
BIRTH_NUMBER: Final = "bdSeq"  # the metric that pairs a node's death with its birth
COMPRESSED: Final = "SPBV1.0_COMPRESSED"  # the uuid of a payload whose body is another payload, compressed
KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "NBIRTH": Kind.BIRTH,
        "DBIRTH": Kind.BIRTH,
        "NDATA": Kind.TELEMETRY,
        "DDATA": Kind.TELEMETRY,
        "NDEATH": Kind.DEATH,
        "DDEATH": Kind.DEATH,
    }
)
FILTERS: Final = tuple(f"{PREFIX}+/{word}/+" + ("/+" if word[0] == "D" else "") for word in KINDS)
SUBSCRIPTIONS: Final = (f"{PREFIX}+/+/+", f"{PREFIX}+/+/+/+")  # two instead of six: see docs/adr/0010-sparkplug-decoding.md
COMMANDS: Final = ("NCMD", "DCMD")  # from hosts to nodes; the subscriptions match them too
_WITH_BIRTH_NUMBER: Final = ("NBIRTH", "NDEATH")
_SIGNED: Final = {1: 8, 2: 16, 3: 32, 4: 64}  # bits of Int8, Int16, Int32 and Int64, which are sent unsigned
_BOOLEAN: Final = 11
_SHORTENED: Final = "::"  # before the digest of a shortened id; names are not empty, so no other id has it
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class DataSet:
    """Table as the value of a metric: names of its columns, and number of rows."""

    columns: Sequence[str]
    rows: int


@dataclass(frozen=True, slots=True)
class Template:
    """Structure as the value of a metric: its template, and number of metrics."""

    ref: str | None
    metrics: int


Value = int | float | bool | str | bytes | DataSet | Template | None


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; ``datatype`` is its number in the specification, section 6.4.16."""

    name: str | None
    alias: int | None
    datatype: int | None
    value: Value


@dataclass(frozen=True, slots=True)
class Payload:
    """Decoded payload.

    Attributes:
        timestamp_ms: time of the message, epoch milliseconds.
        metrics: its metrics, at most one more than `MAX_METRICS`.
        uuid: format of ``body``.
        body: content in another format, see `COMPRESSED`.
        note: warning about the payload.
    """

    timestamp_ms: int | None
    metrics: Sequence[Metric]
    uuid: str | None = None
    body: bytes = b""
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Parsed topic: ``spBv1.0/<group>/<word>/<node>[/<device>]``."""

    group: str
    word: str
    node: str
    device: str | None

    @property
    def site(self) -> str:
        """Site of the devices of the group: its id, shortened."""
        return shortened(self.group)

    @property
    def node_id(self) -> str:
        """Device id of the node."""
        return shortened(self._joined(self.group, self.node))

    @property
    def device_id(self) -> str:
        """Device id of the device, or of the node if the topic names no device."""
        return shortened(self.full_id)

    @property
    def full_id(self) -> str:
        """Device id before it is shortened."""
        return self._joined(self.group, self.node, *(() if self.device is None else (self.device,)))

    @staticmethod
    def _joined(*parts: str) -> str:
        return ":".join(_quoted(part) for part in parts)


def shortened(name: str) -> str:
    """Return a name of at most `MAX_ID_BYTES`; a longer name is cut, and its digest is appended."""
    encoded = name.encode()
    if len(encoded) <= MAX_ID_BYTES:
        return name
    ending = _SHORTENED + blake2b(encoded, digest_size=_DIGEST_BYTES).hexdigest()
    return encoded[: MAX_ID_BYTES - len(ending)].decode(errors="ignore") + ending


def _quoted(part: str) -> str:
    """Escape the colon, which joins the parts of an id."""
    return part.replace("%", "%25").replace(":", "%3A")


def parse_source(topic: str) -> Source | Rejection:
    """Parse a Sparkplug topic."""
    levels = topic.split("/")
    if len(levels) not in (4, 5) or levels[0] + "/" != PREFIX or not all(levels):
        expected = "a Sparkplug topic must be spBv1.0/<group>/<type>/<node>, or that with /<device> appended"
        return Rejection("topic", f'{expected}; got "{topic[:MAX_TEXT]}"')
    _, group, message_type, node, *device = levels
    if message_type not in KINDS:
        return Rejection(
            "topic", f'the Sparkplug message type must be one of {", ".join(KINDS)}; got "{message_type[:MAX_TEXT]}"'
        )
    if (message_type[0] == "D") != bool(device):
        rule = "must name a device after the node" if message_type[0] == "D" else "must not name a device"
        return Rejection("topic", f'{message_type} {rule}; got "{topic[:MAX_TEXT]}"')
    if not topic.isprintable() or "+" in topic or "#" in topic:
        return Rejection("topic", f"a Sparkplug topic must be printable and without + #; got {topic[:MAX_TEXT]!a}")
    return Source(group, message_type, node, device[0] if device else None)


def sparkplug_row(source: Source, payload: Payload, received_at_ms: int, digest: int) -> Row | Rejection:
    """Convert a decoded message to a row, or to a rejection with the reason.

    Args:
        source: parsed topic, see `parse_source`.
        payload: decoded payload.
        received_at_ms: time at which the bridge received the message, epoch milliseconds.
        digest: digest of the raw payload, see `decode.digest64`.
    """
    if len(payload.metrics) > MAX_METRICS:
        return Rejection("size", f"a payload has at most {MAX_METRICS} metrics; got {len(payload.metrics)}")
    content: dict[str, Any] = {"gateway": source.node_id}
    if payload.timestamp_ms is not None:
        content["ts"] = payload.timestamp_ms
    if payload.metrics:
        content["metrics"] = {_name(metric): _plain(metric) for metric in payload.metrics}
    if source.word in _WITH_BIRTH_NUMBER:
        content["session"] = _birth_number(payload.metrics)
    row = from_content(Address(source.site, source.device_id, KINDS[source.word]), content, received_at_ms, digest)
    notes = [_shortening_note(source), payload.note]
    if isinstance(row, Rejection) or not any(notes):
        return row
    return replace(row, note="; ".join(note for note in (row.note, *notes) if note))


def _shortening_note(source: Source) -> str | None:
    """Return the note of a shortened id; None if the id is not shortened."""
    full_id = source.full_id
    size = len(full_id.encode())
    if size <= MAX_ID_BYTES:
        return None
    return f'the id is shortened to {MAX_ID_BYTES} bytes; got {size}: "{full_id[:MAX_TEXT]}"'


def is_command(topic: str) -> bool:
    """Whether a topic is of a command to a node or a device."""
    return topic.startswith(PREFIX) and topic.split("/")[2:3] in ([message_type] for message_type in COMMANDS)


def host_state(at_ms: int, *, online: bool) -> bytes:
    """Return the payload that a host application publishes on `STATE`.

    Args:
        at_ms: time at which the host connected, epoch milliseconds; the same for both states.
        online: whether the host is online.
    """
    return json.dumps({"online": online, "timestamp": at_ms}, separators=(",", ":")).encode()


def _name(metric: Metric) -> str:
    return metric.name or f"alias:{metric.alias or 0}"


def _birth_number(metrics: Sequence[Metric]) -> int | None:
    """Return the bdSeq, which pairs a birth with its death; None if it is no integer."""
    for metric in metrics:
        if metric.name == BIRTH_NUMBER and type(metric.value) is int and metric.value < 2**63:
            return metric.value
    return None


def _plain(metric: Metric) -> Any:
    """Return the value of a metric as JSON; long values are summarised."""
    value = metric.value
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return bool(value) if metric.datatype == _BOOLEAN else _signed(value, metric.datatype)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return {"bytes": len(value)}
    if isinstance(value, DataSet):
        return {"columns": list(value.columns[:MAX_COLUMNS]), "rows": value.rows}
    if isinstance(value, Template):
        return {"template": value.ref, "metrics": value.metrics}
    return value


def _signed(value: int, datatype: int | None) -> int:
    """Decode a number in two's complement; unchanged if its type is unknown."""
    bits = _SIGNED.get(datatype or 0)
    if bits is None:
        return value
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
