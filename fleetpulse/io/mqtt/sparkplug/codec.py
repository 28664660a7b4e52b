"""Sparkplug B decoder: protobuf payloads to rows, with generated protobuf code.

Rule 1: every message becomes a row or a rejection. Decoding a message raises no error and keeps no
more metrics and columns than allowed.
Rule 2: a compressed payload has the limits of a payload, before and after it is expanded. Beyond
`ANY_EXPANSION` bytes it expands to at most `MAX_EXPANSION` times its size: the limits of a device count
the compressed bytes, and decoding costs CPU and memory for the expanded ones.
Rule 3: a payload whose compression is unknown becomes a row without metrics, since it still proves the
device alive.
"""

import zlib
from dataclasses import replace
from typing import Final

from google.protobuf.message import DecodeError

from fleetpulse.core.messages.decode import MAX_PAYLOAD_BYTES, Rejection, digest64
from fleetpulse.core.messages.mapping import Decoded, Mappings
from fleetpulse.core.messages.sparkplug import (
    COMPRESSED,
    MAX_COLUMNS,
    MAX_METRICS,
    PREFIX,
    DataSet,
    Metric,
    Payload,
    Template,
    Value,
    parse_source,
    sparkplug_row,
)
from fleetpulse.core.messages.text import MAX_TEXT
from fleetpulse.core.rows import Origin, Row
from fleetpulse.io.mqtt.sparkplug.sparkplug_b_pb2 import Payload as Message

ANY_EXPANSION: Final = 16_384  # bytes to which a payload of any size may expand
MAX_EXPANSION: Final = 32  # times the size of the compressed bytes
ALGORITHMS: Final = ("GZIP", "DEFLATE")
_ALGORITHM: Final = "algorithm"  # the metric that names the compression; DEFLATE if it is absent
_WINDOWS: Final = (32 + zlib.MAX_WBITS, -zlib.MAX_WBITS)  # zlib or gzip by the header; raw deflate


def decode_any(mappings: Mappings, topic: str, payload: bytes, received_at_ms: int, origin: Origin = Origin.MQTT) -> Decoded:
    """Decode a message by its topic: fleetpulse, mapped, or Sparkplug B."""
    if topic.startswith(PREFIX):
        return decode_sparkplug(topic, payload, received_at_ms)
    return mappings.decode(topic, payload, received_at_ms, origin)


def decode_sparkplug(topic: str, payload: bytes, received_at_ms: int) -> Row | Rejection:
    """Decode a Sparkplug B message to a row, or to a rejection with the reason.

    Args:
        topic: ``spBv1.0/<group>/<type>/<node>[/<device>]``.
        payload: protobuf, see sparkplug_b.proto.
        received_at_ms: time at which the bridge received the message.
    """
    source = parse_source(topic)
    if isinstance(source, Rejection):
        return source
    if len(payload) > MAX_PAYLOAD_BYTES:
        return Rejection("size", f"a payload has at most {MAX_PAYLOAD_BYTES} bytes; got {len(payload)}")
    try:
        content = parse_payload(payload)
        if content.uuid == COMPRESSED:
            content = _decompress(content)
    except DecodeError as error:
        return Rejection("sparkplug", f"a payload must be a Sparkplug B protobuf; {error}"[:MAX_TEXT])
    return content if isinstance(content, Rejection) else sparkplug_row(source, content, received_at_ms, digest64(payload))


def parse_payload(payload: bytes) -> Payload:
    """Parse a payload to plain values; keep at most one metric more than allowed.

    Raises:
        DecodeError: the payload is not protobuf, is nested too deeply, or contains text that is not
            UTF-8.
    """
    message = Message.FromString(payload)
    return Payload(
        message.timestamp if message.HasField("timestamp") else None,
        [_metric(metric) for metric in message.metrics[: MAX_METRICS + 1]],
        _text(message.uuid) if message.HasField("uuid") else None,
        message.body,
    )


def _decompress(outer: Payload) -> Payload | Rejection:
    """Return the payload inside of a compressed one.

    Raises:
        DecodeError: the expanded bytes are not a payload, see `parse_payload`.
    """
    algorithm = next((metric.value for metric in outer.metrics if metric.name == _ALGORITHM), ALGORITHMS[-1])
    if not isinstance(algorithm, str) or algorithm.upper() not in ALGORITHMS:
        rule = f"the compression must be {' or '.join(ALGORITHMS)}; got {ascii(algorithm)[:64]}; set one of them at the node"
        return Payload(outer.timestamp_ms, (), note=f"no metrics: {rule}")
    body = _expand(outer.body)
    if isinstance(body, Rejection):
        return body
    inner = parse_payload(body)
    if inner.uuid == COMPRESSED:
        return Rejection("sparkplug", "a compressed payload must contain metrics; got another compressed payload")
    return inner if inner.timestamp_ms is not None else replace(inner, timestamp_ms=outer.timestamp_ms)


def _expand(body: bytes) -> bytes | Rejection:
    """Decompress bytes to a limited size (rule 2); the bytes decide the format, not the named algorithm."""
    most = min(MAX_PAYLOAD_BYTES, max(ANY_EXPANSION, MAX_EXPANSION * len(body)))
    for window in _WINDOWS:
        decoder = zlib.decompressobj(window)
        try:
            expanded = decoder.decompress(body, most + 1)
        except zlib.error:
            continue
        if len(expanded) > most:
            rule = f"a compressed payload of {len(body)} bytes expands to at most {most} bytes"
            return Rejection("size", f"{rule}; got more; send fewer metrics in a message, or do not compress it")
        if decoder.eof:
            return expanded
    return Rejection(
        "sparkplug", f"a compressed payload must be complete gzip, zlib or deflate data; got {len(body)} bytes that are not"
    )


def _metric(metric: Message.Metric) -> Metric:
    return Metric(
        _text(metric.name) if metric.HasField("name") else None,
        metric.alias if metric.HasField("alias") else None,
        metric.datatype if metric.HasField("datatype") else None,
        None if metric.is_null else _value(metric),
    )


def _value(metric: Message.Metric) -> Value:
    which = metric.WhichOneof("value")
    if which is None:
        return None
    value = getattr(metric, which)
    if which == "string_value":
        return _text(value)
    if which == "dataset_value":
        return DataSet([_text(column) for column in value.columns[:MAX_COLUMNS]], len(value.rows))
    if which == "template_value":
        return Template(_text(value.template_ref) if value.HasField("template_ref") else None, len(value.metrics))
    return value


def _text(value: object) -> str:
    """Check that a text is UTF-8; protobuf returns other text as bytes."""
    if not isinstance(value, str):
        raise DecodeError("it contains text that is not UTF-8")
    return value
