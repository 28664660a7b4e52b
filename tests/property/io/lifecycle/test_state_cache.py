"""The processor, without a JVM: it says what the definition says, whatever becomes of the copies of its state."""

import json
from collections import Counter
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row as SparkRow
from pyspark.sql.streaming.tws_tester import TwsTester

from fleetpulse.columnar.codec.arrow import from_bytes, is_signal, rows_to_batch, signals_to_batch, to_bytes
from fleetpulse.columnar.codec.versions import STORED_FORM
from fleetpulse.columnar.codec.wire import to_wire
from fleetpulse.core.judgements import compared
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import FLUSH, Kind, Row
from fleetpulse.io.checkpoints.checkpoint import WATERMARK_DELAY_MS
from fleetpulse.io.lifecycle import group_task
from fleetpulse.io.lifecycle.state_cache import StateValueCache
from fleetpulse.io.lifecycle.stateful_processor import GroupProcessor
from tests.support.histories.dense import dense_history
from tests.support.histories.histories import compared_columns, with_broadcasts

pytestmark = pytest.mark.property
HISTORIES = 10
DRIVES = pytest.mark.parametrize("seed", range(HISTORIES))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _block(rows: list[Row], started_ms: int) -> SparkRow:
    """Return the row of a group that has the rows but for ticks, which are another group's: it may be woken alone."""
    signals = [one for one in rows if is_signal(one)]
    others = [one for one in rows if not is_signal(one) and not _only_wakes(one)]
    return SparkRow(
        key_group=0,
        received_at=_EPOCH + timedelta(milliseconds=rows[-1].received_at_ms),
        newest_ms=rows[-1].received_at_ms,
        started_ms=started_ms,
        signals=to_wire(signals_to_batch(signals)) if signals else None,
        others=to_bytes(rows_to_batch(others)) if others else None,
        file=None,
        begin=None,
        size=None,
    )


def _only_wakes(row: Row) -> bool:
    return row.kind is Kind.TICK and row.contents().get("op") != FLUSH


def _later(rows: list[Row], place: int) -> bool:
    """Say whether a batch that begins here moves the watermark: the tester takes no other."""
    return place > 0 and rows[place].received_at_ms > rows[place - 1].received_at_ms


class Task:
    """A processor with its state in memory, and with the copies of a folder."""

    def __init__(self, deployment: Deployment, folder: Path | None, processor: GroupProcessor | None = None) -> None:
        processor = processor or GroupProcessor(deployment, STORED_FORM)
        self.tester = TwsTester(processor, timeMode="EventTime", eventTimeExtractor=lambda _: 2**62)
        self.copies = processor.fold.state._copies = StateValueCache(folder)

    def run(self, batch: list[Row], started_ms: int) -> list[SparkRow]:
        told = self.tester.test(0, [_block(batch, started_ms)])
        after = self.tester.setWatermark(batch[-1].received_at_ms - WATERMARK_DELAY_MS)
        assert list(after) == [], "a batch judges the group at its newest row: no timer is left at its watermark"
        return told

    def fail(self, batch: list[Row], started_ms: int) -> None:
        """Run a batch whose commit never comes."""
        handle, before_ms = self.tester.handle, self.tester._currentWatermarkMs
        states: list[Any] = [*handle.value_states.values(), *handle.map_states.values()]
        kept = [deepcopy(state.state) for state in states]
        timers = deepcopy(handle._timers._key_to_timers)
        self.run(batch, started_ms)
        for state, before in zip(states, kept, strict=True):
            state.state = before
        handle._timers._key_to_timers = timers
        self.tester._currentWatermarkMs = before_ms
        handle.setWatermark(before_ms)


def _meddle(random: Random, task: Task) -> None:
    """Do to copies what may happen to files."""
    assert task.copies.folder is not None
    files = sorted(task.copies.folder.iterdir())
    match random.choice(["nothing", "nothing", "lost", "cut", "swapped", "all lost"]):
        case "lost":
            random.choice(files).unlink()
        case "cut":
            (found := random.choice(files)).write_bytes(found.read_bytes()[:-1])
        case "swapped":
            random.choice(files).write_bytes(random.choice(files).read_bytes())
        case "all lost":
            for found in files:
                found.unlink()
        case _:
            pass


@DRIVES
def test_copies_that_are_lost_damaged_or_of_a_failed_try_change_nothing(seed: int, tmp_path: Path) -> None:
    cuts, course = dense_history(seed)
    rows = [cut.row for cut in cuts]
    begins = [place for place, cut in enumerate(cuts) if cut.begins and _later(rows, place)]
    batches = [rows[begin:end] for begin, end in pairwise([0, *begins, len(rows)])]
    random, started_ms = Random(seed), rows[0].received_at_ms
    plain, copied = Task(course.deployment, None), Task(course.deployment, tmp_path / "copies")
    assert batches
    for batch in batches[:150]:
        if random.random() < 0.2:
            copied.fail(batch, started_ms)
        assert copied.run(batch, started_ms) == plain.run(batch, started_ms)
        _meddle(random, copied)


@DRIVES
def test_the_processor_says_what_the_definition_says(seed: int, tmp_path: Path) -> None:
    cuts, course = dense_history(seed)
    rows = [cut.row for cut in cuts]
    begins = [place for place, cut in enumerate(cuts) if cut.begins and _later(rows, place)]
    task, told = Task(course.deployment, tmp_path / "copies"), Counter[tuple[Any, ...]]()
    for begin, end in pairwise([0, *begins, len(rows)]):
        for one in task.run(with_broadcasts(rows[begin:end]), rows[0].received_at_ms):
            told += compared_columns(from_bytes(one.judgements))
    assert told == compared(replay(rows, course.deployment))


def test_many_judgements_of_a_call_go_into_files_that_the_row_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts, course = dense_history(3)
    rows = [cut.row for cut in cuts[:300]]
    whole, table = Task(course.deployment, None), tmp_path / "table"
    table.mkdir()
    filing = Task(course.deployment, None, GroupProcessor(course.deployment, STORED_FORM, table=str(table), generation=7))
    monkeypatch.setattr(group_task, "MANY", 2)
    met, begins = Counter[str](), [place for place in range(0, len(rows), 50) if not place or _later(rows, place)]
    for begin, end in pairwise([*begins, len(rows)]):
        some = with_broadcasts(rows[begin:end])
        for one, want in zip(filing.run(some, rows[0].received_at_ms), whole.run(some, rows[0].received_at_ms), strict=True):
            told = from_bytes(want.judgements)
            met["files" if one.files else "rows"] += told.num_rows
            if one.files is None:
                assert told.num_rows < 2 and one.judgements == want.judgements
                continue
            named = json.loads(one.files)
            assert one.judgements is None and sum(each["stats"]["numRecords"] for each in named) == told.num_rows
            files = [pq.ParquetFile(table / each["name"]).read(["device_id"]) for each in named]
            assert sorted(pa.concat_tables(files)["device_id"].to_pylist()) == sorted(told["device_id"].to_pylist())
    assert met["files"] > 50


def test_a_group_has_as_many_copies_as_values_and_they_are_what_is_read(tmp_path: Path) -> None:
    cuts, course = dense_history(3)
    rows = [cut.row for cut in cuts]
    task = Task(course.deployment, tmp_path / "copies")
    begins = [place for place in range(0, len(rows), 50) if not place or _later(rows, place)]
    for begin, end in pairwise([*begins, len(rows)]):
        task.run(rows[begin:end], rows[0].received_at_ms)
        waiting = task.tester.peekMapState("waiting", 0)
        assert len(list((tmp_path / "copies").iterdir())) == 1 + len(waiting)
        task.tester.updateValueState("group", 0, (b"not read", None))
        task.tester.updateMapState("waiting", 0, dict.fromkeys(waiting, (b"not read",)))
