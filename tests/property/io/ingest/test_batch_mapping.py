"""Columnar decoding of mapped messages: its tables equal those of `Mappings.decode`, message by message."""

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.messages.mapping import Mappings
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.core.rows import Origin
from fleetpulse.io.ingest.batch_mapping import decode_plain_mapped
from fleetpulse.io.ingest.payload_paths import compile_path
from fleetpulse.io.ingest.segments import SegmentRow, rows_table
from streaming.landing.rows import decode_parts
from tests.property.io.ingest.test_batch_decode import NAMES, NOTHING, NOW, PLAIN, SCALARS, parts_of, payloads

FIELDS = {name: name for name in ("ts", "boot", "seq", "uptime_s", "code", "firmware", "gateway")}
BY_SEQ = {"path": "seq", "values": {"1": "error", "null": "ignore"}, "else": "birth"}
RULES = (
    {"topic": "a/{site}/{device}/{kind}", **FIELDS, "metrics": "metrics"},
    {"topic": "b/{device...}", "site": "h", "kind": "birth", "when": "boot", "ts": "ts", "ts_else": "received"},
    {"topic": "b/{device...}", "site": "h", "kind": BY_SEQ},
    {"topic": "c/{metric}", "site": {"path": "site"}, "device": {"path": "device_id || code"}, "kind": "telemetry", "ts": "ts"},
    {"topic": "d", "site": "h", "each": "metrics", "device": {"path": "key"}, "kind": "heartbeat"},
    {
        "topic": "f/{gateway}/{device}/{metric}",
        "site": "h",
        "kind": "birth",
        "ts": "ts",
        "seq": "seq",
        "metrics": "code",
    },
    {
        "topic": "g/{site}/{device}",
        "kind": "telemetry",
        "ts": "ts",
        "ts_unit": "iso",
        "boot": "boot",
        "session": "boot",
        "metrics": "seq || metrics",
    },
    {"topic": "h/{site}/{device}", "kind": "heartbeat", "ts": "ts", "ts_unit": "s", "uptime_s": "uptime_s", "metrics": "metrics"},
)
BY_TOPIC = ("a/s/d/heartbeat", "a/s/d/death", "f/v/d/m", "f/w/d/n", "g/s/d", "h/s/d")  # these decide on rule and address
MAPPINGS = parse_mappings({"mapping": list(RULES)}, compile_path)
TOPICS = (
    "a/s/d/heartbeat",
    "a/s/d/death",
    "a/s/d/gossip",
    "a/s/ü#/birth",
    "b/x/y",
    "c/t",
    "d",
    "fleet/s/d/telemetry",
    "e",
    *BY_TOPIC[2:],
)


def assert_equal(segments: Sequence[Sequence[SegmentRow]]) -> None:
    found, wanted = (
        {table.name: rows for table, rows in decode_parts(parts_of(segments), MAPPINGS.decode, mappings=used).by_table(NOTHING)}
        for used in (MAPPINGS, Mappings())
    )
    for name, rows in found.items():
        assert rows.schema.equals(wanted[name].schema)
        assert rows.to_pylist() == wanted[name].to_pylist(), name


@given(st.lists(st.tuples(st.sampled_from(TOPICS), payloads(), st.integers(0, 3)), min_size=1, max_size=20))
def test_mapped_messages_are_decoded_as_one_by_one(messages: list[tuple[str, bytes, int]]) -> None:
    assert_equal([[SegmentRow(NOW + later, topic, payload, "mqtt") for topic, payload, later in messages]])


@pytest.mark.parametrize("name", NAMES)
def test_every_unusual_value_of_a_mapped_field_is_decoded_like_a_single_message(name: str) -> None:
    texts = [f'{{"{name}": {scalar}, "boot": "b"}}' for scalar in SCALARS]
    texts += [f'{{"metrics": {{"{name}": {scalar}, "b": 2.50}}, "{name}": 5}}' for scalar in SCALARS]
    assert_equal(
        [[SegmentRow(NOW, topic, text.encode(), "mqtt") for text in texts for topic in (TOPICS[0], *TOPICS[4:7], *TOPICS[9:])]]
    )


def test_usual_mapped_messages_are_decoded_in_columns() -> None:
    rows = rows_table([SegmentRow(NOW, topic, PLAIN, Origin.MQTT.value) for topic in TOPICS]).combine_chunks()
    accepted = pa.array([True] * rows.num_rows).to_numpy(False)
    read = decode_plain_mapped(
        MAPPINGS, rows["topic"].chunk(0), rows["payload"].chunk(0), rows["received_at_ms"].to_numpy(), accepted
    )
    assert read.places.tolist() == [0, 1, 4, 9, 10, 11]


def test_topics_known_from_an_earlier_segment_are_decoded_alike() -> None:
    rows = [SegmentRow(NOW, topic, PLAIN, "mqtt") for topic in BY_TOPIC]
    assert_equal([rows[:1], rows[::-1], [*rows, SegmentRow(NOW, "g/t/d", PLAIN, "mqtt"), *rows]])


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"5", b"[]", b'"x"', b"null", b"\xff", b'{"t\\u0073": 5}', b'{"x": "\\ud800"}', b'{"x": "\xff"}']
)
def test_neighbours_of_an_unusual_mapped_payload_are_decoded_like_single_messages(payload: bytes) -> None:
    assert_equal([[SegmentRow(NOW, topic, one, "mqtt") for one in (PLAIN, payload, PLAIN) for topic in BY_TOPIC]])
