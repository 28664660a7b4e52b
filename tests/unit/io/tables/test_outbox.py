"""What a generation got to say with its work is said once, whoever is killed; and when it is not known where one stopped."""

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
from fleetpulse.io.home.retention_floor import promise
from fleetpulse.io.maintenance.readers import reader_pins
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.outbox import flush_outbox, outbox_path
from fleetpulse.io.tables.snapshots import find_snapshot
from tests.support.homes.homes import commit_batch, take_snapshot
from tests.support.refusals import refused

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment())]


@pytest.fixture
def home(home: Home) -> Home:
    """A home whose job has done three batches, and has said all of them."""
    for number in range(3):
        commit_batch(home.checkpoint, number, 5_000)
    (home.checkpoint / "metadata").write_text('{"id": "the job"}')
    _said(home, 2)
    return home


def _said(home: Home, batch: int) -> None:
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, []), "the job", batch)


def _to_say(home: Home, count: int) -> Path:
    path = outbox_path(home.checkpoint)
    rows = [{"kind": "transition", "device_id": f"d{number}", "generation": 1, "judged_at_ms": 1} for number in range(count)]
    pq.write_table(tables.to_table(JUDGEMENTS, rows), path, row_group_size=2)
    return path


def _devices(home: Home) -> list[str]:
    return [row["device_id"] for row in tables.query(home, "SELECT device_id FROM judgements ORDER BY ALL")]


def test_what_is_to_be_said_is_said_once(home: Home) -> None:
    _to_say(home, 5)
    assert flush_outbox(home, 1) == 5 and flush_outbox(home, 1) == 0
    assert _devices(home) == ["d0", "d1", "d2", "d3", "d4"]
    assert not list(home.checkpoint.glob("unsaid-*"))


@pytest.mark.parametrize("landed", [0, 1, 2, 3])
def test_killed_between_any_two_commits_the_next_says_the_rest(home: Home, landed: int) -> None:
    path = _to_say(home, 5)
    with pq.ParquetFile(path) as file:
        for number in range(landed):
            rows = file.read_row_group(number).cast(tables.arrow_schema(JUDGEMENTS))
            tables.append(home, JUDGEMENTS, rows, path.stem, number + 1)
    flush_outbox(home, 1)
    assert _devices(home) == ["d0", "d1", "d2", "d3", "d4"]


def test_what_is_to_be_said_and_is_damaged_is_named_and_stays(home: Home) -> None:
    path = _to_say(home, 5)
    path.write_bytes(path.read_bytes()[:-10])
    with refused("file-damaged", DamagedError, match=path.name):
        flush_outbox(home, 1)
    assert path.exists() and _devices(home) == []


def test_where_a_generation_stopped_is_known_while_its_logs_say_so(home: Home) -> None:
    at, why = where_it_stopped(home)
    assert at is not None and (at.batch, at.version, at.newest_ms, why) == (2, 1, 5_001, "")


def test_logs_that_end_before_what_was_said_do_not_tell_where_it_stopped(home: Home) -> None:
    for folder in ("offsets", "commits"):
        (home.checkpoint / folder / "2").unlink()
    assert where_it_stopped(home) == (
        None,
        "its last batches are lost: the checkpoint has batches up to 1, judgements up to 2",
    )


@pytest.mark.parametrize("name", ["offsets/2", "commits/2", "metadata"])
def test_logs_that_are_damaged_do_not_tell_where_it_stopped(home: Home, name: str) -> None:
    (home.checkpoint / name).write_bytes(b"\0" * 40)
    at, why = where_it_stopped(home)
    assert at is None and ("is damaged" in why or "does not contain the id of a query" in why)


def test_one_that_was_killed_in_a_batch_or_has_none_does_not_tell_where_it_stopped(home: Home) -> None:
    commit_batch(home.checkpoint, 3, 6_000, committed=False)
    assert where_it_stopped(home) == (None, "generation 1 was stopped in the middle of a batch")
    for number in committed_batches(home.checkpoint):
        (home.checkpoint / "commits" / str(number)).unlink()
    assert where_it_stopped(home) == (None, "its checkpoint has no committed batch")


def test_what_was_said_since_is_known_while_maintenance_has_not_come_near(home: Home) -> None:
    take_snapshot(home)
    taken = find_snapshot(home)
    require_judgements_since(home, taken)
    promise(home, "late", (taken.at_ms or 0) - 3 * 86_400_000)
    require_judgements_since(home, taken)
    with refused("judgements-not-retained"):
        require_judgements_since(home, replace(taken, at_ms=(taken.at_ms or 0) - 4 * 86_400_000))


def test_a_damaged_checkpoint_that_nobody_goes_on_with_stands_in_no_ones_way(home: Home) -> None:
    require_own_if_readable(home, 1)
    (home.checkpoint / "offsets" / "2").write_bytes(b"\0" * 40)
    require_own_if_readable(home, 1)
    with refused("checkpoint-damaged"):
        require_own(home, 1)
    with refused("offsets-damaged"):
        reader_pins(home)
    first, second = Generation(1, 8, 4, "up", status=RETIRED, stands={"damaged": True}), Generation(2, 8, 4, "bootstrap")
    save_generations(home.lifecycle, Generations(2, {1: first, 2: second}))
    assert [need.who for need in reader_pins(home)] == ["generation 2"]


def test_a_checkpoint_of_another_home_is_refused_though_nobody_goes_on_with_it(home: Home) -> None:
    mark_own(home, 1)
    (home.checkpoint / "home-id.json").write_text('{"id": "another"}')
    with refused("checkpoint-foreign"):
        require_own_if_readable(home, 1)


def test_nobody_goes_back_to_one_that_is_damaged() -> None:
    known = {number: Generation(number, 8, 4, "up", status=RETIRED) for number in (1, 2, 3)}
    known[3] = replace(known[3], stands={"damaged": True})
    record = Generations(4, {**known, 4: Generation(4, 8, 4, "bootstrap")})
    assert record.predecessor() == known[2]
    assert replace(record, known={**record.known, 2: replace(known[2], status=PRUNED)}).predecessor() == known[1]


def test_how_many_partitions_the_state_has_is_seen_by_its_folders(home: Home) -> None:
    assert partitions_of(home.checkpoint) is None
    for number in range(3):
        (home.checkpoint / "state" / "0" / str(number)).mkdir(parents=True)
    (home.checkpoint / "state" / "0" / "_metadata").mkdir()
    assert partitions_of(home.checkpoint) == 3
