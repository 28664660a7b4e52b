"""Sparkplug codec: every message becomes a row within limits, or a rejection with a reason."""

import gzip
import json
import zlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.messages.decode import Rejection
from fleetpulse.core.messages.sparkplug import COMPRESSED
from fleetpulse.core.messages.text import MAX_ID_BYTES, MAX_TEXT
from fleetpulse.core.rows import FROM_DEVICES, Row
from fleetpulse.io.mqtt.sparkplug.codec import decode_sparkplug
from fleetpulse.io.mqtt.sparkplug.sparkplug_b_pb2 import Payload

NOW = 1_700_000_000_000
NAMES = st.text(min_size=1, max_size=8) | st.sampled_from(["n", "a:b", "50%", "_", "x" * 140])
TYPES = st.sampled_from(["NBIRTH", "NDATA", "NDEATH", "DBIRTH", "DDATA", "DDEATH", "NCMD", "STATE", ""])
TOPICS = st.lists(NAMES, min_size=2, max_size=3).flatmap(
    lambda names: TYPES.map(lambda kind: "/".join(["spBv1.0", names[0], kind, *names[1:]]))
) | st.text(max_size=20).map(lambda rest: f"spBv1.0/{rest}")
VALUES = st.one_of(
    st.tuples(st.just("int_value"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("long_value"), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("float_value"), st.floats(width=32)),
    st.tuples(st.just("double_value"), st.floats()),
    st.tuples(st.just("boolean_value"), st.booleans()),
    st.tuples(st.just("string_value"), st.text(max_size=20)),
    st.tuples(st.just("bytes_value"), st.binary(max_size=20)),
    st.tuples(st.just("dataset_value"), st.just(Payload.DataSet(columns=["c"], rows=[Payload.DataSet.Row()]))),
    st.tuples(st.just("template_value"), st.just(Payload.Template(template_ref="t", metrics=[Payload.Metric(name="m")]))),
)


@st.composite
def _metrics(draw: st.DrawFn) -> Payload.Metric:
    more: dict[str, Any] = {
        "name": draw(st.none() | st.text(max_size=8) | st.just("bdSeq")),
        "alias": draw(st.none() | st.integers(0, 2**64 - 1)),
        "datatype": draw(st.none() | st.integers(0, 40)),
        "is_null": draw(st.none() | st.booleans()),
    }
    field, value = draw(st.just(("", None)) | VALUES)
    more |= {field: value} if field else {}
    return Payload.Metric(**more)


@st.composite
def _payloads(draw: st.DrawFn) -> bytes:
    """Return a payload, valid or mutated, compressed or not."""
    metrics = draw(st.lists(_metrics(), max_size=6))
    times = st.none() | st.integers(0, 2**64 - 1) | st.just(NOW)
    content = Payload(timestamp=draw(times), seq=draw(st.integers(0, 255)), metrics=metrics).SerializeToString()
    compress = draw(st.sampled_from([None, None, gzip.compress, zlib.compress]))
    if compress is not None:
        named = [Payload.Metric(name="algorithm", string_value=draw(st.sampled_from(["GZIP", "DEFLATE", "LZ4"])))]
        content = Payload(uuid=COMPRESSED, body=compress(content), metrics=named).SerializeToString()
    content = content.replace(b"bdSeq", draw(st.sampled_from([b"bdSeq", b"bd\xffeq"])))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 5]))):
        at = draw(st.integers(0, len(content)))
        content = content[:at] + draw(st.binary(max_size=3)) + content[at + draw(st.integers(0, 3)) :]
    return content


@given(TOPICS, _payloads() | st.binary(max_size=200))
def test_every_message_becomes_a_row_within_limits_or_a_rejection_with_a_reason(topic: str, payload: bytes) -> None:
    decoded = decode_sparkplug(topic, payload, NOW)
    if isinstance(decoded, Rejection):
        assert decoded.reason in ("topic", "size", "sparkplug", "field")
        assert 0 < len(decoded.detail) <= 3 * MAX_TEXT
        return
    assert isinstance(decoded, Row)
    assert decoded.kind in FROM_DEVICES
    assert 1 <= len(decoded.device_id.encode()) <= MAX_ID_BYTES
    assert "/" not in decoded.device_id and decoded.device_id.isprintable()
    assert decoded.gateway is not None and len(decoded.gateway.encode()) <= MAX_ID_BYTES
    assert decoded.device_id.startswith(decoded.gateway) or "::" in decoded.device_id, "an id is shortened as a whole"
    assert decoded.seq is None
    assert decoded.event_time_ms is None or 0 <= decoded.event_time_ms < 2**63
    json.loads(decoded.metrics or "{}", parse_constant=_refuse_constant)
    assert decode_sparkplug(topic, payload, NOW) == decoded  # decoding is deterministic


def _refuse_constant(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
