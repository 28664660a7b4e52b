"""Sparkplug B: messages of nodes and their devices become rows of bronze."""

import json
from typing import Any

import pytest

from fleetpulse.core.messages.decode import MAX_PAYLOAD_BYTES, Rejection
from fleetpulse.core.messages.mapping import Mappings
from fleetpulse.core.messages.sparkplug import COMPRESSED, FILTERS, MAX_METRICS, is_command
from fleetpulse.core.presence.gateways import Gateways
from fleetpulse.core.rows import Clock, GatewayEvent, Kind, Origin, Row
from fleetpulse.io.mqtt.sparkplug.codec import decode_any, decode_sparkplug
from fleetpulse.io.mqtt.sparkplug.sparkplug_b_pb2 import Payload

NOW = 1_700_000_000_000
TYPES = {"int_value": 7, "long_value": 8, "float_value": 9, "double_value": 10, "boolean_value": 11, "string_value": 12}


def payload(*metrics: dict[str, Any], timestamp: int | None = NOW - 5) -> bytes:
    return Payload(timestamp=timestamp, metrics=[Payload.Metric(**metric) for metric in metrics], seq=3).SerializeToString()


def decoded(topic: str, *metrics: dict[str, Any], **more: Any) -> Row:
    row = decode_sparkplug(f"spBv1.0/{topic}", payload(*metrics, **more), NOW)
    assert isinstance(row, Row), row
    return row


def refused(topic: str, content: bytes) -> Rejection:
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
        (f"spBv1.0/g/DDATA/n/{'x' * 125}", b"", "topic"),
        ("spBv1.0/g/NDATA/n", b'{"ts": 1}', "sparkplug"),
        ("spBv1.0/g/NDATA/n", b"\x12\x03\x0a\x01\xff", "sparkplug"),
        ("spBv1.0/g/NDATA/n", Payload(uuid=COMPRESSED, body=b"x").SerializeToString(), "sparkplug"),
        ("spBv1.0/g/NDATA/n", bytes(MAX_PAYLOAD_BYTES + 1), "size"),
        ("spBv1.0/g/NDATA/n", b"\x12\x00" * (MAX_METRICS + 1), "size"),
    ],
)
def test_a_rejection_gives_its_reason(topic: str, content: bytes, reason: str) -> None:
    rejection = refused(topic, content)
    assert rejection.reason == reason
    assert rejection.detail


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
