"""Replay of bronze from a snapshot: it equals a replay from the first row, wherever the snapshot was taken."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pytest
from deltalake import DeltaTable

from batch.quality.rejudge import Origin, origin_of, replay_bronze
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.snapshots import SnapshotInfo, snapshots
from tests.support.homes.quality import (
    eventful_history,
    failed_expectations,
    judged_home,
    judged_in_batches,
    random_history,
    state_rows,
    write_state,
)

pytestmark = [pytest.mark.property, pytest.mark.timeout(300)]
pc: Any = pyarrow.compute  # its functions are created at run time, unknown to type checkers
DEPLOYMENT = Deployment(30_000, 20_000)


def cut_home(path: Path, seed: int, deployment: Deployment = DEPLOYMENT) -> tuple[Home, list[Row], SnapshotInfo]:
    """Create a home with a snapshot in the middle of its history.

    The rows before and after the snapshot have the same ``received_at``, unless one of them is a gap row.
    """
    random = Random(seed)
    rows = sorted(eventful_history(seed) if seed % 2 else random_history(seed), key=lambda one: one.received_at_ms)
    cut = random.randrange(len(rows) // 4, len(rows) * 3 // 4)
    if "gap" not in (rows[cut].kind, rows[cut - 1].kind):
        rows[cut] = replace(rows[cut], received_at_ms=rows[cut - 1].received_at_ms)
    home = judged_home(path, rows, deployment, cut=cut)
    key_groups = random.choice((1, 2, 3))
    state = judged_in_batches(rows[:cut], random, key_groups) if deployment == DEPLOYMENT else state_rows(rows[:cut], deployment)
    bronze = DeltaLog(home.table("messages")).latest()
    write_state(home, state, key_groups=key_groups if deployment == DEPLOYMENT else 1, bronze=bronze)
    return home, rows, snapshots(home)[0]


def sorted_rows(table: pa.Table, predicate: Any) -> list[Any]:
    """Return the rows that fulfil a predicate, without their key group, sorted."""
    return sorted((one for one in table.drop_columns("key_group").to_pylist() if predicate(one)), key=str)


def millis(instant: Any) -> int:
    return round(instant.timestamp() * 1000)


@pytest.mark.parametrize("jitter_ms", [0, 60_000])
@pytest.mark.parametrize("seed", [1, 2, 3, 5, 7, 9, 10, 11, 13, 14, 17])  # each seed has verdicts after its snapshot
def test_replay_from_a_snapshot_equals_replay_of_the_whole_history(seed: int, jitter_ms: int, tmp_path: Path) -> None:
    home, rows, taken = cut_home(tmp_path / "home", seed, replace(DEPLOYMENT, verdict_jitter_ms=jitter_ms))
    newest_ms = rows[-1].received_at_ms
    all_judgements, all_devices = replay_bronze(home, newest_ms, Origin())
    judgements, devices = replay_bronze(home, newest_ms, Origin(taken))
    since = Origin(taken)

    def is_after_snapshot(one: dict[str, Any]) -> bool:
        if one["kind"] == "transition":
            return millis(one["event_time"]) > since.frontier_ms
        return one["kind"] != "summary" and one["received_at"] is not None and millis(one["received_at"]) > since.newest_ms

    assert sorted_rows(judgements, is_after_snapshot) == sorted_rows(all_judgements, is_after_snapshot) != []
    assert sorted_rows(devices, lambda _: True) == sorted_rows(all_devices, lambda _: True)


@pytest.mark.parametrize("seed", [1, 10, 23])
def test_quality_check_from_a_snapshot_reports_only_lost_verdicts(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, rows, taken = cut_home(tmp_path / "home", seed)
    write_state(home, judged_in_batches(rows, Random(seed), 2), key_groups=2)
    monkeypatch.setattr("batch.quality.facts.origin_of", partial(origin_of, most_rows=1))
    assert origin_of(home, rows[-1].received_at_ms, most_rows=1) == Origin(taken)
    assert failed_expectations(home) == []
    judgements = DeltaTable(str(home.table(JUDGEMENTS.name)))
    transitions = [one for one in judgements.to_pyarrow_table().to_pylist() if one["kind"] == "transition"]
    last = max(transitions, key=lambda one: one["event_time"])
    judgements.delete(f"kind = 'transition' AND device_id = '{last['device_id']}' AND transition_no = {last['transition_no']}")
    assert ("verdicts", "none is missing") in failed_expectations(home)
