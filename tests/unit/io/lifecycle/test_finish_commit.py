"""A batch that was said and not committed: what is written for it, and when nothing is."""

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
    """Return a home of three versions of bronze, whose first batch has read the first one and is committed."""
    rows = [signal(0, "a"), signal(1, "a"), signal(2, "b"), tick(9), signal(10, "a")]
    home = landed_home(tmp_path / "home", rows, Deployment(30_000), [2, 4])
    home.checkpoint.mkdir(parents=True)
    (home.checkpoint / "metadata").write_text(json.dumps({"id": QUERY}))
    begin(home, 0, 0, 2)
    (home.checkpoint / "commits").mkdir()
    (home.checkpoint / "commits" / "0").write_text(f'v1\n{{"nextBatchWatermarkMs":{START + 999}}}')
    tables.create(home, JUDGEMENTS)
    return home


def begin(home: Home, batch: int, watermark_ms: int, version: int) -> None:
    metadata = {"batchWatermarkMs": watermark_ms, "conf": {"spark.sql.shuffle.partitions": "2"}}
    (home.checkpoint / "offsets").mkdir(exist_ok=True)
    (home.checkpoint / "offsets" / str(batch)).write_text(f'v1\n{json.dumps(metadata)}\n{{"version":{version}}}\n')


def say(home: Home, batch: int, query: str = QUERY) -> None:
    properties = CommitProperties(app_transactions=[Transaction(query, batch)])
    nothing = tables.to_table(JUDGEMENTS, [])
    write_deltalake(str(home.table(JUDGEMENTS.name)), nothing, mode="append", commit_properties=properties)


def looked_after(home: Home) -> int | None:
    return finish_sink_committed_batch(home.checkpoint, home.table(JUDGEMENTS.name), home.table(MESSAGES.name))


def test_it_is_committed_with_the_newest_row_that_it_has_read(home: Home) -> None:
    begin(home, 1, START + 999, 3)
    say(home, 1)
    assert looked_after(home) == 1
    at = position_after(home.checkpoint)
    assert (at.batch, at.version, at.newest_ms) == (1, 3, START + 9_000)
    assert sorted(path.name for path in (home.checkpoint / "commits").iterdir()) == ["0", "1"]
    assert looked_after(home) is None, "nothing is left to do"


def test_one_that_has_read_nothing_leaves_the_watermark_where_it_was(home: Home) -> None:
    begin(home, 1, START + 999, 2)
    say(home, 1)
    assert looked_after(home) == 1
    assert position_after(home.checkpoint).newest_ms == START + 1_000


def test_nothing_was_said_to_a_table_whose_maker_was_stopped_before_its_first_entry(home: Home, tmp_path: Path) -> None:
    begin(home, 1, START + 999, 3)
    aside = tmp_path / "told"
    (aside / "_delta_log").mkdir(parents=True)
    assert finish_sink_committed_batch(home.checkpoint, aside, home.table(MESSAGES.name)) is None


def test_the_first_batch_begins_where_the_generation_does(home: Home) -> None:
    (home.checkpoint / "commits" / "0").unlink()
    say(home, 0)
    assert looked_after(home) == 0
    assert position_after(home.checkpoint).newest_ms == START + 1_000


@pytest.mark.parametrize("said", [None, (0, QUERY), (1, "another-query")])
def test_one_that_was_not_said_is_left_to_spark(home: Home, said: tuple[int, str] | None) -> None:
    begin(home, 1, START + 999, 3)
    if said is not None:
        say(home, *said)
    assert looked_after(home) is None
    assert committed_batches(home.checkpoint) == [0]


def test_what_is_damaged_is_named(home: Home) -> None:
    begin(home, 1, START + 999, 3)
    say(home, 1)
    (home.checkpoint / "offsets" / "1").write_text("v1\n{}\n")
    with refused("checkpoint-damaged"):
        looked_after(home)
