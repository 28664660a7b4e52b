"""Limits of devices: excess messages and bytes are refused, cut and counted; other devices are unaffected."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.messages.decode import decode, digest64
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.rows import SPARED_BYTES, Origin
from fleetpulse.io.ingest.payload_paths import compile_path
from fleetpulse.io.ingest.segments import SEGMENT_SCHEMA, BridgePosition, SegmentRow, read_segment, rows_table, write_segment
from fleetpulse.io.mqtt.subscriber import Arrived
from streaming.bridge import rate_limit
from streaming.bridge.buffer import FLOOD_BYTES, FLOOD_ROWS
from streaming.bridge.rate_limit import BURST_S, RateLimiter
from streaming.bridge.sequencer import REASON_FLOOD, REASON_TOPIC, BridgeSequencer
from streaming.landing.merge import Part
from streaming.landing.rows import decode_parts

NOW = 1_700_000_000_000
TOPIC = "fleet/s/loud/heartbeat"


def _exceeds(limiter: RateLimiter, topic: str, now_ms: int) -> bool:
    return list(limiter.exceeding((topic,), now_ms)) == [0]


def test_a_device_may_send_its_burst_and_then_its_limit() -> None:
    limiter = RateLimiter(2)
    assert [_exceeds(limiter, TOPIC, NOW) for _ in range(2 * BURST_S + 3)].count(True) == 3
    assert _exceeds(limiter, "fleet/s/loud/error", NOW)
    assert not _exceeds(limiter, "fleet/s/quiet/heartbeat", NOW)
    assert not _exceeds(limiter, "zigbee/one", NOW)
    assert not any(_exceeds(limiter, "zigbee/two", NOW) for _ in range(2 * BURST_S))
    assert [_exceeds(limiter, TOPIC, NOW + 1_000) for _ in range(3)] == [False, False, True]


@given(st.integers(1, 50), st.lists(st.integers(-100, 3_000), max_size=300))
def test_device_never_exceeds_burst_and_limit(per_s: int, steps: list[int]) -> None:
    limiter, now_ms, newest_ms, taken = RateLimiter(per_s), NOW, NOW, 0
    for step in steps:
        now_ms += step
        taken += not _exceeds(limiter, TOPIC, now_ms)
        newest_ms = max(newest_ms, now_ms)
    backwards_ms = sum(-step for step in steps if step < 0)  # time by which the clock was set back passes twice
    assert taken <= per_s * (BURST_S + (newest_ms - NOW + backwards_ms) / 1000) + 1


def test_dropped_and_redelivered_messages_are_counted_once() -> None:
    intake = BridgeSequencer("b", None, floods=RateLimiter(2))
    intake.go_live(NOW)
    waiting = [Arrived(TOPIC, b"{}", False, (1, number)) for number in range(2 * BURST_S + 3)]
    for again_ms in (0, 1, 2):
        intake.arrived_together(waiting, NOW + again_ms)
        assert intake.counts["flooded"] == 2, "the newest is spared"
        intake.lost(NOW + again_ms)
        assert intake.counts["flooded"] == 0


@pytest.mark.parametrize(("topic", "flooded"), [("fleet/s/lo\x01ud/heartbeat", 2), (f"fleet/s/{'long' * 200}/heartbeat", 3)])
def test_dropped_messages_with_an_invalid_topic_are_counted_once(topic: str, flooded: int) -> None:
    intake = BridgeSequencer("b", None, floods=RateLimiter(2))
    intake.go_live(NOW)
    waiting = [Arrived(topic, b"{}", False, (1, number)) for number in range(2 * BURST_S + 3)]
    for again_ms in (0, 1, 2):
        intake.arrived_together(waiting, NOW + again_ms)
        refused = {row.refused for row in intake.buffer.rows() if row.origin == Origin.MQTT}
        assert (intake.counts["flooded"], refused) == (flooded, {REASON_TOPIC})
        intake.lost(NOW + again_ms)
        assert intake.counts["flooded"] == 0


def test_messages_queued_during_an_outage_are_within_the_limit() -> None:
    away_ms, since_ms = 15 * 60_000, NOW - 15 * 60_000
    intake = BridgeSequencer("b", BridgePosition(1, since_ms), floods=RateLimiter(2))
    intake.go_live(NOW)
    queued = 2 * away_ms // 1000

    def count_refused(count: int, at_ms: int, topic: str = TOPIC) -> int:
        before = intake.counts["flooded"]
        intake.arrived_together([Arrived(topic, b"{}", False, (1, number)) for number in range(count)], at_ms)
        return intake.counts["flooded"] - before

    assert count_refused(queued + 2 * BURST_S + 4, NOW) == 3
    assert count_refused(4, NOW + 1_000) == 1, "from then on the limit applies"
    late = "fleet/s/late/heartbeat"
    assert count_refused(2 * BURST_S + 4, NOW + away_ms + 1, late) == 3, "a device silent until then has queued nothing"


def test_flood_after_an_outage_of_a_week_is_refused() -> None:
    limiter, hour_s = RateLimiter(1), 3_600
    limiter.away_since(NOW - 7 * 24 * hour_s * 1000)
    assert [_exceeds(limiter, TOPIC, NOW) for _ in range(hour_s + BURST_S + 5)].count(True) == 5


def test_device_has_one_limit_for_all_sites_and_kinds() -> None:
    limiter = RateLimiter(1)
    topics = [f"fleet/site-{number}/d/{kind}" for number in range(BURST_S) for kind in ("heartbeat", "error")]
    assert list(limiter.exceeding(topics, NOW)) == list(range(BURST_S, 2 * BURST_S))
    assert not limiter.exceeding(["fleet/site-1/other/heartbeat"], NOW)


@pytest.mark.parametrize(
    "topic",
    [
        "fleet/{word}/d/heartbeat",
        "fleet/{word}/d/error",
        "home/{word}/d/state",
        "d/state/{word}",
        "spBv1.0/g/DDATA/n/\x01{word}",
    ],
)
def test_no_word_of_a_topic_gives_a_device_another_limit(topic: str) -> None:
    """The client chooses the word, which a broker delivers with up to 65,535 bytes."""
    rules = [{"topic": pattern, "kind": "telemetry"} for pattern in ("home/{site}/{device}/state", "{device}/state/{metric}")]
    mappings = parse_mappings({"mapping": [rules[0], {**rules[1], "site": "s"}]}, compile_path)
    limiter = RateLimiter(1, mappings=mappings)
    topics = [topic.format(word=f"{number}{'x' * 600}") for number in range(BURST_S + 3)]
    intake = BridgeSequencer("b", None, floods=limiter, mappings=mappings)
    intake.go_live(NOW)
    intake.arrived_together([Arrived(one, b"{}", False, (1, number)) for number, one in enumerate(topics)], NOW)
    assert intake.counts["flooded"] in (2, 3), "outside of fleet/, the newest is spared"
    assert len({limiter.sender(one) for one in topics}) == 1
    intake.lost(NOW)
    assert list(limiter.exceeding(topics, NOW)) == [*range(BURST_S, BURST_S + 3)], "dropped messages do not count"


@pytest.mark.parametrize("identity", DeviceIdentity)
def test_an_invalid_topic_counts_towards_no_device(identity: DeviceIdentity) -> None:
    """With a mapping such as ``{site}/{device}/{metric}``, a device may publish on ``fleet/pump-1/pump-2``."""
    sender = RateLimiter(1, identity).sender
    invalid = ["fleet/d/e", "fleet/d/e/up", "fleet/s/d/heartbeat/more", "fleet/d", "fleet/"]
    assert len({sender(topic) for topic in invalid}) == 1
    assert sender(invalid[0]) not in (sender("fleet/d/e/heartbeat"), sender("fleet/s/d/heartbeat"))


@pytest.mark.parametrize(("identity", "senders"), [(DeviceIdentity.ID, 1), (DeviceIdentity.SITE_AND_ID, 2)])
def test_mapped_devices_of_two_sites_share_a_limit_only_if_they_are_one_device(identity: DeviceIdentity, senders: int) -> None:
    mappings = parse_mappings({"mapping": [{"topic": "home/{site}/{device}/{metric}", "kind": "telemetry"}]}, compile_path)
    sender = RateLimiter(1, identity, mappings=mappings).sender
    assert len({sender(f"home/{site}/d/{metric}") for site in ("a", "b") for metric in ("x", "y")}) == senders


def test_limit_of_zero_refuses_no_message() -> None:
    limiter = RateLimiter(0)
    assert not any(_exceeds(limiter, TOPIC, NOW) for _ in range(10_000))


def test_quiet_devices_are_forgotten_and_flooding_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "_MOST", 100)
    limiter = RateLimiter(1)
    for number in range(150):
        _exceeds(limiter, f"fleet/s/d{number}/heartbeat", NOW + number)
        for _ in range(BURST_S):
            _exceeds(limiter, TOPIC, NOW + number)
    assert len(limiter._buckets.slots) <= 101  # pyright: ignore[reportPrivateUsage]
    assert _exceeds(limiter, TOPIC, NOW + 151)


def test_messages_beyond_the_limit_are_written_and_go_to_quarantine(tmp_path: Path) -> None:
    intake = BridgeSequencer("b", None, floods=RateLimiter(1))
    intake.go_live(NOW)
    for number in range(BURST_S + 5):
        intake.arrived(Arrived(TOPIC, b"{}", False, (1, number + 1)), NOW)
    written = [*intake.buffer.rows()]
    assert [row.refused for row in written].count(REASON_FLOOD) == intake.counts["flooded"] == 4
    assert written[-1].refused is None, "the newest of the second is spared"
    path = write_segment(tmp_path, 1, intake.buffer.table(), bridge="b", last_canary_ms=None)
    landed = decode_parts([Part("bridge-1", 1, 0, read_segment(path))], decode)
    assert (landed.messages[0][2].num_rows, [one["messages"] for one in landed.quarantine]) == (BURST_S + 1, [1, 3])
    assert {one["reason"] for one in landed.quarantine} == {REASON_FLOOD}
    assert "flood_limit" in landed.quarantine[0]["detail"]


def test_older_segment_without_the_newer_columns_is_read(tmp_path: Path) -> None:
    table = rows_table([SegmentRow(NOW, TOPIC, b"{}", Origin.MQTT.value)])
    path = write_segment(tmp_path, 1, table, bridge="b", last_canary_ms=None)
    older = read_segment(path).select(SEGMENT_SCHEMA.names[:7])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, older.schema) as writer:
        writer.write_table(older)
    found = read_segment(path)
    assert found.schema.equals(SEGMENT_SCHEMA)
    assert found["refused"].to_pylist() == [None]


def _flooded(topics: list[str], at_ms: list[int], per_s: int = 1) -> list[bool]:
    """Return for each message whether it is refused; its device has used up the limit before."""
    intake = BridgeSequencer("b", None, floods=RateLimiter(per_s))
    intake.go_live(NOW)
    intake.arrived_together([Arrived(TOPIC, b"{}", False, (1, number)) for number in range(per_s * BURST_S)], NOW)
    for topic, now_ms in zip(topics, at_ms, strict=True):
        intake.arrived(Arrived(topic, b"{}", False, (2, 0)), now_ms)
    return [row.refused == REASON_FLOOD for row in intake.buffer.rows()][per_s * BURST_S :]


def test_a_flood_costs_data_and_never_presence() -> None:
    burst = [Arrived(TOPIC, b"%d" % number, False, (1, number)) for number in range(20_000)]
    intake = BridgeSequencer("b", None, floods=RateLimiter(100))
    intake.go_live(NOW)
    intake.arrived_together(burst, NOW)
    counted = [row for row in intake.buffer.rows() if row.refused is None]
    assert len(counted) == 100 * BURST_S + 1
    assert counted[-1].payload == b"19999", "the newest message beyond the limit is spared"


def test_newest_message_beyond_the_limit_in_each_second_is_spared() -> None:
    assert _flooded([TOPIC] * 5, [NOW, NOW + 1, NOW + 999, NOW + 999, NOW + 999]) == [True, True, True, True, False]
    assert _flooded([TOPIC] * 4, [NOW + 1, NOW + 2, NOW + 1_001, NOW + 1_002]) == [True, False, False, False], "a token was added"
    error, other = "fleet/t/loud/error", "fleet/s/loud/tick"
    assert _flooded([TOPIC, error], [NOW, NOW]) == [True, False], "a device has one limit for all sites and kinds"
    assert _flooded([TOPIC, other], [NOW, NOW]) == [False, True], "a message of a kind that no device sends is not spared"


@pytest.mark.parametrize(
    "topics",
    [
        ("fleet/s/loud/telemetry", "fleet/s/loud/birth"),
        ("spBv1.0/g/NDATA/n", "spBv1.0/g/NBIRTH/n", "spBv1.0/g/NDEATH/n"),
        ("spBv1.0/g/DDATA/n/d", "spBv1.0/g/DBIRTH/n/d", "spBv1.0/g/DDEATH/n/d"),
        ("tele/plug-1/STATE",),
    ],
    ids=["fleet", "node", "device", "mapped"],
)
def test_a_flood_in_another_format_is_marked_as_one_below_fleet(topics: tuple[str, ...]) -> None:
    intake = BridgeSequencer("b", None, floods=RateLimiter(1), takes_foreign=True)
    intake.go_live(NOW)
    for second in range(2):
        for number in range(2_500):
            message = Arrived(topics[number % len(topics)], b"%d" % number, False, (1, 2_500 * second + number))
            intake.arrived(message, NOW + 1_000 * second)
    kept = [(row.received_at_ms - NOW, int(row.payload)) for row in intake.buffer.rows() if row.refused is None]
    assert kept == [*((0, number) for number in range(BURST_S)), (0, 2_499), (1_000, 0), (1_000, 2_499)], "newest of each second"
    assert intake.counts["flooded"] == 5_000 - len(kept)


@pytest.mark.parametrize("items", [1, 2, 40, 1_000])
def test_a_message_of_several_rows_takes_a_token_for_each(items: int) -> None:
    rule = {"topic": "g", "site": "s", "kind": "telemetry", "each": "@", "device": {"path": "key"}}
    mappings, per_s, seconds = parse_mappings({"mapping": [rule]}, compile_path), 5, 200
    intake = BridgeSequencer("b", None, floods=RateLimiter(per_s, bytes_per_s=10**9), takes_foreign=True, mappings=mappings)
    intake.go_live(NOW)
    payload = json.dumps(dict.fromkeys(map(str, range(items)))).encode()
    messages, made = [Arrived("g", payload, False, (1, number)) for number in range(20)], 0
    intake.arrived_together(messages, NOW)
    intake.lost(NOW)  # the broker delivers them again
    for second in range(seconds):
        intake.arrived_together(messages, NOW + 1_000 * second)
        made += sum(row.refused is None and row.topic == "g" for row in intake.buffer.rows()) * items
        intake.written()
    spared = seconds if items == 1 else 0  # one in each second
    assert 0 <= made - per_s * (BURST_S + seconds - 1) < items + spared


def test_topics_that_a_mapping_gives_one_device_share_its_limit() -> None:
    rules = [
        {"topic": "tele/{device}/{metric}"},
        {"topic": "z/{device...}/state"},
        {"topic": "fixed/{metric}", "device": "pump"},
        {"topic": "gw/{gateway}/{metric}", "device": {"path": "id"}},
        {"topic": "own/+/report", "device": {"path": "id"}},
    ]
    table = {"site": "h", "kind": "telemetry"}
    sender = RateLimiter(1, mappings=parse_mappings({"mapping": [{**table, **one} for one in rules]}, compile_path)).sender
    assert len({sender(topic) for topic in ("tele/pump/a", "tele/pump/b", "fixed/a", "fixed/b", "z/pump/state")}) == 1
    assert sender("gw/1/a") == sender("gw/1/b") != sender("gw/2/a")
    assert sender("own/1/report") != sender("own/2/report")
    assert len({sender(topic) for topic in ("tele/a/x", "tele/b/x", "z/a/b/state", "other/x", "fleet/s/a/birth")}) == 5


@pytest.mark.parametrize(
    ("topic", "bound"),
    [
        ("spBv1.0/g/DDATA/n/d%d", "BEHIND_NODE"),
        ("spBv1.0/g/NDATA/n%d", "OTHER_SENDERS"),
        ("tele/plug-%d/STATE", "OTHER_SENDERS"),
        ("spBv1.0/g/X%d/n", "OTHER_SENDERS"),
    ],
)
def test_invented_topics_share_a_limit_beyond_a_bound(topic: str, bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, bound, 100)
    limiter = RateLimiter(1)
    intake = BridgeSequencer("b", None, floods=limiter, takes_foreign=True)
    intake.go_live(NOW)
    for number in range(5_000):
        intake.arrived(Arrived(topic % number, b"", False, (1, number)), NOW)
    kept = [row.topic for row in intake.buffer.rows() if row.refused is None]
    assert len(kept) == 100 + BURST_S + 1
    assert kept[-1] == topic % 4_999, "the newest of the second is spared"
    assert len(limiter._buckets.slots) == 101  # pyright: ignore[reportPrivateUsage]
    assert not _exceeds(limiter, topic % 0, NOW), "a sender known before keeps its limit"
    assert not _exceeds(limiter, TOPIC, NOW)
    later_ms = NOW + 2 * BURST_S * 1000
    assert not _exceeds(limiter, topic % 0, later_ms)
    assert not any(_exceeds(limiter, topic % 9_999, later_ms) for _ in range(BURST_S)), "quiet senders are forgotten"


def test_messages_that_no_node_sends_do_not_count_as_those_of_a_node() -> None:
    sender = RateLimiter(1).sender
    others = [
        "spBv1.0/g/XDATA/n",
        "spBv1.0/g/DDATA/n",
        "spBv1.0/h/NDATA/n",
        "spBv1.0/g/NDATA/m",
        "spBv1.0/g/DDATA/n/d",
        "n",
        "g/n",
    ]
    assert len({sender(topic) for topic in ["spBv1.0/g/NDATA/n", *others]}) == 1 + len(others)


def test_spared_message_stays_once_written_and_the_next_one_is_spared_too() -> None:
    intake = BridgeSequencer("b", None, floods=RateLimiter(1))
    intake.go_live(NOW)
    for number in range(BURST_S + 1):
        intake.arrived(Arrived(TOPIC, b"{}", False, (1, number)), NOW)
    assert [row.refused for row in intake.buffer.rows()] == [None] * (BURST_S + 1)
    intake.written()
    for number in range(3):
        intake.arrived(Arrived(TOPIC, b"{}", False, (2, number)), NOW + 1)
    assert [row.refused for row in intake.buffer.rows()] == [REASON_FLOOD, REASON_FLOOD, None]


@given(
    st.integers(1, 1_000), st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 5_000)), max_size=300), st.integers(1, 5_000)
)
def test_device_never_exceeds_its_bytes_by_more_than_one_message(per_s: int, sent: list[tuple[int, int]], largest: int) -> None:
    limiter, now_ms, taken = RateLimiter(0, bytes_per_s=per_s), NOW, 0
    for step, size in sent:
        now_ms += step
        size = min(size, largest)
        taken += size if not limiter.exceeding((TOPIC,), now_ms, (size,)) else 0
    assert taken <= per_s * (BURST_S + (now_ms - NOW) / 1000) + largest


def _byte_limited(per_s: int) -> BridgeSequencer:
    intake = BridgeSequencer("b", None, floods=RateLimiter(0, bytes_per_s=per_s))
    intake.go_live(NOW)
    return intake


@pytest.mark.parametrize("together", [True, False])
def test_bytes_beyond_the_limit_are_refused_and_cut(tmp_path: Path, together: bool) -> None:
    intake, payload = _byte_limited(1_000), b"{" + b" " * 9_998 + b"}"
    messages = [Arrived(TOPIC, payload, False, (1, number)) for number in range(9)]
    messages.append(Arrived("fleet/s/quiet/heartbeat", payload, False, (1, 9)))
    if together:
        intake.arrived_together(messages, NOW)
    else:
        for one in messages:
            intake.arrived(one, NOW)
    assert intake.counts["flooded"] == 3, "6 messages of 10,000 bytes are within the burst, and the large newest is not spared"
    table = intake.buffer.table()
    assert table["refused"].to_pylist() == [None] * 6 + [REASON_FLOOD] * FLOOD_ROWS + [None]
    assert intake.buffer.size_bytes == sum(len(one.topic) for one in messages) + 7 * len(payload) + 3 * FLOOD_BYTES
    path = write_segment(tmp_path, 1, table, bridge="b", last_canary_ms=None)
    refused = decode_parts([Part("bridge-1", 1, 0, read_segment(path))], decode).quarantine[0]
    assert (refused["payload"], refused["payload_bytes"]) == (payload[:FLOOD_BYTES], len(payload))
    assert (refused["payload_digest"], refused["messages"], refused["reason"]) == (digest64(payload), 1, REASON_FLOOD)
    assert "flood_bytes" in refused["detail"]


def test_newest_small_message_beyond_the_limit_of_bytes_is_spared() -> None:
    intake = _byte_limited(100)
    intake.arrived(Arrived(TOPIC, bytes(100 * BURST_S), False, (1, 0)), NOW)
    for size in (SPARED_BYTES, SPARED_BYTES, SPARED_BYTES + 1):
        intake.arrived(Arrived(TOPIC, bytes(size), False, (1, size)), NOW)
    assert [row.refused for row in intake.buffer.rows()] == [None, REASON_FLOOD, None, REASON_FLOOD]


def test_bytes_of_dropped_and_redelivered_messages_are_counted_once() -> None:
    intake = _byte_limited(100)
    waiting = [Arrived(TOPIC, bytes(2_000), False, (1, number)) for number in range(5)]
    for _ in range(3):
        intake.arrived_together(waiting, NOW)
        assert intake.counts["flooded"] == 2
        intake.lost(NOW)


def test_message_beyond_the_limit_of_bytes_takes_no_message_from_the_limit() -> None:
    floods = RateLimiter(1, bytes_per_s=100)
    intake = BridgeSequencer("b", None, floods=floods)
    intake.go_live(NOW)
    for size in (6_000, *[2_000] * BURST_S):
        intake.arrived(Arrived(TOPIC, bytes(size), False, (1, 0)), NOW)
    assert intake.counts["flooded"] == BURST_S
    floods.refund("loud", 1_000_000)
    assert [_exceeds(floods, TOPIC, NOW) for _ in range(BURST_S + 1)].count(False) == BURST_S, "the message refunded, too"


def test_flood_costs_a_segment_few_rows_which_count_its_messages(tmp_path: Path) -> None:
    intake = BridgeSequencer("b", None, floods=RateLimiter(1))
    intake.go_live(NOW)
    for second in range(3):
        intake.arrived_together([Arrived(TOPIC, b"{}", False, (1, number)) for number in range(1_000)], NOW + second * 1_000)
    other, last_ms = "fleet/s/other/heartbeat", NOW + 2_001
    intake.arrived_together([Arrived(other, b"{}", False, (2, number)) for number in range(BURST_S + 2)], last_ms)
    spared = 3 + 1 + 2  # one in each second and device, and the tokens of two seconds
    flooded = intake.counts["flooded"]
    assert flooded == 3_000 + 2 - BURST_S - spared
    path = write_segment(tmp_path, 1, intake.buffer.table(), bridge="b", last_canary_ms=None)
    segment = read_segment(path)
    assert segment.num_rows == 2 * BURST_S + spared + FLOOD_ROWS + 1
    assert segment["received_at_ms"][-1].as_py() == last_ms, "the last row is the position of the bridge"
    landed = decode_parts([Part("bridge-1", 1, 0, segment)], decode)
    assert sum(row["messages"] for row in landed.quarantine) == flooded
    assert [row["messages"] for row in landed.quarantine if row["topic"] == TOPIC] == [1, flooded - 2]
    assert len(intake.written()) == 3_000 + BURST_S + 2, "every message is acknowledged"
