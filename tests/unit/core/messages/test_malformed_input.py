"""Malformed input: a message or recording is quarantined or refused, with a bounded reason."""

import json
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.messages.decode import MAX_PAYLOAD_BYTES, Rejection, decode
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.core.messages.replay_envelope import Envelope, wrap
from fleetpulse.core.rows import BRIDGE, Clock, Origin, Row
from fleetpulse.io.ingest.payload_paths import compile_path
from fleetpulse.io.ingest.recording import inspect, read
from fleetpulse.io.mqtt.codec import Reader
from fleetpulse.io.mqtt.subscriber import Arrived
from streaming.bridge.sequencer import MAX_TOPIC, BridgeSequencer
from streaming.landing.landing import LANDED
from streaming.landing.merge import Part
from streaming.landing.rows import decode_parts
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
NOW = 1_700_000_000_000
LONGEST = "fleet/s/" + "x" * (65_535 - 8)


def landed(*messages: tuple[str, bytes], live: bool = True) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of messages by table, after sequencer, segment and landing."""
    sequencer = BridgeSequencer("b", None)
    if live:
        sequencer.go_live(NOW)
    arrived = [Arrived(topic, payload, False, (1, number)) for number, (topic, payload) in enumerate(messages, 1)]
    sequencer.arrived_together(arrived, NOW)
    part = Part(BRIDGE, 1, 0, sequencer.buffer.table())
    places = {table.name: {BRIDGE: 0} for table in LANDED}
    tables = decode_parts([part], decode).by_table(places)
    return {table.name: rows.to_pylist() for table, rows in tables}


def packet(topic: bytes) -> bytes:
    body = len(topic).to_bytes(2, "big") + topic + b"\x00\x01{}"
    length, rest = b"", len(body)
    while rest > 127:
        length, rest = length + bytes([rest & 0x7F | 0x80]), rest >> 7
    return b"\x32" + length + bytes([rest]) + body


@pytest.mark.parametrize(
    ("topic", "kept"),
    [
        (LONGEST.encode(), LONGEST[:MAX_TOPIC]),
        (b"fleet/s/\x00/heartbeat", "fleet/s/\\x00/heartbeat"),
        (b"fleet/s/\x1b[2J/heartbeat", "fleet/s/\\x1b[2J/heartbeat"),
        ("fleet/s/\u202ed/heartbeat".encode(), "fleet/s/\\u202ed/heartbeat"),
        (b"fleet/s/\xff/heartbeat", "not-utf-8"),
        (b"fleet/s/\xed\xa0\x80/heartbeat", "not-utf-8"),  # a lone surrogate
        (b"$SYS/broker/clients", "$SYS/broker/clients"),
        (b"$share/g/fleet/s/d/heartbeat", "$share/g/fleet/s/d/heartbeat"),
        (b"", ""),
        (b"\x00" * 65_535, ("\\x00" * MAX_TOPIC)[:MAX_TOPIC]),
        (("fleet/s/" + "\U00020000" * 200).encode(), ("fleet/s/" + "\\U00020000" * 200)[:MAX_TOPIC]),  # 808 bytes
    ],
    ids=range(11),
)
def test_a_malformed_topic_is_quarantined_with_a_bounded_reason(topic: bytes, kept: str) -> None:
    [published] = Reader(MAX_PAYLOAD_BYTES).feed(packet(topic))
    tables = landed((published.topic, published.payload), ("fleet/s/d/heartbeat", b"{}"))
    assert [one["device_id"] for one in tables["messages"]] == ["d"]
    [quarantined] = tables["quarantine"]
    assert (quarantined["topic"], quarantined["reason"], quarantined["payload"]) == (kept, "topic", b"{}")
    assert len(quarantined["detail"]) < 1_000
    assert quarantined["detail"].isprintable()


def test_names_may_start_with_a_dollar_sign() -> None:
    assert landed(("fleet/$SYS/$d/heartbeat", b"{}"))["messages"][0]["device_id"] == "$d"


@pytest.mark.parametrize(
    "header",
    [
        {"recording": "r\ud800", "line": 0, "received_at_ms": NOW, "topic": "t"},
        {"recording": "r" * 300, "line": 0, "received_at_ms": NOW, "topic": "t"},
        {"recording": "r", "line": 2**63, "received_at_ms": NOW, "topic": "t"},
        {"recording": "r", "line": 0, "received_at_ms": 2**63, "topic": "t"},
        {"recording": "r", "line": 0, "received_at_ms": -1, "topic": "t"},
        {"recording": "r", "line": 0, "received_at_ms": NOW // 1000, "topic": "t"},
        {"recording": "r", "line": 0, "received_at_ms": 4_102_444_800_000, "topic": "t"},
    ],
    ids=range(7),
)
def test_an_envelope_beyond_the_limits_of_a_segment_is_quarantined(header: dict[str, Any]) -> None:
    good = wrap(Envelope("r", 0, NOW, "fleet/s/d/heartbeat", b"{}"))
    bad = json.dumps(header).encode() + b"\n{}"
    tables = landed(("replay/r", good), ("replay/r", bad), live=False)
    assert len(tables["messages"]) == 1
    assert [one["reason"] for one in tables["quarantine"]] == ["topic"]


def test_a_recorded_topic_with_a_lone_surrogate_is_quarantined() -> None:
    tables = landed(("replay/r", wrap(Envelope("r", 0, NOW, "fleet/s/\ud800/heartbeat", b"{}"))), live=False)
    assert tables["quarantine"][0]["topic"] == "fleet/s/\\ud800/heartbeat"


@pytest.mark.parametrize("received_at_ms", [0, NOW // 1000, 946_684_799_999, 4_102_444_800_000, -1])
def test_a_recording_with_an_invalid_time_is_refused_with_its_line(received_at_ms: int, tmp_path: Path) -> None:
    path = tmp_path / "odd.ndjson"
    lines = [{"received_at_ms": at_ms, "topic": "t", "payload": {}} for at_ms in (946_684_800_000, received_at_ms)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    with refused("recording-time-invalid", match=rf"line 2 of .* from 2000 up to 2100; got {received_at_ms};"):
        inspect(path)


def test_a_recording_with_lone_surrogates_is_read(tmp_path: Path) -> None:
    path = tmp_path / "odd.ndjson"
    lines = [{"received_at_ms": NOW, "topic": "t", "payload": payload} for payload in ("\ud800", {"metrics": {"a": "\ud800"}})]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    assert inspect(path).lines == 2
    text, mapping = (one.payload for one in read(path))
    assert isinstance(decode("fleet/s/d/heartbeat", text, NOW), Rejection)
    assert isinstance(decode("fleet/s/d/heartbeat", mapping, NOW), Row)


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("gap", {"op": "open", "from": 2**63}),
        ("gap", {"op": "close", "until": -1}),
        ("gap", {"op": "open", "from": 1, "why": {"a": 1}}),
        ("gap", {"op": "open", "from": 1, "after": 10**30}),
        ("registry", {"op": "add", "class": 7}),
        ("registry", {"op": "add", "gateway": "\ud800"}),
        ("control", {"op": "maintain", "until": 1e300}),
    ],
    ids=range(7),
)
def test_a_recorded_internal_row_with_invalid_fields_is_quarantined(kind: str, content: dict[str, Any]) -> None:
    line = wrap(Envelope("r", 0, NOW, f"fleet/s/d/{kind}", json.dumps(content).encode()))
    tables = landed(("replay/r", line), live=False)
    assert [one["reason"] for one in tables["quarantine"]] == ["field"]
    assert not tables["messages"]


def test_effective_from_is_at_most_a_year_ahead() -> None:
    furthest_ms = NOW + 366 * 86_400_000
    results = [
        decode("fleet/_/_/policy", json.dumps({"effective_from": at_ms}).encode(), NOW, Origin.COMMAND)
        for at_ms in (furthest_ms, furthest_ms + 1)
    ]
    assert isinstance(results[0], Row) and results[0].event_time_ms == furthest_ms
    assert isinstance(results[1], Rejection) and results[1].reason == "field"
    assert results[1].detail == f"effective_from must be at most 366 days ahead; got {furthest_ms + 1}; send it later"


MAPPED = parse_mappings(
    {"mapping": [{"topic": "z/{device}", "site": "s", "kind": "telemetry", "ts": "at", "ts_unit": "s", "seq": "n"}]}, compile_path
)


AT_INSTANTS = parse_mappings(
    {"mapping": [{"topic": "z/{device}", "site": "s", "kind": "telemetry", "ts": "at", "ts_unit": "iso"}]}, compile_path
)


@pytest.mark.parametrize("ts", ["9" * 4_299, "1e308", "-" + "9" * 4_299])
def test_a_mapped_time_with_too_many_digits_is_an_invalid_clock(ts: str) -> None:
    row = MAPPED.decode("z/d", b'{"at":' + ts.encode() + b"}", NOW, Origin.MQTT)
    assert isinstance(row, Row) and row.clock is Clock.INVALID


@pytest.mark.parametrize("ts", ["1" * 5_000, "1" * 19, "-1", "\u0661\u0662"])
def test_an_invalid_mapped_instant_is_not_a_device_clock(ts: str) -> None:
    decoded = AT_INSTANTS.decode("z/d", json.dumps({"at": ts}).encode(), NOW, Origin.MQTT)
    assert isinstance(decoded, Row) and decoded.clock is not Clock.DEVICE


@pytest.mark.parametrize("levels", [20, 700, 950, 1_000, 30_000])
def test_a_mapped_payload_of_any_depth_proves_its_device_alive(levels: int) -> None:
    decoded = MAPPED.decode("z/d", b'{"a":' * levels + b"1" + b"}" * levels, NOW, Origin.MQTT)
    assert isinstance(decoded, Row) and decoded.metrics is None


def test_a_mapped_payload_that_is_too_long_is_rejected() -> None:
    decoded = MAPPED.decode("z/d", b"x" * (MAX_PAYLOAD_BYTES + 1), NOW, Origin.MQTT)
    assert isinstance(decoded, Rejection) and decoded.reason == "size"
    assert isinstance(MAPPED.decode("z/d", b"ON", NOW, Origin.MQTT), Row)
