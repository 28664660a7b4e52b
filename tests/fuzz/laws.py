"""Laws of fuzzing: no input crashes a decoder, and every input is accounted for.

Rule 1: a message becomes either a `Row` or a `Rejection`, the same one each time, within declared bounds.
Rule 2: rule 1 holds through the pipeline: packet, sequencer, segment, landing, and the schemas of the tables.
Rule 3: bytes that are not MQTT raise `ProtocolError`, however they are cut, and memory stays bounded.
"""

import json
from collections import Counter
from itertools import pairwise
from typing import Any, Final

from fleetpulse.core.messages.decode import MAX_PAYLOAD_BYTES, decode
from fleetpulse.core.messages.mapping import Decoded, Decoder, Mappings, rows_of
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.core.messages.text import MAX_ID_BYTES, MAX_TEXT
from fleetpulse.core.rows import BRIDGE, FROM_DEVICES, Clock, Origin, Row
from fleetpulse.core.tables import MESSAGES, QUARANTINE
from fleetpulse.core.times import END_OF_TIME_MS, EPOCH_2000_MS
from fleetpulse.io.ingest import profiles
from fleetpulse.io.ingest.payload_paths import compile_path
from fleetpulse.io.mqtt.codec import ProtocolError, Published, Reader
from fleetpulse.io.mqtt.subscriber import Arrived
from streaming.bridge.sequencer import MAX_TOPIC, BridgeSequencer
from streaming.landing.landing import LANDED
from streaming.landing.merge import Part
from streaming.landing.rows import decode_parts

NOW: Final = 1_700_000_000_000
BATCH: Final = 5_000
MAX_DETAIL: Final = 2_000
REASONS: Final = frozenset({"topic", "json", "field", "size", "depth", "reserved", "disagreement"})
MAPPINGS: Final = parse_mappings(
    {
        "mapping": [
            {"topic": "z/{device}/s", "site": "h", "kind": "telemetry", "ts": "m.at", "ts_unit": "s", "seq": "n", "code": "e"},
            {"topic": "y/{site}/{device}/{kind}", "ts": "time", "ts_unit": "iso", "ts_zone": "Europe/Oslo"},
            {"topic": "x/+/{device}", "site": "h", "kind": "error", "when": "a", "ts": "t", "ts_unit": "us", "code": "a.b"},
            {"topic": "x/+/{device}", "site": "h", "kind": {"path": "s || @", "values": {"on": "birth", "off": "death"}}},
            {"topic": "w/{gateway}/{metric}", "site": "h", "kind": "telemetry", "each": "@", "device": {"path": "key || id"}},
            {"topic": "{device}/v", "site": {"path": "s"}, "kind": "birth", "ts": "t[0]", "ts_unit": "ns", "ts_else": "received"},
            {"topic": "u/{device...}/v", "site": "h", "kind": "telemetry", "uptime_s": "length(@)", "metrics": "m"},
        ]
    },
    compile_path,
)
PROFILES: Final = Mappings(rule for name in profiles.names() for rule in profiles.load_profile(name).rules)
USUAL: Final = (
    *(f"fleet/s/d/{kind}".encode() for kind in sorted(FROM_DEVICES)),
    *(
        b"z/d/s",
        b"y/s/d/error",
        b"x/1/d",
        b"w/g/m",
        b"d/v",
        b"u/a/b/v",
        b"fleet/_/b/gap",
        b"fleet/s/d/registry",
        b"fleet/s/d/control",
    ),
)
_INT64: Final = range(-(2**63), 2**63)
_LIMIT: Final = 300  # bytes of a payload in `check_packets`


mapped: Final = MAPPINGS.decode  # as landing decodes in a home with mappings


def decoders_of(topic: str) -> tuple[Decoder, ...]:
    """Return the decoders that differ for a topic; those of the profiles only if a rule matches it."""
    of_profile = not topic.startswith("fleet/") and bool(PROFILES.match(topic))
    return (decode, mapped, PROFILES.decode) if of_profile else (decode, mapped)


def check_message(topic: str, payload: bytes) -> Counter[str]:
    """Check rule 1 for each decoder and origin; return the outcomes of the origin MQTT."""
    found: Counter[str] = Counter()
    for decoder in decoders_of(topic):
        for origin in (Origin.MQTT, Origin.REPLAY):
            decoded = decoder(topic, payload, NOW, origin)
            assert decoded == decoder(topic, payload, NOW, origin), "decoding must be deterministic"
            for one in rows_of(decoded):
                if isinstance(one, Row):
                    check_row(one, origin)
                else:
                    assert one.reason in REASONS, one
                    assert 0 < len(one.detail) < MAX_DETAIL, one
            if origin is Origin.MQTT:
                found[outcome(decoded)] += 1
    return found


def outcome(decoded: Decoded) -> str:
    """Return the outcome of a message: row, rows, ignored, or the reason of its rejection."""
    if isinstance(decoded, tuple):
        return "rows" if decoded else "ignored"
    return "row" if isinstance(decoded, Row) else decoded.reason


def check_row(row: Row, origin: Origin) -> None:
    """Check the bounds of a row."""
    assert row.kind in FROM_DEVICES or origin is not Origin.MQTT
    for name in (row.site, row.device_id):
        assert 1 <= len(name.encode()) <= MAX_ID_BYTES and name.isprintable() and not set(name) & set("+#/")
    assert (row.event_time_ms is None) == (row.clock is Clock.INVALID)
    if row.event_time_ms is not None and row.clock is Clock.DEVICE:
        assert EPOCH_2000_MS <= row.event_time_ms <= END_OF_TIME_MS
    for text in (row.boot, row.code, row.firmware, row.gateway):
        assert text is None or (1 <= len(text) <= MAX_TEXT and text.isprintable())
    for number in (row.seq, row.uptime_s):
        assert number is None or 0 <= number < 2**63
    for content in (row.metrics, row.body):
        assert content is None or isinstance(json.loads(content), dict)
    assert row.note is None or len(row.note) < MAX_DETAIL
    assert row.digest in _INT64


def received(topic: bytes, payload: bytes) -> Published:
    """Return a message as the packet reader reads it."""
    [published] = Reader(MAX_PAYLOAD_BYTES).feed(packet(topic[:65_535], payload))
    return published


def packet(topic: bytes, payload: bytes, number: int = 1) -> bytes:
    """Return a PUBLISH with QoS 1 as a broker sends it."""
    body = len(topic).to_bytes(2, "big") + topic + number.to_bytes(2, "big") + payload
    length, rest = b"", len(body)
    while rest > 127:
        length, rest = length + bytes([rest & 0x7F | 0x80]), rest >> 7
    return b"\x32" + length + bytes([rest]) + body


def check_landing(messages: list[Published]) -> None:
    """Check rule 2: each message is in one table or counted as rejected, within bounds."""
    sequencer = BridgeSequencer(BRIDGE, None)
    sequencer.go_live(NOW)
    arrived = [Arrived(one.topic, one.payload, False, (1, number)) for number, one in enumerate(messages, 1)]
    sequencer.arrived_together(arrived, NOW)
    part = Part(BRIDGE, 1, 0, sequencer.buffer.table())
    positions = {table.name: {BRIDGE: 0} for table in LANDED}
    landed = decode_parts([part], mapped)
    tables = {table.name: found for table, found in landed.by_table(positions)}
    quarantined = tables[QUARANTINE.name].select(["topic", "reason", "detail"]).to_pylist()
    surplus = landed.surplus_rows(positions[MESSAGES.name])
    assert tables[MESSAGES.name].num_rows + len(quarantined) + sequencer.counts["rejected"] == len(messages) + surplus
    for one in quarantined:
        assert one["reason"] in REASONS, one
        assert len(one["topic"]) <= MAX_TOPIC and one["topic"].isprintable(), one
        assert 0 < len(one["detail"]) < MAX_DETAIL and one["detail"].isprintable(), one


def check_packets(data: bytes, cuts: list[int]) -> str:
    """Check rule 3; return the kind of the result."""
    try:
        uncut_reader = Reader(_LIMIT)
        uncut = uncut_reader.feed(data)
    except ProtocolError:
        uncut, uncut_reader = None, None
    reader, published = Reader(_LIMIT), list[Published]()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    try:
        for begin, end in pairwise(edges):
            published += reader.feed(data[begin:end])
            assert len(reader._data) <= _LIMIT + 65_535 + len(data) + 16  # pyright: ignore[reportPrivateUsage]
    except ProtocolError:
        assert uncut is None, "bytes that fail in pieces must also fail uncut"
        return "error"
    assert uncut == published, "cuts must not change the messages"
    assert uncut_reader is not None and uncut_reader.answers == reader.answers
    for one in published:
        assert len(one.payload) <= _LIMIT + 1
        check_message(one.topic, one.payload)
    return "messages" if published else "incomplete"


class Checker:
    """Checker of inputs, with counts of their outcomes; it checks landing once per batch.

    Attributes:
        inputs: number of checked inputs.
        outcomes: number of outcomes by kind.
    """

    def __init__(self) -> None:
        self.inputs = 0
        self.outcomes: Counter[str] = Counter()
        self._batch: list[Published] = []

    def message(self, data: bytes) -> None:
        """Check a message: a topic (or one byte that selects a usual topic), a line feed, and a payload."""
        topic, _, payload = data.partition(b"\n")
        published = received(USUAL[topic[0] % len(USUAL)] if len(topic) == 1 else topic, payload)
        self.outcomes += check_message(published.topic, published.payload)
        self.inputs += 1
        self._batch.append(published)
        if len(self._batch) >= BATCH:
            self.land()

    def packets(self, data: bytes) -> None:
        """Check bytes of a connection; the first two bytes are the positions of the cuts."""
        self.outcomes[f"packets: {check_packets(data[2:], list(data[:2]))}"] += 1
        self.inputs += 1

    def land(self) -> None:
        """Check landing for the collected messages."""
        batch, self._batch = self._batch, []
        if batch:
            check_landing(batch)

    def summary(self) -> dict[str, Any]:
        """Return the counts."""
        return {"inputs": self.inputs, "outcomes": dict(self.outcomes)}
