"""What is carried into another generation is all there, each row once and in its key group, and is what was summed up."""

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
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row, hash64
from tests.support.histories.histories import signal
from tests.support.histories.key_groups import Stream, snapshot_of
from tests.support.histories.strategies import histories

MASK = 2**64 - 1
NUMBERS = (None, 0, 1, -1, 2**62, -(2**62))
TEXTS = (None, "", "a", "12345678", "12345678\0", "ü", "a longer text than two words")


def value_of(kind: pa.DataType, random: Random) -> Any:
    if pa.types.is_string(kind):
        return random.choice(TEXTS)
    return random.choice((None, 0, 1, -1)) if kind == pa.int32() else random.choice((*NUMBERS, random.randrange(2**62)))


def made_up(random: Random) -> list[dict[str, Any]]:
    """Make up to a dozen rows with something, or nothing, in every column."""
    rows = [{field.name: value_of(field.type, random) for field in SNAPSHOT_SCHEMA} for _ in range(random.randrange(1, 13))]
    return [{**row, "part": random.choice(COMPARED_PARTS)} for row in rows]


ROWS = st.integers(0, 2**32).map(lambda number: made_up(Random(number)))  # drawn one by one they would take minutes


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    columns = [pa.array([row[field.name] for row in rows], pa.int64()).cast(field.type) if pa.types.is_timestamp(field.type)
               else pa.array([row[field.name] for row in rows], field.type) for field in SNAPSHOT_SCHEMA]  # fmt: skip
    return pa.RecordBatch.from_arrays(columns, schema=SNAPSHOT_SCHEMA)


def mixed(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
    return bits ^ (bits >> 31)


def hash_of(row: dict[str, Any]) -> int:
    """Hash a row as it is written down, without columns: the second witness."""
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


@settings(max_examples=50)
@given(ROWS, st.integers(0, 12))
def test_a_row_has_the_hash_that_is_written_down_wherever_it_lies(rows: list[dict[str, Any]], cut: int) -> None:
    batch = batch_of(rows)
    assert row_hashes(batch).tolist() == [hash_of(row) for row in rows]
    assert row_hashes(batch.slice(cut)).tolist() == [hash_of(row) for row in rows[cut:]]


@settings(max_examples=50)
@given(ROWS, st.randoms(use_true_random=False), st.integers(0, 12))
def test_order_batches_and_key_groups_do_not_change_the_fingerprint(rows: list[dict[str, Any]], random: Any, cut: int) -> None:
    batch = batch_of(rows)
    others = [{**row, "key_group": random.randrange(9)} for row in random.sample(rows, len(rows))]
    assert added([fingerprint(batch_of(others[:cut])), fingerprint(batch_of(others[cut:]))]) == fingerprint(batch)


@given(ROWS, st.data())
def test_another_value_in_any_column_is_another_fingerprint(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(rows) - 1))
    field = data.draw(st.sampled_from([one for one in SNAPSHOT_SCHEMA if one.name not in ("key_group", "part")]))
    other = value_of(field.type, Random(data.draw(st.integers(0, 2**32))))
    changed = [*rows[:place], {**rows[place], field.name: other}, *rows[place + 1 :]]
    assert (fingerprint(batch_of(changed)) == fingerprint(batch_of(rows))) == (rows[place][field.name] == other)


def test_a_hundred_thousand_rows_that_differ_little_have_as_many_hashes() -> None:
    count = 100_000
    columns = {field.name: pa.nulls(count, field.type) for field in SNAPSHOT_SCHEMA}
    columns |= {"seq": pa.array(range(count)), "site": pa.array([str(one % 10) for one in range(count)])}
    hashes = row_hashes(pa.RecordBatch.from_pydict(columns, schema=SNAPSHOT_SCHEMA))
    assert len(np.unique(hashes)) == count
    assert len(np.unique(hashes >> np.uint64(32))) > 99_990, "each half is as good as it can be"
    assert len(np.unique(hashes & np.uint64(2**32 - 1))) > 99_990


@settings(max_examples=25)
@given(histories(), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_every_row_travels_once_in_the_parcel_of_its_key_group(rows: list[Row], groups: int, then: int, enough: int) -> None:
    stream = Stream(Deployment(5_000, 5_000), groups, {})
    stream.batch(rows)
    snapshot = snapshot_of(stream)
    sent = pa.Table.from_batches(partition_rows(snapshot.to_batches(10), then, enough), PARCEL_SCHEMA).to_pylist()
    beside = [one for one in sent if one["rows"] is None]
    carried = [(place, row) for place, content in ((one["place"], one["rows"]) for one in sent if one["rows"] is not None)
               for row in rows_of([content]).to_pylist()]  # fmt: skip
    assert all(place == hash64(row["device_id"]) % then for place, row in carried)
    told = [(one["place"], one["part"], one["content"]) for one in beside if one["part"] != SUMS]
    whole = [row for _, row in carried] + [{**dict.fromkeys(SNAPSHOT_SCHEMA.names), **_beside(one)} for one in told]
    assert sorted(map(_compared, whole)) == sorted(map(_compared, snapshot.to_pylist()))
    known = collect_facts((one["place"], one["part"], one["content"]) for one in beside)
    assert {part: count for part, (count, _) in known.sums.items()} == {
        part: count for part in COMPARED_PARTS if (count := sum(row["part"] == part for _, row in carried))
    }


def _beside(told: tuple[int, str, str]) -> dict[str, Any]:
    place, part, content = told
    return {"part": part, "key_group": place, "content": content}


def _compared(row: dict[str, Any]) -> str:
    """Leave out what is told beside only as JSON: the device that it is about."""
    own = row["part"] in COMPARED_PARTS and row["device_id"] not in (None, "_")
    return json.dumps(row if own else {**row, "device_id": None, "device_hash": None}, sort_keys=True, default=str)


@pytest.mark.parametrize("key_groups", [None, 3])
def test_what_is_summed_up_is_the_same_whether_it_is_packed_or_not(key_groups: int | None) -> None:
    stream = Stream(Deployment(1000, 1000), 2, {})
    stream.batch([signal(10, "d", boot="b", seq=3), signal(20, "e", "error", code="x"), signal(40, "d")])
    batches = snapshot_of(stream).to_batches()
    [packed, sums] = [
        {one["content"] for one in pa.Table.from_batches(partition_rows(batches, groups)).to_pylist() if one["part"] == SUMS}
        for groups in (key_groups, None)
    ]
    assert packed == sums


def test_rows_for_everybody_that_do_not_wait_in_every_key_group_alike_are_refused() -> None:
    world = json.dumps({"frontier_ms": 1, "bytes": 7})
    told = [(place, GROUP, world) for place in (0, 1)] + [(place, OWN_ROW, json.dumps({"kind": "death"})) for place in (0, 1)]
    sums = (None, SUMS, "{}")
    assert collect_facts([*told, sums]).waiting == (json.dumps({"kind": "death"}),)
    for damaged in (told[:-1], [*told, told[-1]], [*told[:-1], (1, OWN_ROW, json.dumps({"kind": "birth"}))]):
        with pytest.raises(FleetError, match="in every key group of a snapshot; got 2 different sets"):
            collect_facts([*damaged, sums])
