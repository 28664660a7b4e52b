"""Sparkplug B, version 3.0, as a way in: what a node or a device says becomes a row of bronze, or the reason why not.

Rule 1: a row follows from its own message alone: a metric whose name was told at birth is named by its alias, and so on.
Rule 2: a node is its own gateway, and that of its devices: so its death is theirs (see docs/semantics.md).
Rule 3: ``seq`` is the node's and runs from 0 to 255 again and again: it numbers no device, and is not taken for its counter.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from fleetpulse.core.messages.decode import Address, Rejection, from_content
from fleetpulse.core.rows import Kind, Row
from fleetpulse.core.text import MAX_TEXT

PREFIX: Final = "spBv1.0/"
STATE: Final = f"{PREFIX}STATE/"
MAX_METRICS: Final = 8_192
MAX_COLUMNS: Final = 64  # of a data set that are named
BIRTH_NUMBER: Final = "bdSeq"  # the metric that pairs a node's death with its birth
COMPRESSED: Final = "SPBV1.0_COMPRESSED"
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
SUBSCRIPTIONS: Final = (f"{PREFIX}+/+/+", f"{PREFIX}+/+/+/+")  # two instead of six: see docs/adr/0010-sparkplug-as-a-way-in.md
COMMANDS: Final = ("NCMD", "DCMD")  # what hosts say to nodes: the subscriptions bring it along
_WITH_BIRTH_NUMBER: Final = ("NBIRTH", "NDEATH")
_SIGNED: Final = {1: 8, 2: 16, 3: 32, 4: 64}  # bits of Int8, Int16, Int32 and Int64, which travel unsigned
_BOOLEAN: Final = 11


@dataclass(frozen=True, slots=True)
class DataSet:
    """A table as a metric's value: the names of its columns, and how many rows it has."""

    columns: Sequence[str]
    rows: int


@dataclass(frozen=True, slots=True)
class Template:
    """A structure as a metric's value: what it is an instance of, and how many metrics it has."""

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
    """What a message holds, decoded; ``uuid`` says of what kind the rest is, where it is not metrics."""

    timestamp_ms: int | None
    metrics: Sequence[Metric]
    uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Who speaks, and of what, as the topic says: ``spBv1.0/<group>/<word>/<node>[/<device>]``."""

    group: str
    word: str
    node: str
    device: str | None

    @property
    def node_id(self) -> str:
        """The node's id among all devices."""
        return f"{_quoted(self.group)}:{_quoted(self.node)}"

    @property
    def device_id(self) -> str:
        """The id of whom it is about."""
        return self.node_id if self.device is None else f"{self.node_id}:{_quoted(self.device)}"


def _quoted(part: str) -> str:
    """Return a part of an id without the colon that joins parts."""
    return part.replace("%", "%25").replace(":", "%3A")


def parse_source(topic: str) -> Source | Rejection:
    """Read a topic of Sparkplug."""
    levels = topic.split("/")
    if len(levels) not in (4, 5) or levels[0] + "/" != PREFIX or not all(levels):
        words = "a topic of Sparkplug is spBv1.0/<group>/<type>/<node>, and /<device> behind it where it is about a device"
        return Rejection("topic", f'{words}; got "{topic[:MAX_TEXT]}"')
    _, group, word, node, *device = levels
    if word not in KINDS:
        return Rejection("topic", f'of Sparkplug {", ".join(KINDS)} are taken; got "{word[:MAX_TEXT]}"')
    if (word[0] == "D") != bool(device):
        rule = "names its device behind the node" if word[0] == "D" else "names no device"
        return Rejection("topic", f'{word} {rule}; got "{topic[:MAX_TEXT]}"')
    return Source(group, word, node, device[0] if device else None)


def sparkplug_row(source: Source, payload: Payload, received_at_ms: int, digest: int) -> Row | Rejection:
    """Make a row of a decoded message, or say why it cannot be one.

    Args:
        source: see `parse_source`.
        payload: its content.
        received_at_ms: when the bridge had it.
        digest: see `core.decoding.digest64`.
    """
    if payload.uuid == COMPRESSED:
        return Rejection("sparkplug", "a payload is not compressed: switch compression off at the node")
    if len(payload.metrics) > MAX_METRICS:
        return Rejection("size", f"a payload has at most {MAX_METRICS} metrics; got {len(payload.metrics)}")
    content: dict[str, Any] = {"gateway": source.node_id}
    if payload.timestamp_ms is not None:
        content["ts"] = payload.timestamp_ms
    if payload.metrics:
        content["metrics"] = {_name(metric): _plain(metric) for metric in payload.metrics}
    if source.word in _WITH_BIRTH_NUMBER:
        content["session"] = _birth_number(payload.metrics)
    return from_content(Address(source.group, source.device_id, KINDS[source.word]), content, received_at_ms, digest)


def is_command(topic: str) -> bool:
    """Whether a message is for a node or a device, and not of one."""
    return topic.startswith(PREFIX) and topic.split("/")[2:3] in ([word] for word in COMMANDS)


def host_state(at_ms: int, *, online: bool) -> bytes:
    """Return what a host application publishes of itself on `STATE`; the timestamp is that of its connecting, in both."""
    return json.dumps({"online": online, "timestamp": at_ms}, separators=(",", ":")).encode()


def _name(metric: Metric) -> str:
    return metric.name or f"alias:{metric.alias or 0}"


def _birth_number(metrics: Sequence[Metric]) -> int | None:
    """Return what pairs a birth with its death; None where it is no whole number."""
    for metric in metrics:
        if metric.name == BIRTH_NUMBER and type(metric.value) is int and metric.value < 2**63:
            return metric.value
    return None


def _plain(metric: Metric) -> Any:
    """Return a metric's value as JSON has it; what is long is summed up."""
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
    """Return a number that travelled as two's complement; of an unknown type as it was sent."""
    bits = _SIGNED.get(datatype or 0)
    if bits is None:
        return value
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
