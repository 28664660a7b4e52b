"""Columnar decoding of segments: its tables equal those of row-by-row decoding with `decode`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetpulse.core.messages.decode import MAX_PAYLOAD_BYTES, Rejection, decode, digest64
from fleetpulse.core.messages.replay_envelope import is_end
from fleetpulse.core.rows import BRIDGE, KEPT_BYTES, SET_WHEN_READ, Kind, Origin, Row, hash64
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.ingest.batch_decode import decode_plain
from fleetpulse.io.ingest.segments import SegmentRow, rows_table
from fleetpulse.io.tables import tables
from streaming.landing.landing import LANDED
from streaming.landing.merge import Part, place
from streaming.landing.rows import accepted_rows, decode_parts

NOW = 1_789_000_000_000
NOTHING = {table.name: {BRIDGE: 0} for table in LANDED}
PLAIN = (
    b'{"v": 1, "ts": 1788999999000, "boot": "b0001", "seq": 7, "uptime_s": 3, "firmware": "1.2.3", "gateway": "g", '
    b'"code": "E7", "metrics": {"temperature": 21.5, "voltage": 3.3}}'
)
TOPICS = [
    "fleet/s/d/heartbeat",
    "fleet/s/d/telemetry",
    "fleet/site 2/device-2/error",
    "fleet/s/d/birth",
    "fleet/s/d/death",
    "fleet/s/d/ack",
    "fleet/Köln/ütf/heartbeat",
    "fleet/_/b/tick",
    "fleet/_/b/gap",
    "fleet/s/d/registry",
    "fleet/s/d/control",
    "fleet/_/_/policy",
    "fleet/_/_/heartbeat",
    "fleet/s/d/gossip",
    "fleet/s/d",
    "fleet//d/heartbeat",
    "fleet/s/d\u00ad/heartbeat",
    "fleet/s/" + "d" * 129 + "/birth",
    "foreign/topic",
    "replay/r",
    "replay",
    "not-utf-8",
]
SCALARS = [
    *("0", "-0", "1", "7.0", "1.5", "1e3", "-1", "-0.0", "0.0001", "0.00001", "1e16", "1e15", "123456789012345680.0", "5e-324"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" * 40, "9" * 5_000, "1e400", "-1e400", "1e-400"),
    *("1788999999000", "1788999999000.999", "1788999999000.9999999", "1788999999", "1788999999000000", "253402300799999"),
    *("253402300800000", "253402300799999.5", "946684800000", "946684799999", "946684799999.9", "-1788999999000"),
    *("NaN", "Infinity", "-Infinity", "nan", "01", "1.", ".5", "+1", "1e", "0x1", "1_0", "true", "false", "null", "nul", "TRUE"),
    *('""', '"x"', '"x y"', '"1788999999000"', '"2026-01-01T00:00:00Z"', '"\\u0041"', '"\\u00e9"', '"é"', '"\\n"', '"\\/"'),
    *('"\\ud800"', '"\\ud83d\\ude00"', '"😀"', '"\\x"', '"\\u12"', '"a\tb"', '"a\x00b"', '"\x7f"', '"\u2028"', '"\u200b"'),
    *('"' + "x" * 256 + '"', '"' + "x" * 257 + '"', '"d"', '"s"', '"heartbeat"', '"},{"', '"1e5"', '"open', '"a"b"', "'a'"),
    *("[]", "{}", "[1,]", "[[[[1.50]]]]", "[" * 20 + "]" * 20, "[" * 3_000 + "]" * 3_000, '{"a":' * 17 + "1" + "}" * 17),
    *('{"a":1,"a":2}', '{"a":1,"b":2,"a":3}', '{"a":[{},{}]}', '{"b":{"c":1},"a":{}}', '{"é":1}', '{"\\u0061":1,"a":2}', ""),
]
NAMES = ["ts", "boot", "seq", "uptime_s", "code", "firmware", "gateway", "metrics", "v", "x", "device_id", "site", "kind"]
NAMES += ["op", "from", "until", "class", "effective_from", "t\\u0073", "\\u0073eq", "é", "", "Ts"]
USUAL_VALUES = {
    "ts": st.integers(NOW - 10**6, NOW + 10**6).map(str) | st.floats(1e12, 2e12).map(repr),
    "boot": st.sampled_from(['"b1"', '"b2"', "17", "-3"]),
    "seq": st.integers(0, 2**63 + 1).map(str),
    "uptime_s": st.integers(0, 10**6).map(str) | st.integers(0, 10**6).map(lambda number: f"{number}.0"),
    "code": st.sampled_from(['"E7"', "404", '"overheated"']),
    "device_id": st.sampled_from(['"d"', '"device-2"', '"other"']),
    "site": st.sampled_from(['"s"', '"site 2"', '"Köln"']),
    "kind": st.sampled_from(['"heartbeat"', '"death"']),
}
NUMBERS = st.floats(allow_nan=False, allow_infinity=False).map(repr) | st.integers(-(2**70), 2**70).map(str)
PARTS = st.recursive(
    st.sampled_from(SCALARS) | NUMBERS | st.decimals(-1000, 1000, places=3).map(str) | st.text(max_size=5).map(json.dumps),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: "[" + ", ".join(parts) + "]")
        | st.lists(st.tuples(st.sampled_from(["a", "b", "temperature", "é", "},{"]), inner), max_size=3).map(
            lambda pairs: "{" + ",".join(f'"{name}": {part}' for name, part in pairs) + "}"
        )
    ),
    max_leaves=6,
)


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    """Return a payload: plain, almost plain, or arbitrary bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=40) | st.just(PLAIN[: draw(st.integers(0, len(PLAIN)))]))
    names = draw(st.lists(st.sampled_from(NAMES), max_size=5))
    unusual = st.sampled_from(SCALARS)
    pairs = [f'"{name}": {draw(USUAL_VALUES.get(name, PARTS) if draw(st.integers(0, 3)) else PARTS | unusual)}' for name in names]
    text = draw(st.sampled_from(["", "", "", "", " ", "\n", "\ufeff", "\x00"])) + "{" + ", ".join(pairs) + "}"
    return (text + draw(st.sampled_from(["", "", "", "", "\r\n\t ", "x", "}", ",{}", "\x00"]))).encode(errors="replace")


@st.composite
def raw_rows(draw: st.DrawFn) -> SegmentRow:
    origin = draw(st.sampled_from([Origin.MQTT, Origin.MQTT, Origin.MQTT, *Origin])).value
    recording_line = draw(st.sampled_from([(None, None), ("r", 0), ("r", 12)]))
    refused = draw(st.sampled_from([None, None, None, None, "flood"]))
    topic = draw(st.sampled_from(TOPICS[:5] * 5 + TOPICS))
    return SegmentRow(
        draw(st.integers(0, 2**41)), topic, draw(payloads() | st.just(PLAIN)), origin, *recording_line, None, refused
    )


def decoded_by_row(rows: Sequence[SegmentRow], number: int) -> dict[str, pa.Table]:
    """Return the tables of row-by-row decoding."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NOTHING}
    position = 0
    for at, raw in enumerate(rows):
        position = position + 1 if at and rows[at - 1].received_at_ms == raw.received_at_ms else 0
        arrival: dict[str, Any] = {"place": place(number, at)}
        arrival |= {"origin": raw.origin, "recording": raw.recording, "line": raw.line, "bridge": BRIDGE, "segment": number}
        arrival["received_at_ms"] = raw.received_at_ms
        if is_end(raw.origin, raw.topic, raw.recording):
            continue
        row = decode(raw.topic, raw.payload, raw.received_at_ms, Origin(raw.origin))
        if raw.refused is not None or isinstance(row, Rejection):
            rejection = (row.reason, row.detail) if isinstance(row, Rejection) and raw.refused is None else (raw.refused, None)
            kept = {"payload": raw.payload[:KEPT_BYTES], "payload_bytes": len(raw.payload), "messages": 1}
            kept["payload_digest"] = digest64(raw.payload)
            found["quarantine"].append({"topic": raw.topic, "reason": rejection[0], "detail": rejection[1], **kept, **arrival})
            continue
        found["messages"].append({**asdict(row), "device_hash": hash64(row.device_id), "position": position, **arrival})
        if row.kind is Kind.GAP:
            found["coverage"].append({"op": str(row.contents().get("op")), **arrival})
        if row.kind is Kind.REGISTRY:
            found["devices"].append({"op": str(row.contents().get("op")), "device_id": row.device_id, **arrival})
    return {table.name: tables.to_table(table, found[table.name]) for table in LANDED}


def parts_of(segments: Sequence[Sequence[SegmentRow]]) -> list[Part]:
    return [Part(BRIDGE, number, 0, rows_table(rows)) for number, rows in enumerate(segments, 1)]


def rows_taken(segments: Sequence[Sequence[SegmentRow]]) -> int:
    return accepted_rows(parts_of(segments), NOTHING["messages"])


def decoded_in_columns(segments: Sequence[Sequence[SegmentRow]]) -> dict[str, pa.Table]:
    return {table.name: rows for table, rows in decode_parts(parts_of(segments), decode).by_table(NOTHING)}


def assert_equal(segments: Sequence[Sequence[SegmentRow]]) -> None:
    found = decoded_in_columns(segments)
    assert rows_taken(segments) == found["messages"].num_rows + found["quarantine"].num_rows
    for name, rows in found.items():
        expected = pa.concat_tables([decoded_by_row(part, number)[name] for number, part in enumerate(segments, 1)])
        if name == "messages":
            expected = expected.take(np.argsort(expected["received_at"].cast(pa.int64()).to_numpy(), kind="stable"))
        assert rows.schema.equals(expected.schema)
        for column in expected.column_names:
            got, wanted = rows[column].to_pylist(), expected[column].to_pylist()
            if name == "messages" or wanted != [None] * len(wanted):
                compared = [
                    (one, other) for one, other in zip(got, wanted, strict=True) if name == "messages" or other is not None
                ]
                assert [one for one, _ in compared] == [other for _, other in compared], (name, column)


@given(st.lists(st.lists(raw_rows(), min_size=1, max_size=12), min_size=1, max_size=3))
def test_tables_equal_those_of_row_by_row_decoding(segments: list[list[SegmentRow]]) -> None:
    assert_equal(segments)


@pytest.mark.parametrize("name", NAMES)
def test_every_unusual_value_of_a_field_is_decoded_like_a_single_message(name: str) -> None:
    texts = [f'{{"{name}": {scalar}}}' for scalar in SCALARS] + [f'{{"{name}": 1, "{name}": {scalar}}}' for scalar in SCALARS]
    texts += [f'{{"metrics": {{"{name}": {scalar}, "b": 2.50}}, "{name}": 5}}' for scalar in SCALARS]
    rows = [SegmentRow(NOW, topic, text.encode(), "mqtt") for text in texts for topic in (TOPICS[0], TOPICS[4])]
    assert_equal([rows, [*rows[:3], SegmentRow(NOW, TOPICS[0], PLAIN, "mqtt")]])


@given(st.lists(NUMBERS, min_size=1, max_size=8))
@example(["1e16", "1e22", "9999999999999998.0", "0.00001", "0.0001", "1.0", "-0.0", "-0", "1E+2", "21.347382910473829"])
def test_numbers_are_written_as_python_writes_them(numbers: list[str]) -> None:
    metrics = ", ".join(f'"m{index}": {number}' for index, number in enumerate(numbers))
    assert_equal([[SegmentRow(NOW, TOPICS[1], b'{"metrics": {%s}}' % metrics.encode(), "mqtt")]])


@given(st.integers(0, 20), raw_rows())
def test_neighbours_of_an_unusual_row_are_decoded_in_columns(index: int, unusual: SegmentRow) -> None:
    rows = [SegmentRow(NOW, TOPICS[0], PLAIN, "mqtt") for _ in range(20)]
    rows.insert(index, unusual)
    table = rows_table(rows).combine_chunks()
    wanted = table["refused"].is_null().to_numpy()
    read = decode_plain(table["topic"].chunk(0), table["payload"].chunk(0), table["received_at_ms"].to_numpy(), wanted)
    assert set(read.places) >= set(range(21)) - {index}
    assert_equal([rows])


@pytest.mark.parametrize("size", [4_000, 5_000, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1])
def test_a_large_payload_is_decoded_or_refused_like_a_single_message(size: int) -> None:
    payload = b'{"metrics": {"a": "' + b"x" * (size - 22) + b'"}}'
    assert len(payload) == size
    assert_equal([[SegmentRow(NOW, TOPICS[1], one, "mqtt") for one in (payload, PLAIN)]])


def test_a_part_of_a_segment_is_decoded_like_the_complete_segment() -> None:
    rows = rows_table([SegmentRow(NOW + n, TOPICS[n % 7], b'{"seq": %d}' % n, "mqtt") for n in range(20)])
    stamped = pa.array([NOW if n % 2 else None for n in range(20)])
    parts = [Part(BRIDGE, 1, 0, rows, stamped=stamped), Part(BRIDGE, 1, 7, rows.slice(7, 9), stamped=stamped.slice(7, 9))]
    (_, all_places, complete), (_, places, part) = decode_parts(parts, decode).messages
    kept = np.isin(all_places, places)
    assert kept.sum() == part.num_rows and part.equals(complete.filter(pa.array(kept)))


@given(st.integers(0, 20), st.integers(0, 2))
def test_rows_that_a_table_already_has_are_skipped(landed_rows: int, first: int) -> None:
    rows = rows_table([SegmentRow(NOW + n, TOPICS[n % 7], b"{}", "mqtt") for n in range(20)])
    decoded = decode_parts([Part(BRIDGE, 3, first, rows)], decode)
    every = {table.name: found for table, found in decoded.by_table(NOTHING)}
    positions = {name: {BRIDGE: place(3, landed_rows)} for name in NOTHING}
    remaining = list(decoded.by_table(positions))
    assert {table.name for table, _ in remaining} == set(every) == set(NOTHING)
    for table, found in remaining:
        expected = [
            row
            for row in every[table.name].to_pylist()
            if round(row["received_at"].timestamp() * 1000) >= NOW + landed_rows - first
        ]
        assert found.to_pylist() == expected


def test_rows_of_two_bridges_are_in_the_order_of_their_receipt() -> None:
    early, late = ([SegmentRow(NOW + n, TOPICS[0], b'{"seq": %d}' % n, "mqtt") for n in range(k, 20, 2)] for k in (0, 1))
    parts = [Part(name, 1, 0, rows_table(rows)) for name, rows in ((BRIDGE, early), ("second", late))]
    positions = {name: {BRIDGE: 0, "second": 0} for name in NOTHING}
    found = {table.name: rows for table, rows in decode_parts(parts, decode).by_table(positions)}
    assert found["messages"]["seq"].to_pylist() == list(range(20))


def test_bronze_has_a_column_for_every_stored_field_of_a_row() -> None:
    stored = {column.name.removesuffix("_ms") for column in MESSAGES.columns}
    assert {name.removesuffix("_ms") for name in Row.__dataclass_fields__ if name not in SET_WHEN_READ} <= stored
