"""Outbox and recovery: judgements are published once, also after a crash or a loss of logs."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batch.state.recover import require_judgements_since, where_it_stopped
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.checkpoints.checkpoint import committed_batches, partitions_of
from fleetpulse.io.checkpoints.generations import PRUNED, RETIRED, Generation, Generations, save_generations
from fleetpulse.io.delta.corruption import DamagedError
from fleetpulse.io.home.checkpoint_ownership import mark_own, require_own, require_own_if_readable
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import raise_floor
from fleetpulse.io.maintenance.readers import reader_pins
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.outbox import flush_outbox, outbox_path
from fleetpulse.io.tables.snapshots import find_snapshot
from tests.support.homes.homes import commit_batch, take_snapshot
from tests.support.refusals import refused

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment())]


@pytest.fixture
def home(home: Home) -> Home:
    """A home whose job has committed three batches and published their judgements."""
    for number in range(3):
        commit_batch(home.checkpoint, number, 5_000)
    (home.checkpoint / "metadata").write_text('{"id": "the job"}')
    _append_judgements(home, 2)
    return home


def _append_judgements(home: Home, batch: int) -> None:
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, []), "the job", batch)


def _write_outbox(home: Home, count: int) -> Path:
    path = outbox_path(home.checkpoint)
    rows = [{"kind": "transition", "device_id": f"d{number}", "generation": 1, "judged_at_ms": 1} for number in range(count)]
    pq.write_table(tables.to_table(JUDGEMENTS, rows), path, row_group_size=2)
    return path


def _devices(home: Home) -> list[str]:
    return [row["device_id"] for row in tables.query(home, "SELECT device_id FROM judgements ORDER BY ALL")]


def test_outbox_is_published_once(home: Home) -> None:
    _write_outbox(home, 5)
    assert flush_outbox(home, 1) == 5 and flush_outbox(home, 1) == 0
    assert _devices(home) == ["d0", "d1", "d2", "d3", "d4"]
    assert not list(home.checkpoint.glob("unsaid-*"))


@pytest.mark.parametrize("landed", [0, 1, 2, 3])
def test_outbox_is_published_completely_after_a_kill_between_two_commits(home: Home, landed: int) -> None:
    path = _write_outbox(home, 5)
    with pq.ParquetFile(path) as file:
        for number in range(landed):
            rows = file.read_row_group(number).cast(tables.arrow_schema(JUDGEMENTS))
            tables.append(home, JUDGEMENTS, rows, path.stem, number + 1)
    flush_outbox(home, 1)
    assert _devices(home) == ["d0", "d1", "d2", "d3", "d4"]


def test_damaged_outbox_file_is_named_and_kept(home: Home) -> None:
    path = _write_outbox(home, 5)
    path.write_bytes(path.read_bytes()[:-10])
    with refused("file-damaged", DamagedError, match=path.name):
        flush_outbox(home, 1)
    assert path.exists() and _devices(home) == []


def test_stop_position_is_read_from_intact_checkpoint_logs(home: Home) -> None:
    position, reason = where_it_stopped(home)
    assert position is not None and (position.batch, position.version, position.newest_ms, reason) == (2, 1, 5_001, "")


def test_stop_position_is_unknown_if_judgements_are_ahead_of_the_checkpoint_logs(home: Home) -> None:
    for folder in ("offsets", "commits"):
        (home.checkpoint / folder / "2").unlink()
    assert where_it_stopped(home) == (
        None,
        "its last batches are lost: the checkpoint has batches up to 1, judgements up to 2",
    )


@pytest.mark.parametrize("name", ["offsets/2", "commits/2", "metadata"])
def test_stop_position_is_unknown_if_a_checkpoint_log_is_damaged(home: Home, name: str) -> None:
    (home.checkpoint / name).write_bytes(b"\0" * 40)
    position, reason = where_it_stopped(home)
    assert position is None and ("is damaged" in reason or "does not contain the id of a query" in reason)


def test_stop_position_is_unknown_after_a_kill_in_a_batch_or_without_a_batch(home: Home) -> None:
    commit_batch(home.checkpoint, 3, 6_000, committed=False)
    assert where_it_stopped(home) == (None, "generation 1 was stopped in the middle of a batch")
    for number in committed_batches(home.checkpoint):
        (home.checkpoint / "commits" / str(number)).unlink()
    assert where_it_stopped(home) == (None, "its checkpoint has no committed batch")


def test_recovery_requires_retained_judgements_since_the_snapshot(home: Home) -> None:
    take_snapshot(home)
    taken = find_snapshot(home)
    require_judgements_since(home, taken)
    raise_floor(home, "late", (taken.at_ms or 0) - 3 * 86_400_000)
    require_judgements_since(home, taken)
    with refused("judgements-not-retained"):
        require_judgements_since(home, replace(taken, at_ms=(taken.at_ms or 0) - 4 * 86_400_000))


def test_damaged_checkpoint_is_refused_only_while_its_generation_is_needed(home: Home) -> None:
    require_own_if_readable(home, 1)
    (home.checkpoint / "offsets" / "2").write_bytes(b"\0" * 40)
    require_own_if_readable(home, 1)
    with refused("checkpoint-damaged"):
        require_own(home, 1)
    with refused("offsets-damaged"):
        reader_pins(home)
    first, second = Generation(1, 8, 4, "up", status=RETIRED, position={"damaged": True}), Generation(2, 8, 4, "bootstrap")
    save_generations(home.lifecycle, Generations(2, {1: first, 2: second}))
    assert [pin.reader for pin in reader_pins(home)] == ["generation 2"]


def test_checkpoint_of_another_home_is_refused_even_if_it_is_not_resumed(home: Home) -> None:
    mark_own(home, 1)
    (home.checkpoint / "home-id.json").write_text('{"id": "another"}')
    with refused("checkpoint-foreign"):
        require_own_if_readable(home, 1)


def test_predecessor_skips_damaged_and_pruned_generations() -> None:
    known = {number: Generation(number, 8, 4, "up", status=RETIRED) for number in (1, 2, 3)}
    known[3] = replace(known[3], position={"damaged": True})
    record = Generations(4, {**known, 4: Generation(4, 8, 4, "bootstrap")})
    assert record.predecessor() == known[2]
    assert replace(record, known={**record.known, 2: replace(known[2], status=PRUNED)}).predecessor() == known[1]


def test_partitions_of_the_state_are_counted_by_its_folders(home: Home) -> None:
    assert partitions_of(home.checkpoint) is None
    for number in range(3):
        (home.checkpoint / "state" / "0" / str(number)).mkdir(parents=True)
    (home.checkpoint / "state" / "0" / "_metadata").mkdir()
    assert partitions_of(home.checkpoint) == 3
