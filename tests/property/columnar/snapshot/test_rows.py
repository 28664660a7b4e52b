"""Rows of a snapshot: key groups restored from them, in any number, resume as if the run had never stopped."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.compute
from hypothesis import given, note
from hypothesis import strategies as st

from fleetpulse.columnar.codec.versions import STORED_FORM, WRITTEN_FORMS
from fleetpulse.columnar.fold.judgement_batches import JUDGEMENT_SCHEMA
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.columnar.snapshot.rows import (
    GROUP,
    PENDING,
    head_of,
    outcome_of,
    restore_group,
    shared_context,
    shared_rows,
)
from fleetpulse.columnar.snapshot.shuffle import PARCEL_SCHEMA, collect_facts, partition_rows, rows_of
from fleetpulse.core.judgements import compared
from fleetpulse.core.registry.device_patch import fingerprint
from fleetpulse.core.replay import Deployment, Outcome, outcome, replay
from fleetpulse.core.rows import EVERYONE, Row
from tests.support.histories.histories import compared_columns, row, signal
from tests.support.histories.key_groups import Stream, snapshot_of
from tests.support.histories.strategies import histories
from tests.support.refusals import refused

pc: Any = pyarrow.compute
DEPLOYMENTS = st.builds(
    Deployment, st.sampled_from([1, 5, 20, 60]).map(lambda s: s * 1000), st.just(30_000), st.sampled_from([0, 0, 7_000, 40_000])
)


def of_part(rows: pa.Table, part: str) -> pa.Table:
    return rows.filter(pc.equal(rows["part"], part))


def restored_from(snapshot: pa.Table, groups: int, deployment: Deployment, version: int = STORED_FORM) -> Stream:
    """Restore a stream from the rows of a snapshot, in any number of key groups."""
    sent = pa.Table.from_batches(partition_rows(snapshot.to_batches(20), groups, enough=30), PARCEL_SCHEMA).to_pylist()
    known = collect_facts((one["place"], one["part"], one["content"]) for one in sent if one["rows"] is None)
    shared = shared_rows(known.waiting)
    stored: dict[int, bytes] = {}
    chunks: dict[int, dict[int, bytes]] = {}
    for group in range(groups):
        group_rows = rows_of(one["rows"] for one in sent if one["rows"] is not None and one["place"] == group)
        [one] = restore_group(group, group_rows, shared, known.context, deployment, version).to_pylist()
        stored[group] = one["block"]
        chunks[group] = {chunk["number"]: chunk["rows"] for chunk in one["chunks"]}
        assert head_of(one["block"])["version"] == version
    stream = Stream(deployment, groups, stored, chunks)
    pending = [json.loads(one) for one in known.pending]
    stream.judgements += compared_columns(pa.RecordBatch.from_pylist(pending, schema=JUDGEMENT_SCHEMA))
    return stream


@given(
    histories(reviews=True),
    st.lists(st.integers(0, 60), max_size=4),
    st.integers(0, 60),
    DEPLOYMENTS,
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_a_restart_from_a_snapshot_does_not_change_the_judgements(
    rows: list[Row], cuts: list[int], cut: int, deployment: Deployment, groups: int, new_groups: int
) -> None:
    rows = [*rows, row(1_000_000, "fleet/_/b/tick", op="flush")]
    want = compared(replay(rows, deployment))
    position = 1 + cut % (len(rows) - 1)
    before = Stream(deployment, groups, {})
    edges = sorted({0, position, *(one % (position + 1) for one in cuts)})
    for number in range(len(edges) - 1):
        before.batch(rows[edges[number] : edges[number + 1]])
    snapshot = snapshot_of(before)
    note(str(snapshot.to_pylist()))
    after = restored_from(snapshot, new_groups, deployment, WRITTEN_FORMS[cut % len(WRITTEN_FORMS)])
    after.batch(rows[position:])
    after.batch([])
    assert before.judgements + after.judgements == want


@given(histories(), st.integers(0, 60), DEPLOYMENTS, st.integers(1, 3))
def test_the_definition_resumes_from_a_snapshot(rows: list[Row], cut: int, deployment: Deployment, groups: int) -> None:
    position = 1 + cut % len(rows)
    before = Stream(deployment, groups, {})
    before.batch(rows[:position])
    snapshot = snapshot_of(before)
    initial, rest = outcome_of(snapshot), rows[position:]
    pending = pa.RecordBatch.from_pylist(
        [json.loads(one) for one in of_part(snapshot, PENDING)["content"].to_pylist()], schema=JUDGEMENT_SCHEMA
    )
    want, after = outcome(rows, deployment), outcome(rest, deployment, initial=initial)
    judgements = compared(after.judgements) + before.judgements + compared_columns(pending)
    assert judgements == compared(want.judgements)
    assert after.frontier_ms == want.frontier_ms

    def fingerprints(found: Outcome) -> dict[str, str]:
        assert found.shards is not None
        covered_ms = found.shards.listenings[0].coverage.covered(found.frontier_ms or 0)
        return {device_id: fingerprint(one, covered_ms, 0) for device_id, one in found.devices.items()}

    assert fingerprints(after) == fingerprints(want)


@given(histories(), DEPLOYMENTS, st.integers(1, 3))
def test_a_stream_restored_from_a_snapshot_gives_the_same_snapshot(rows: list[Row], deployment: Deployment, groups: int) -> None:
    stream = Stream(deployment, groups, {})
    stream.batch(rows)
    first = snapshot_of(stream)
    restored = restored_from(first, groups, deployment)
    restored.newest = stream.newest
    again = snapshot_of(restored)

    def comparable_rows(table: pa.Table) -> list[dict[str, Any]]:
        kept = [one for one in table.to_pylist() if one["part"] not in (PENDING, GROUP)]
        return sorted(kept, key=lambda one: json.dumps(one, default=str))

    group_numbers = set(first["key_group"].to_pylist())
    shared = [one for one in comparable_rows(again) if one["device_id"] != EVERYONE or one["key_group"] in group_numbers]
    assert shared == comparable_rows(first)


def test_key_groups_at_different_frontiers_are_refused() -> None:
    groups = [json.dumps({"frontier_ms": at, "bytes": 7, "form": 4}) for at in (1, 1, 2)]
    assert json.loads(shared_context(groups[:2])) == {"frontier_ms": 1}
    with refused("snapshot-damaged", match="got 2 "):
        shared_context(groups)


def test_a_device_row_has_names_instants_counters_and_errors() -> None:
    rows = [signal(10, "d", boot="b", seq=3, gateway="g"), signal(20, "d", "error", code="x", boot="b", seq=4)]
    stream = Stream(Deployment(1000, 1000), 1, {})
    stream.batch([*rows, signal(40, "e"), signal(50, "d", "error", code="y")])
    [device, _] = sorted(of_part(snapshot_of(stream), "device").to_pylist(), key=lambda one: one["device_id"])
    assert (device["device_id"], device["mode"], device["boot"], device["seq"], device["gateway"]) == ("d", "online", "b", 4, "g")
    assert device["runtime_ms"] == 10_000
    assert (device["last_seen"] - device["life"]).total_seconds() == 10
    assert json.loads(device["errors"])["codes"] == ["x"]
    assert isinstance(KeyGroup.from_bytes(stream.stored[0]), KeyGroup)
