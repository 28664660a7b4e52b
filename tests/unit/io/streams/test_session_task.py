"""Fold of the sessions in a task: a checkpoint that begins with the state of a snapshot."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import Row as SparkRow

from fleetpulse.columnar.codec.arrow import from_bytes, signals_to_batch
from fleetpulse.columnar.codec.wire import to_wire
from fleetpulse.columnar.streams.sessions import SessionGroup
from fleetpulse.core.rows import Row
from fleetpulse.io.streams.session_processor import InitialState
from fleetpulse.io.streams.session_task import SessionTask
from tests.support.histories.histories import START, row

pytestmark = pytest.mark.unit
SILENCE_MS = 60_000


def handle() -> Any:
    """Return Spark's handle of a state that no batch has written."""
    value = SimpleNamespace(get=lambda: None, update=lambda _: None)
    return SimpleNamespace(getValueState=lambda *_: value)


def block(*rows: Row) -> Any:
    """Return the row of a batch with the block of a key group."""
    signals = to_wire(signals_to_batch(rows))
    return SparkRow(newest_ms=rows[-1].received_at_ms, started_ms=START, signals=signals, others=None, file=None)


@pytest.mark.parametrize(("repeats", "begun"), [(True, ["late"]), (False, ["late", "same"])])
def test_a_first_batch_skips_the_instant_of_the_snapshot_only_if_it_repeats_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeats: bool, begun: list[str]
) -> None:
    """The version of the snapshot ended within the instant of second 5, after the rows of the device "known"."""
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    group = SessionGroup.begin(START)
    known = row(5, "fleet/s/known/heartbeat")
    group.fold(signals_to_batch([known]), [], known.received_at_ms, SILENCE_MS)
    path = tmp_path / "initial.arrow"
    path.write_bytes(group.to_bytes())
    task = SessionTask(handle(), SILENCE_MS, InitialState(path, 1, repeats))
    batch = [row(5, "fleet/s/same/heartbeat"), row(6, "fleet/s/known/heartbeat"), row(7, "fleet/s/late/heartbeat")]
    [found] = task.fold(0, iter([block(*batch)]))
    assert from_bytes(found.changes)["device_id"].to_pylist() == begun
    state = SessionGroup.from_bytes(found.state).open.select(["device_id", "messages"]).to_pylist()
    assert {one["device_id"]: one["messages"] for one in state} == {"known": 2, **dict.fromkeys(begun, 1)}
