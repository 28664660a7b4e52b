"""Finishing a batch that the sink committed and Spark's checkpoint did not."""

import json
from pathlib import Path

import pytest
from deltalake import CommitProperties, Transaction, write_deltalake

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io.checkpoints.checkpoint import committed_batches, position_after
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.finish_commit import finish_sink_committed_batch
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import landed_home
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
QUERY = "a-query"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a home with three versions of bronze; batch 0 has read the first one and is committed."""
    rows = [signal(0, "a"), signal(1, "a"), signal(2, "b"), tick(9), signal(10, "a")]
    home = landed_home(tmp_path / "home", rows, Deployment(30_000), [2, 4])
    home.checkpoint.mkdir(parents=True)
    (home.checkpoint / "metadata").write_text(json.dumps({"id": QUERY}))
    start_batch(home, 0, 0, 2)
    (home.checkpoint / "commits").mkdir()
    (home.checkpoint / "commits" / "0").write_text(f'v1\n{{"nextBatchWatermarkMs":{START + 999}}}')
    tables.create(home, JUDGEMENTS)
    return home


def start_batch(home: Home, batch: int, watermark_ms: int, version: int) -> None:
    metadata = {"batchWatermarkMs": watermark_ms, "conf": {"spark.sql.shuffle.partitions": "2"}}
    (home.checkpoint / "offsets").mkdir(exist_ok=True)
    (home.checkpoint / "offsets" / str(batch)).write_text(f'v1\n{json.dumps(metadata)}\n{{"version":{version}}}\n')


def commit_to_table(home: Home, batch: int, query: str = QUERY) -> None:
    properties = CommitProperties(app_transactions=[Transaction(query, batch)])
    no_rows = tables.to_table(JUDGEMENTS, [])
    write_deltalake(str(home.table(JUDGEMENTS.name)), no_rows, mode="append", commit_properties=properties)


def finish(home: Home) -> int | None:
    return finish_sink_committed_batch(home.checkpoint, home.table(JUDGEMENTS.name), home.table(MESSAGES.name))


def test_batch_is_committed_with_the_newest_row_that_it_has_read(home: Home) -> None:
    start_batch(home, 1, START + 999, 3)
    commit_to_table(home, 1)
    assert finish(home) == 1
    position = position_after(home.checkpoint)
    assert (position.batch, position.version, position.newest_ms) == (1, 3, START + 9_000)
    assert sorted(path.name for path in (home.checkpoint / "commits").iterdir()) == ["0", "1"]
    assert finish(home) is None, "the batch is already finished"


def test_batch_without_rows_keeps_the_watermark(home: Home) -> None:
    start_batch(home, 1, START + 999, 2)
    commit_to_table(home, 1)
    assert finish(home) == 1
    assert position_after(home.checkpoint).newest_ms == START + 1_000


def test_table_without_log_entries_has_no_batch_to_finish(home: Home, tmp_path: Path) -> None:
    start_batch(home, 1, START + 999, 3)
    unfinished = tmp_path / "unfinished"
    (unfinished / "_delta_log").mkdir(parents=True)
    assert finish_sink_committed_batch(home.checkpoint, unfinished, home.table(MESSAGES.name)) is None


def test_first_batch_starts_at_the_first_version_of_the_generation(home: Home) -> None:
    (home.checkpoint / "commits" / "0").unlink()
    commit_to_table(home, 0)
    assert finish(home) == 0
    assert position_after(home.checkpoint).newest_ms == START + 1_000


@pytest.mark.parametrize("committed", [None, (0, QUERY), (1, "another-query")])
def test_batch_that_is_not_in_the_table_is_left_to_spark(home: Home, committed: tuple[int, str] | None) -> None:
    start_batch(home, 1, START + 999, 3)
    if committed is not None:
        commit_to_table(home, *committed)
    assert finish(home) is None
    assert committed_batches(home.checkpoint) == [0]


def test_damaged_offsets_are_refused(home: Home) -> None:
    start_batch(home, 1, START + 999, 3)
    commit_to_table(home, 1)
    (home.checkpoint / "offsets" / "1").write_text("v1\n{}\n")
    with refused("checkpoint-damaged"):
        finish(home)
