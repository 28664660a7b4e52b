"""Shuffle of a snapshot into another generation: each row arrives once in its key group, with its checksum."""

import json
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.columnar.snapshot.checksum import added, fingerprint, row_hashes
from fleetpulse.columnar.snapshot.rows import COMPARED_PARTS, GROUP, OWN_ROW, SNAPSHOT_SCHEMA
from fleetpulse.columnar.snapshot.shuffle import PARCEL_SCHEMA, SUMS, collect_facts, partition_rows, rows_of
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row, hash64
from tests.support.form import examples
from tests.support.histories.histories import signal
from tests.support.histories.key_groups import Stream, snapshot_of
from tests.support.histories.strategies import histories
from tests.support.refusals import refused

MASK = 2**64 - 1
NUMBERS = (None, 0, 1, -1, 2**62, -(2**62))
TEXTS = (None, "", "a", "12345678", "12345678\0", "ü", "a longer text than two words")


def value_of(kind: pa.DataType, random: Random) -> Any:
    if pa.types.is_string(kind):
        return random.choice(TEXTS)
    return random.choice((None, 0, 1, -1)) if kind == pa.int32() else random.choice((*NUMBERS, random.randrange(2**62)))


def random_rows(random: Random) -> list[dict[str, Any]]:
    """Return up to a dozen rows with a value or null in every column."""
    rows = [{field.name: value_of(field.type, random) for field in SNAPSHOT_SCHEMA} for _ in range(random.randrange(1, 13))]
    return [{**row, "part": random.choice(COMPARED_PARTS)} for row in rows]


# rows are generated from a seed, because drawing each value would take minutes
ROWS = st.integers(0, 2**32).map(lambda seed: random_rows(Random(seed)))


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    columns = [pa.array([row[field.name] for row in rows], pa.int64()).cast(field.type) if pa.types.is_timestamp(field.type)
               else pa.array([row[field.name] for row in rows], field.type) for field in SNAPSHOT_SCHEMA]  # fmt: skip
    return pa.RecordBatch.from_arrays(columns, schema=SNAPSHOT_SCHEMA)


def mixed(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
    return bits ^ (bits >> 31)


def hash_of(row: dict[str, Any]) -> int:
    """Hash a row by the specification, without columns: an independent implementation."""
    found = 0
    for field in SNAPSHOT_SCHEMA:
        if field.name == "key_group":
            continue
        value = row[field.name]
        if value is None:
            found = mixed(found)
        elif isinstance(value, int):
            found = mixed(mixed((found + 1) & MASK) ^ (value & MASK))
        else:
            text, found = value.encode(), mixed((found + 1) & MASK)
            for at in range(0, len(text) - len(text) % 8 + 1, 8):
                found = mixed(found ^ int.from_bytes(text[at : at + 8], "little"))
            found = mixed(found ^ len(text))
    return found


@settings(max_examples=examples(50))
@given(ROWS, st.integers(0, 12))
def test_the_hash_of_a_row_follows_the_specification_at_any_offset(rows: list[dict[str, Any]], cut: int) -> None:
    batch = batch_of(rows)
    assert row_hashes(batch).tolist() == [hash_of(row) for row in rows]
    assert row_hashes(batch.slice(cut)).tolist() == [hash_of(row) for row in rows[cut:]]


@settings(max_examples=examples(50))
@given(ROWS, st.randoms(use_true_random=False), st.integers(0, 12))
def test_order_batches_and_key_groups_do_not_change_the_fingerprint(rows: list[dict[str, Any]], random: Any, cut: int) -> None:
    batch = batch_of(rows)
    others = [{**row, "key_group": random.randrange(9)} for row in random.sample(rows, len(rows))]
    assert added([fingerprint(batch_of(others[:cut])), fingerprint(batch_of(others[cut:]))]) == fingerprint(batch)


@given(ROWS, st.data())
def test_a_changed_value_in_any_column_changes_the_fingerprint(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(rows) - 1))
    field = data.draw(st.sampled_from([one for one in SNAPSHOT_SCHEMA if one.name not in ("key_group", "part")]))
    other = value_of(field.type, Random(data.draw(st.integers(0, 2**32))))
    changed = [*rows[:index], {**rows[index], field.name: other}, *rows[index + 1 :]]
    assert (fingerprint(batch_of(changed)) == fingerprint(batch_of(rows))) == (rows[index][field.name] == other)


def test_a_hundred_thousand_similar_rows_have_distinct_hashes() -> None:
    count = 100_000
    columns = {field.name: pa.nulls(count, field.type) for field in SNAPSHOT_SCHEMA}
    columns |= {"seq": pa.array(range(count)), "site": pa.array([str(one % 10) for one in range(count)])}
    hashes = row_hashes(pa.RecordBatch.from_pydict(columns, schema=SNAPSHOT_SCHEMA))
    assert len(np.unique(hashes)) == count
    assert len(np.unique(hashes >> np.uint64(32))) > 99_990, "collisions in each half must not exceed chance"
    assert len(np.unique(hashes & np.uint64(2**32 - 1))) > 99_990


@settings(max_examples=examples(25))
@given(histories(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_every_row_is_sent_once_in_the_parcel_of_its_key_group(
    rows: list[Row], groups: int, new_groups: int, parcel_rows: int
) -> None:
    stream = Stream(Deployment(5_000, 5_000), groups, {})
    stream.batch(rows)
    snapshot = snapshot_of(stream)
    sent = pa.Table.from_batches(partition_rows(snapshot.to_batches(10), new_groups, parcel_rows), PARCEL_SCHEMA).to_pylist()
    facts = [one for one in sent if one["rows"] is None]
    carried = [(place, row) for place, content in ((one["place"], one["rows"]) for one in sent if one["rows"] is not None)
               for row in rows_of([content]).to_pylist()]  # fmt: skip
    assert all(place == hash64(row["device_id"]) % new_groups for place, row in carried)
    shared = [(one["place"], one["part"], one["content"]) for one in facts if one["part"] != SUMS]
    received = [row for _, row in carried] + [{**dict.fromkeys(SNAPSHOT_SCHEMA.names), **_shared_row(one)} for one in shared]
    assert sorted(map(_compared, received)) == sorted(map(_compared, snapshot.to_pylist()))
    known = collect_facts((one["place"], one["part"], one["content"]) for one in facts)
    assert {part: count for part, (count, _) in known.sums.items()} == {
        part: count for part in COMPARED_PARTS if (count := sum(row["part"] == part for _, row in carried))
    }


def _shared_row(fact: tuple[int, str, str]) -> dict[str, Any]:
    place, part, content = fact
    return {"part": part, "key_group": place, "content": content}


def _compared(row: dict[str, Any]) -> str:
    """Return a row as JSON, without the device of rows that are sent only as JSON."""
    is_of_device = row["part"] in COMPARED_PARTS and row["device_id"] not in (None, "_")
    return json.dumps(row if is_of_device else {**row, "device_id": None, "device_hash": None}, sort_keys=True, default=str)


@pytest.mark.parametrize("key_groups", [None, 3])
def test_sums_are_equal_for_packed_and_unpacked_rows(key_groups: int | None) -> None:
    stream = Stream(Deployment(1000, 1000), 2, {})
    stream.batch([signal(10, "d", boot="b", seq=3), signal(20, "e", "error", code="x"), signal(40, "d")])
    batches = snapshot_of(stream).to_batches()
    [packed, sums] = [
        {one["content"] for one in pa.Table.from_batches(partition_rows(batches, groups)).to_pylist() if one["part"] == SUMS}
        for groups in (key_groups, None)
    ]
    assert packed == sums


def test_pending_broadcast_rows_that_differ_between_key_groups_are_refused() -> None:
    context = json.dumps({"frontier_ms": 1, "bytes": 7})
    facts = [(place, GROUP, context) for place in (0, 1)] + [(place, OWN_ROW, json.dumps({"kind": "death"})) for place in (0, 1)]
    sums = (None, SUMS, "{}")
    assert collect_facts([*facts, sums]).waiting == (json.dumps({"kind": "death"}),)
    for damaged in (facts[:-1], [*facts, facts[-1]], [*facts[:-1], (1, OWN_ROW, json.dumps({"kind": "birth"}))]):
        with refused("snapshot-damaged", match="pending in every key group"):
            collect_facts([*damaged, sums])
