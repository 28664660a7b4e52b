"""Sparkplug B: messages of nodes and their devices become rows of bronze."""

import base64
import gzip
import json
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.messages.decode import MAX_PAYLOAD_BYTES, Rejection
from fleetpulse.core.messages.mapping import Mappings
from fleetpulse.core.messages.sparkplug import COMPRESSED, FILTERS, MAX_METRICS, is_command, shortened
from fleetpulse.core.messages.text import MAX_ID_BYTES
from fleetpulse.core.presence.gateways import Gateways
from fleetpulse.core.rows import Clock, GatewayEvent, Kind, Origin, Row
from fleetpulse.io.mqtt.sparkplug.codec import ANY_EXPANSION, decode_any, decode_sparkplug
from fleetpulse.io.mqtt.sparkplug.sparkplug_b_pb2 import Payload

NOW = 1_700_000_000_000
RECORDED = json.loads((Path(__file__).parents[3] / "golden" / "sparkplug.json").read_text())
TYPES = {"int_value": 7, "long_value": 8, "float_value": 9, "double_value": 10, "boolean_value": 11, "string_value": 12}


def payload(*metrics: dict[str, Any], timestamp: int | None = NOW - 5) -> bytes:
    return Payload(timestamp=timestamp, metrics=[Payload.Metric(**metric) for metric in metrics], seq=3).SerializeToString()


def decoded(topic: str, *metrics: dict[str, Any], **more: Any) -> Row:
    row = decode_sparkplug(f"spBv1.0/{topic}", payload(*metrics, **more), NOW)
    assert isinstance(row, Row), row
    return row


def compressed(body: bytes, algorithm: str | None = None, **more: Any) -> bytes:
    """Return a payload that contains a compressed one."""
    named = [] if algorithm is None else [Payload.Metric(name="algorithm", string_value=algorithm)]
    return Payload(uuid=COMPRESSED, body=body, metrics=named, **more).SerializeToString()


def expanded(content: bytes, topic: str = "spBv1.0/plant/NBIRTH/line") -> Row:
    row = decode_sparkplug(topic, content, NOW)
    assert isinstance(row, Row), row
    return row


def rejected(topic: str, content: bytes) -> Rejection:
    row = decode_sparkplug(topic, content, NOW)
    assert isinstance(row, Rejection), row
    return row


def metrics_of(*metrics: dict[str, Any]) -> Any:
    return json.loads(decoded("plant/DDATA/line/pump", *metrics).metrics or "null")


@pytest.mark.parametrize(
    ("topic", "device_id", "kind"),
    [
        ("plant/NBIRTH/line", "plant:line", Kind.BIRTH),
        ("plant/NDATA/line", "plant:line", Kind.TELEMETRY),
        ("plant/NDEATH/line", "plant:line", Kind.DEATH),
        ("plant/DBIRTH/line/pump", "plant:line:pump", Kind.BIRTH),
        ("plant/DDATA/line/pump", "plant:line:pump", Kind.TELEMETRY),
        ("plant/DDEATH/line/pump", "plant:line:pump", Kind.DEATH),
    ],
)
def test_a_node_and_its_devices_are_devices_behind_the_node(topic: str, device_id: str, kind: Kind) -> None:
    row = decoded(topic)
    assert (row.device_id, row.kind, row.site, row.gateway, row.seq) == (device_id, kind, "plant", "plant:line", None)
    if kind is Kind.DEATH:
        assert (row.event_time_ms, row.clock) == (NOW, Clock.RECEIVED)
    else:
        assert (row.event_time_ms, row.clock) == (NOW - 5, Clock.DEVICE)


def test_a_nodes_death_is_a_gateway_death_and_a_devices_death_is_not() -> None:
    assert Gateways(60_000).read(decoded("plant/NDEATH/line")) is GatewayEvent.DEATH
    assert Gateways(60_000).read(decoded("plant/DDEATH/line/pump")) is None


def test_a_nodes_death_of_an_older_session_is_no_gateway_death() -> None:
    def session(kind: str, number: int) -> Row:
        return decoded(f"plant/{kind}/line", {"name": "bdSeq", "long_value": number, "datatype": 8})

    gateways = Gateways(60_000)
    rows = [session("NBIRTH", 1), session("NBIRTH", 2), session("NDEATH", 1), session("NDEATH", 2), session("NBIRTH", 3)]
    assert [gateways.read(one) for one in rows] == [None, None, None, GatewayEvent.DEATH, GatewayEvent.RETURN]


def test_ids_of_different_groups_nodes_and_devices_differ() -> None:
    topics = ["a:b/NDATA/c", "a/NDATA/b:c", "a/DDATA/b/c", "a%3Ab/NDATA/c", "a/NDATA/b%3Ac", "a/NDATA/b%253Ac"]
    assert len({decoded(topic).device_id for topic in topics}) == len(topics)
    assert decoded("a:b/NDATA/c").device_id == "a%3Ab:c"


def test_a_birth_and_its_death_share_their_session() -> None:
    number = {"name": "bdSeq", "long_value": 17, "datatype": 8}
    assert [decoded(topic, number).session for topic in ("g/NBIRTH/n", "g/NDEATH/n")] == ["17", "17"]
    assert [decoded(topic, number).session for topic in ("g/NDATA/n", "g/DBIRTH/n/d")] == [None, None]
    assert decoded("g/NDEATH/n", {"name": "bdSeq", "string_value": "x"}).session is None
    assert decoded("g/NDEATH/n").session is None


def test_numbers_are_read_by_their_type() -> None:
    cases = [
        (1, 0xFF, -1),
        (1, 0xFFFFFF80, -128),
        (2, 0x8000, -32768),
        (3, 0xFFFFFFFF, -1),
        (3, 7, 7),
        (7, 0xFFFFFFFF, 2**32 - 1),
    ]
    for datatype, sent, expected in cases:
        assert metrics_of({"name": "m", "datatype": datatype, "int_value": sent}) == {"m": expected}
    assert metrics_of({"name": "m", "datatype": 4, "long_value": 2**64 - 2}) == {"m": -2}
    assert metrics_of({"name": "m", "datatype": 8, "long_value": 2**64 - 2}) == {"m": 2**64 - 2}
    assert metrics_of({"name": "m", "int_value": 0xFFFFFFFF}) == {"m": 0xFFFFFFFF}  # its type is declared at birth
    assert metrics_of({"name": "m", "datatype": 11, "int_value": 1}) == {"m": True}


def test_values_without_a_json_form_are_null_and_large_values_are_summarized() -> None:
    assert metrics_of({"name": "a", "float_value": float("nan")}, {"name": "b", "double_value": float("-inf")}) == {
        "a": None,
        "b": None,
    }
    assert metrics_of({"name": "a", "is_null": True, "int_value": 3}, {"name": "b"}) == {"a": None, "b": None}
    assert metrics_of({"name": "a", "bytes_value": b"abc"}) == {"a": {"bytes": 3}}
    table = Payload.DataSet(columns=[f"c{number}" for number in range(100)], rows=[Payload.DataSet.Row()] * 9)
    assert metrics_of({"name": "a", "dataset_value": table}) == {
        "a": {"columns": [f"c{number}" for number in range(64)], "rows": 9}
    }
    template = Payload.Template(template_ref="Motor", metrics=[Payload.Metric(name="x")])
    assert metrics_of({"name": "a", "template_value": template}) == {"a": {"template": "Motor", "metrics": 1}}


def test_a_metric_without_a_name_is_named_by_its_alias() -> None:
    assert metrics_of({"alias": 12, "double_value": 1.5}, {"name": "n", "alias": 3, "boolean_value": True}) == {
        "alias:12": 1.5,
        "n": True,
    }


def test_timestamps_are_checked_as_in_other_messages() -> None:
    assert decoded("g/NDATA/n", timestamp=None).note == "no ts: event_time is received_at"
    seconds = decoded("g/NDATA/n", timestamp=NOW // 1000)
    assert seconds.clock is Clock.INVALID and "multiply by 1000" in (seconds.note or "")


@pytest.mark.parametrize(
    ("topic", "content", "reason"),
    [
        ("spBv1.0/STATE/host", b"", "topic"),
        ("spBv1.0/g/NCMD/n", b"", "topic"),
        ("spBv1.0/g/NDATA/n/d", b"", "topic"),
        ("spBv1.0/g/DDATA/n", b"", "topic"),
        ("spBv1.0/g/NDATA", b"", "topic"),
        ("spBv1.0/g//n/d", b"", "topic"),
        ("spBv1.0/_/NDATA/n", b"", "topic"),
        (f"spBv1.0/g/DDATA/n/{'x' * 125}\x07", b"", "topic"),
        (f"spBv1.0/g/DDATA/n/{'x' * 125}+", b"", "topic"),
        ("spBv1.0/g/NDATA/n", b'{"ts": 1}', "sparkplug"),
        ("spBv1.0/g/NDATA/n", b"\x12\x03\x0a\x01\xff", "sparkplug"),
        ("spBv1.0/g/NDATA/n", compressed(b"x", "GZIP"), "sparkplug"),
        ("spBv1.0/g/NDATA/n", compressed(b"", "GZIP"), "sparkplug"),
        ("spBv1.0/g/NDATA/n", compressed(gzip.compress(bytes(99))[:-1], "GZIP"), "sparkplug"),
        ("spBv1.0/g/NDATA/n", compressed(gzip.compress(b"{}"), "GZIP"), "sparkplug"),
        ("spBv1.0/g/NDATA/n", compressed(zlib.compress(compressed(zlib.compress(b"")))), "sparkplug"),
        ("spBv1.0/g/NDATA/n", compressed(zlib.compress(b"\x12\x00" * (MAX_METRICS + 1))), "size"),
        ("spBv1.0/g/NDATA/n", bytes(MAX_PAYLOAD_BYTES + 1), "size"),
        ("spBv1.0/g/NDATA/n", b"\x12\x00" * (MAX_METRICS + 1), "size"),
    ],
)
def test_a_rejection_gives_its_reason(topic: str, content: bytes, reason: str) -> None:
    rejection = rejected(topic, content)
    assert rejection.reason == reason
    assert rejection.detail


@pytest.mark.parametrize("recorded", RECORDED["messages"], ids=lambda one: one["name"])
def test_recorded_messages_of_a_sparkplug_client_become_their_rows(recorded: dict[str, Any]) -> None:
    row = decode_sparkplug(recorded["topic"], base64.b64decode(recorded["payload"]), RECORDED["received_at_ms"])
    assert isinstance(row, Row), row
    found = {name: getattr(row, name) for name in recorded["row"]} | {"metrics": json.loads(row.metrics or "null")}
    assert found == recorded["row"]


def test_a_compressed_payload_is_read_whatever_its_format_is_named() -> None:
    content = payload({"name": "bdSeq", "long_value": 4}, {"name": "t", "double_value": 1.5})
    raw = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    bodies = [gzip.compress(content), zlib.compress(content), raw.compress(content) + raw.flush()]
    for body in bodies:
        for algorithm in ("GZIP", "DEFLATE", "gzip", None):
            row = expanded(compressed(body, algorithm))
            assert (row.session, row.event_time_ms, row.note) == ("4", NOW - 5, None)
            assert json.loads(row.metrics or "") == {"bdSeq": 4, "t": 1.5}
    assert expanded(compressed(zlib.compress(b""), timestamp=NOW - 7)).event_time_ms == NOW - 7, "the time of the outer payload"


def test_an_unknown_compression_is_noted_and_proves_the_device_alive() -> None:
    for algorithm in ("LZ4", ""):
        for kind in ("NBIRTH", "NDATA", "NDEATH"):
            row = expanded(compressed(b"?", algorithm, timestamp=NOW - 5), f"spBv1.0/plant/{kind}/line")
            assert (row.device_id, row.metrics, row.session) == ("plant:line", None, None)
            assert f"must be GZIP or DEFLATE; got '{algorithm}'" in (row.note or "")
    number = [Payload.Metric(name="algorithm", int_value=7)]
    assert "got 7" in (expanded(Payload(uuid=COMPRESSED, metrics=number).SerializeToString()).note or "")


def test_a_compression_bomb_is_refused_before_it_expands() -> None:
    bombs = [zlib.compress(bytes(64 * MAX_PAYLOAD_BYTES)), gzip.compress(bytes(64 * MAX_PAYLOAD_BYTES))]
    tracemalloc.start()
    try:
        for bomb in bombs:
            rejection = rejected("spBv1.0/g/NDATA/n", compressed(bomb))
            assert (rejection.reason, f"at most {MAX_PAYLOAD_BYTES} bytes" in rejection.detail) == ("size", True)
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_PAYLOAD_BYTES
    finally:
        tracemalloc.stop()


def test_a_small_payload_expands_to_a_small_one() -> None:
    """The bridge counts compressed bytes: 100 such messages a second would keep landing busy and fill its memory."""

    def inner(size: int) -> bytes:
        text = [Payload.Metric(name="m", string_value="a" * size)]
        return compressed(zlib.compress(Payload(metrics=text).SerializeToString()))

    assert rejected("spBv1.0/g/NDATA/n", inner(ANY_EXPANSION)).reason == "size"
    assert expanded(inner(ANY_EXPANSION - 100)).metrics is not None
    words = "".join(f"{number:x}" for number in range(30_000))
    several = Payload(metrics=[Payload.Metric(name="m", string_value=words)]).SerializeToString()
    assert len(several) > 2 * ANY_EXPANSION and expanded(compressed(zlib.compress(several))).metrics is not None


def test_a_long_id_is_shortened_in_the_same_way_in_all_messages_of_a_device() -> None:
    group, node, device = "g" * 60, "n" * 67, "é" * 70
    fits = decoded(f"{group}/NDATA/{node}")
    assert (len(fits.device_id), fits.note) == (MAX_ID_BYTES, None)
    births = [decoded(f"{group}/{kind}/{node}x") for kind in ("NBIRTH", "NDATA", "NDEATH")]
    behind = [decoded(f"{group}/{kind}/{node}x/{device}") for kind in ("DBIRTH", "DDATA", "DDEATH")]
    assert len({row.device_id for row in births}) == len({row.device_id for row in behind}) == 1
    assert {row.gateway for row in (*births, *behind)} == {births[0].device_id}
    for row in (*births, *behind):
        assert row.device_id.startswith(f"{group}:n") and len(row.device_id.encode()) <= MAX_ID_BYTES
        assert "the id is shortened to 128 bytes" in (row.note or "")
    assert Gateways(60_000).read(births[2]) is GatewayEvent.DEATH
    assert decoded(f"{group * 3}/NDATA/n").site == shortened(group * 3)


def test_no_other_device_has_a_shortened_id() -> None:
    long = [decoded(f"g/DDATA/n/{'x' * 200}{number}").device_id for number in range(2)]
    assert long[0] != long[1]
    _, _, device = long[0].split(":", 2)
    assert decoded(f"g/DDATA/n/{device}").device_id not in long, "a colon of a name is escaped"


def test_only_sparkplug_topics_are_decoded_as_sparkplug() -> None:
    own = decode_any(Mappings(), "fleet/s/d/heartbeat", b"{}", NOW, Origin.MQTT)
    assert isinstance(own, Row) and own.device_id == "d"
    sparkplug = decode_any(Mappings(), "spBv1.0/g/NDATA/n", payload(), NOW, Origin.MQTT)
    assert isinstance(sparkplug, Row) and sparkplug.device_id == "g:n"


def test_the_filters_cover_messages_of_devices_and_no_commands() -> None:
    assert FILTERS == (
        "spBv1.0/+/NBIRTH/+",
        "spBv1.0/+/DBIRTH/+/+",
        "spBv1.0/+/NDATA/+",
        "spBv1.0/+/DDATA/+/+",
        "spBv1.0/+/NDEATH/+",
        "spBv1.0/+/DDEATH/+/+",
    )
    assert [is_command(topic) for topic in ("spBv1.0/g/NCMD/n", "spBv1.0/g/DCMD/n/d", "fleet/s/NCMD/x")] == [True, True, False]
    assert not any(is_command(topic) for topic in (*FILTERS, "spBv1.0/STATE", "spBv1.0/"))
