"""Bound of the disk space that one device can fill: row costs, limits of the bridge, and the page about them."""

import base64
import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pytest

from fleetpulse.columnar.fold.judgement_batches import judgements_to_batch, sum_repeats
from fleetpulse.core.judgements import JudgementKind, clock_behind, message_judgement
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.messages.text import MAX_ID_BYTES
from fleetpulse.core.presence.gateways import Gateways
from fleetpulse.core.rows import Kind, Row
from fleetpulse.core.tables import GATEWAYS, MESSAGES, QUARANTINE
from fleetpulse.core.times import MINUTE_MS
from fleetpulse.io.delta.appender import write_files
from fleetpulse.io.ingest.segments import SegmentRow, rows_table
from fleetpulse.io.lifecycle.judgement_sink import files_of, with_table_columns
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import Arrived
from fleetpulse.io.tables.adaptive_batching import FEW_ROWS, hold_ms, verdict_delay_ms
from fleetpulse.planning import device_bound
from fleetpulse.planning.device_bound import DeviceLimits, bytes_a_day
from fleetpulse.settings import Settings
from streaming.bridge import buffer
from streaming.bridge.bridge import BridgeSettings
from streaming.bridge.rate_limit import BURST_S, RateLimiter
from streaming.bridge.sequencer import MAX_TOPIC, BridgeSequencer
from streaming.landing.merge import Part
from streaming.landing.rows import decode_parts
from tests.support.histories.floods import UNTIL_MS, flood

NOW = 1_700_000_000_000
AT_ONE_TIME = (JudgementKind.LATE, JudgementKind.DUPLICATE, JudgementKind.CLOCK)
TOPIC = "fleet/oslo/pump-1/telemetry"
SETTINGS = Settings()


def _random() -> random.Random:
    return random.Random(7)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.parquet"))


@pytest.mark.parametrize("kind", [JudgementKind.LATE, JudgementKind.DUPLICATE])
@pytest.mark.parametrize("text", [0, 256])
def test_judgements_about_hostile_messages_cost_at_most_the_bound(tmp_path: Path, kind: JudgementKind, text: int) -> None:
    chance, count = _random(), 600  # messages between two batches of the job
    listed = []
    for number in range(count):
        at_ms = NOW + 10 * number
        event_ms = at_ms - chance.randrange(61_000, 31 * 86_400_000)
        boot = base64.b85encode(chance.randbytes(256))[:text].decode() or None
        row = Row(at_ms, Kind.TELEMETRY, "pump-1", "oslo", event_ms, boot=boot, seq=chance.randrange(2**31))
        late = kind is JudgementKind.LATE
        reason, by_ms = (clock_behind(event_ms - at_ms), at_ms - 60_000 - event_ms) if late else ("", None)
        listed.append(message_judgement(row, kind, reason, by_ms))
    files_of(tmp_path, pa.Table.from_batches([with_table_columns(judgements_to_batch(listed), 1)]))
    assert _size(tmp_path) <= count * (device_bound.JUDGEMENT_BYTES + text)


def test_rows_for_several_messages_cost_at_most_the_bound(tmp_path: Path) -> None:
    written: list[pa.RecordBatch] = []
    for call in range(40):
        listed = [one for one in flood(random.Random(call), 2_000, MINUTE_MS) if one.kind in AT_ONE_TIME]
        judgements = sum_repeats(judgements_to_batch(listed), UNTIL_MS)
        sums = judgements.filter(judgements["messages"].is_valid())
        assert judgements.num_rows - sums.num_rows == device_bound.NAMED_ROWS
        assert 0 < sums.num_rows <= device_bound.SUM_ROWS
        written.append(with_table_columns(sums, 1))
    table = pa.Table.from_batches(written)
    files_of(tmp_path, table)
    assert _size(tmp_path) <= table.num_rows * device_bound.SUM_BYTES


@pytest.mark.parametrize(
    ("name", "per_row"),
    [("small", 0), ("metrics", 600), ("sites", MAX_ID_BYTES), ("undecodable", 600), ("topics", 0), ("flood", 128)],
)
def test_landed_rows_of_hostile_messages_cost_at_most_the_bound(tmp_path: Path, name: str, per_row: int) -> None:
    chance, rows = _random(), list[SegmentRow]()
    for number in range(5_000):
        at_ms = NOW + 10 * number
        topic, payload, more = TOPIC, chance.randbytes(per_row), {}
        if name == "sites":
            topic, payload = f"fleet/{chance.randbytes(MAX_ID_BYTES // 2).hex()}/pump-1/telemetry", b"{}"
        elif name == "topics":
            site = "".join(chr(0x20000 + chance.randrange(40_000)) for _ in range((device_bound.MAX_TOPIC_BYTES - 30) // 4))
            topic = f"fleet/{site}/pump-1/telemetry"
        elif name == "small":
            payload = b'{"ts":%d,"seq":%d}' % (at_ms - chance.randrange(31 * 86_400_000), chance.randrange(2**31))
        elif name == "metrics":
            payload = b'{"metrics":{"a":"%s"}}' % base64.b64encode(payload)[: per_row - 20]
        elif name == "flood":
            more = {
                "refused": "flood",
                "payload_bytes": 900 + number,
                "payload_digest": chance.randrange(2**63),
                "messages": number,
            }
        rows.append(SegmentRow(at_ms, topic, payload, "mqtt", **more))
    landed = decode_parts([Part("bridge-1", 1, 0, rows_table(rows))], decode)
    places = {table: {"bridge-1": 0} for table in ("messages", "quarantine", "coverage", "devices", "gateways")}
    written = {table.name: found for table, found in landed.by_table(places) if found.num_rows}
    expected, cost = MESSAGES, device_bound.MESSAGE_BYTES
    if name in ("undecodable", "topics", "flood"):
        expected, cost = QUARANTINE, device_bound.REFUSED_BYTES + (device_bound.MAX_TOPIC_BYTES if name == "topics" else 0)
    assert written.keys() == {expected.name}
    write_files(tmp_path, written[expected.name])
    assert _size(tmp_path) <= len(rows) * (cost + per_row)


@pytest.mark.parametrize("text", [0, 256])
def test_records_of_a_hostile_gateway_cost_at_most_the_bound(tmp_path: Path, text: int) -> None:
    chance, rows = _random(), list[SegmentRow]()
    for number in range(2_000):
        session = base64.b64encode(chance.randbytes(text))[:text].decode() or str(number)
        at_ms = NOW + 10 * number - chance.randrange(59_000)
        payload = json.dumps({"gateway": "pump-1", "session": session, "seq": chance.randrange(2**31), "ts": at_ms}).encode()
        topic = f"fleet/{chance.randbytes(MAX_ID_BYTES // 2).hex()}/pump-1/birth"
        rows.append(SegmentRow(NOW + 10 * number, topic, payload, "mqtt"))
    landed = decode_parts([Part("bridge-1", 1, 0, rows_table(rows))], decode)
    landed.mark_gateway_events(Gateways(60_000))
    places = {table: {"bridge-1": 0} for table in ("messages", "quarantine", "coverage", "devices", "gateways")}
    [records] = [found for table, found in landed.by_table(places) if table is GATEWAYS]
    assert records.num_rows == len(rows)
    write_files(tmp_path, records)
    assert _size(tmp_path) <= len(rows) * (device_bound.GATEWAY_BYTES + MAX_ID_BYTES + text)


@pytest.mark.parametrize("size", [20, 700, 5_000, 100_000])
def test_bridge_accepts_at_most_the_messages_and_bytes_of_the_bound(size: int) -> None:
    """One device floods for ten seconds, after its burst; a segment is written every 125 ms."""
    limits, seconds, each_step = DeviceLimits(), 10, 200 if size < 5_000 else 20
    floods = RateLimiter(limits.messages_per_s, bytes_per_s=limits.bytes_per_s)
    intake = BridgeSequencer("b", None, floods=floods)
    intake.go_live(NOW)
    floods.exceeding([TOPIC] * (limits.messages_per_s * BURST_S - 1), NOW)
    floods.exceeding([TOPIC], NOW, [limits.bytes_per_s * BURST_S])
    accepted, content, refused, kept, sent = 0, 0, 0, 0, 0
    for step in range(int(seconds * limits.segments_per_s)):
        together = [Arrived(TOPIC, bytes(size), False, (1, number)) for number in range(each_step)]
        intake.arrived_together(together, NOW + (step + 1) * 125)
        sent += each_step
        for row in intake.buffer.table().select(["payload", "refused", "messages"]).to_pylist():
            if row["refused"] is None:
                accepted, content = accepted + 1, content + len(row["payload"])
            else:
                refused, kept = refused + 1, kept + len(row["payload"])
        intake.written()
    assert accepted + intake.counts["flooded"] == sent
    assert accepted <= limits.accepted_per_s * seconds + 1
    assert content <= limits.content_per_s * seconds + size
    assert refused <= limits.segments_per_s * limits.flood_rows * seconds
    assert kept <= refused * limits.flood_bytes


def test_limits_of_the_bound_are_those_in_force(tmp_path: Path) -> None:
    limits, bridge = DeviceLimits(), BridgeSettings(tmp_path, None, tmp_path, BrokerAddress("127.0.0.1", 1883), "session")
    assert (limits.messages_per_s, limits.bytes_per_s) == (SETTINGS.flood_limit, SETTINGS.flood_bytes)
    assert (limits.flood_rows, limits.flood_bytes) == (buffer.FLOOD_ROWS, buffer.FLOOD_BYTES)
    assert device_bound.MAX_TOPIC_BYTES == MAX_TOPIC
    by_time = 1 / bridge.flush_interval_s
    assert limits.segments_per_s >= by_time + 20_000 / bridge.max_rows, "20,000 messages a second"
    hold = hold_ms(verdict_delay_ms(60_000, SETTINGS.verdict_delay))
    assert limits.batches_per_s >= 1_000 / hold + 20_000 / FEW_ROWS


def test_page_shows_the_bound() -> None:
    page = (Path(__file__).parents[3] / "docs/concepts/limits-of-a-device.md").read_text()
    rows = re.findall(r"^\| `(\w+)`[^|]*\|((?: [\d,]+ MB \|)+)", page, re.MULTILINE)
    shown = {name: [int(text.replace(",", "")) for text in re.findall(r"[\d,]+", cells)] for name, cells in rows}
    planned = [bytes_a_day(DeviceLimits()), bytes_a_day(DeviceLimits(10, 4_096)), bytes_a_day(DeviceLimits(1, 1_024))]
    assert shown == {name: [round(one[name] / 1e6) for one in planned] for name in planned[0]}
