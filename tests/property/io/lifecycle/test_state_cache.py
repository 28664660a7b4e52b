"""Processor without a JVM: it equals the definition, and damaged copies of its state change nothing."""

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
from fleetpulse.core.judgements import NEWEST, JudgementKind, compared
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import FLUSH, Kind, Row
from fleetpulse.io.checkpoints.checkpoint import WATERMARK_DELAY_MS
from fleetpulse.io.lifecycle import group_task
from fleetpulse.io.lifecycle.state_cache import StateValueCache
from fleetpulse.io.lifecycle.stateful_processor import GroupProcessor
from fleetpulse.reports.operations.agreement import differences
from tests.support.histories.dense import dense_history
from tests.support.histories.floods import bag
from tests.support.histories.histories import START, positioned, signal, with_broadcasts

pytestmark = pytest.mark.property
HISTORIES = 10
SEEDS = pytest.mark.parametrize("seed", range(HISTORIES))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _block(rows: list[Row], started_ms: int) -> SparkRow:
    """Return the input row of a key group without ticks, which belong to another group."""
    signals = [one for one in rows if is_signal(one)]
    others = [one for one in rows if not is_signal(one) and not _is_plain_tick(one)]
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


def _is_plain_tick(row: Row) -> bool:
    return row.kind is Kind.TICK and row.contents().get("op") != FLUSH


def _moves_watermark(rows: list[Row], index: int) -> bool:
    """Whether a batch that begins here moves the watermark; the tester accepts no other batch."""
    return index > 0 and rows[index].received_at_ms > rows[index - 1].received_at_ms


class Task:
    """Processor with its state in memory, and copies of the state in a folder."""

    def __init__(self, deployment: Deployment, folder: Path | None, processor: GroupProcessor | None = None) -> None:
        processor = processor or GroupProcessor(deployment, STORED_FORM)
        self.tester = TwsTester(processor, timeMode="EventTime", eventTimeExtractor=lambda _: 2**62)
        self.copies = processor.fold.state._copies = StateValueCache(folder)

    def run(self, batch: list[Row], started_ms: int) -> list[SparkRow]:
        output = self.tester.test(0, [_block(batch, started_ms)])
        after = self.tester.setWatermark(batch[-1].received_at_ms - WATERMARK_DELAY_MS)
        assert list(after) == [], "a batch judges the group up to its newest row, so no timer remains before the watermark"
        return output

    def fail(self, batch: list[Row], started_ms: int) -> None:
        """Run a batch that is not committed."""
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


def _damage_copies(random: Random, task: Task) -> None:
    """Damage or delete copies at random."""
    assert task.copies.folder is not None
    files = sorted(task.copies.folder.iterdir())
    match random.choice(["nothing", "nothing", "delete", "truncate", "swap", "delete all"]):
        case "delete":
            random.choice(files).unlink()
        case "truncate":
            (found := random.choice(files)).write_bytes(found.read_bytes()[:-1])
        case "swap":
            random.choice(files).write_bytes(random.choice(files).read_bytes())
        case "delete all":
            for found in files:
                found.unlink()
        case _:
            pass


@SEEDS
def test_lost_damaged_and_uncommitted_copies_change_no_judgement(seed: int, tmp_path: Path) -> None:
    cuts, parameters = dense_history(seed)
    rows = [cut.row for cut in cuts]
    begins = [index for index, cut in enumerate(cuts) if cut.begins and _moves_watermark(rows, index)]
    batches = [rows[begin:end] for begin, end in pairwise([0, *begins, len(rows)])]
    random, started_ms = Random(seed), rows[0].received_at_ms
    plain, copied = Task(parameters.deployment, None), Task(parameters.deployment, tmp_path / "copies")
    assert batches
    for batch in batches[:150]:
        if random.random() < 0.2:
            copied.fail(batch, started_ms)
        assert copied.run(batch, started_ms) == plain.run(batch, started_ms)
        _damage_copies(random, copied)


@SEEDS
def test_the_processor_equals_the_definition(seed: int, tmp_path: Path) -> None:
    cuts, parameters = dense_history(seed)
    rows = [cut.row for cut in cuts]
    begins = [index for index, cut in enumerate(cuts) if cut.begins and _moves_watermark(rows, index)]
    task, judgements = Task(parameters.deployment, tmp_path / "copies"), Counter[tuple[Any, ...]]()
    for begin, end in pairwise([0, *begins, len(rows)]):
        for one in task.run(with_broadcasts(rows[begin:end]), rows[0].received_at_ms):
            written = from_bytes(one.judgements).to_pylist()
            judgements += bag(row for row in written if row["kind"] != JudgementKind.SUMMARY)
    assert differences(judgements, compared(replay(rows, parameters.deployment))) == []


@pytest.mark.parametrize("whole", [False, True])
def test_a_flood_of_late_messages_and_copies_makes_few_rows(whole: bool) -> None:
    deployment = Deployment(30_000)
    task = Task(deployment, None, GroupProcessor(deployment, STORED_FORM, whole=whole))
    late = [signal(1 + number / 1_000, received_s=120 + number / 100, seq=number) for number in range(500)]
    copies = [signal(100, received_s=120 + number / 100, kind="error") for number in range(501)]
    batches = ([signal(0), signal(100)], positioned([*late, *copies]), [signal(200)])
    outputs = [one for batch in batches for one in task.run(batch, START)]
    rows = [row for one in outputs for row in from_bytes(one.judgements).to_pylist()]
    for kind in (JudgementKind.LATE, JudgementKind.DUPLICATE):
        its = [row for row in rows if row["kind"] == kind]
        assert sum(row["messages"] or 1 for row in its) == 500
        assert len(its) == (500 if whole else NEWEST + 1)


def test_many_judgements_of_a_call_are_written_to_files_named_in_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts, parameters = dense_history(3)
    rows = [cut.row for cut in cuts[:300]]
    plain, table = Task(parameters.deployment, None), tmp_path / "table"
    table.mkdir()
    file_task = Task(
        parameters.deployment, None, GroupProcessor(parameters.deployment, STORED_FORM, table=str(table), generation=7)
    )
    monkeypatch.setattr(group_task, "MANY", 2)
    counts, begins = Counter[str](), [index for index in range(0, len(rows), 50) if not index or _moves_watermark(rows, index)]
    for begin, end in pairwise([*begins, len(rows)]):
        some = with_broadcasts(rows[begin:end])
        for one, want in zip(file_task.run(some, rows[0].received_at_ms), plain.run(some, rows[0].received_at_ms), strict=True):
            judgements = from_bytes(want.judgements)
            counts["files" if one.files else "rows"] += judgements.num_rows
            if one.files is None:
                assert judgements.num_rows < 2 and one.judgements == want.judgements
                continue
            named = json.loads(one.files)
            assert one.judgements is None and sum(each["stats"]["numRecords"] for each in named) == judgements.num_rows
            files = [pq.ParquetFile(table / each["name"]).read(["device_id"]) for each in named]
            assert sorted(pa.concat_tables(files)["device_id"].to_pylist()) == sorted(judgements["device_id"].to_pylist())
    assert counts["files"] > 50


def test_a_key_group_has_one_copy_per_state_value_and_reads_the_copies(tmp_path: Path) -> None:
    cuts, parameters = dense_history(3)
    rows = [cut.row for cut in cuts]
    task = Task(parameters.deployment, tmp_path / "copies")
    begins = [index for index in range(0, len(rows), 50) if not index or _moves_watermark(rows, index)]
    for begin, end in pairwise([*begins, len(rows)]):
        task.run(rows[begin:end], rows[0].received_at_ms)
        waiting = task.tester.peekMapState("waiting", 0)
        assert len(list((tmp_path / "copies").iterdir())) == 1 + len(waiting)
        task.tester.updateValueState("group", 0, (b"not read", None))
        task.tester.updateMapState("waiting", 0, dict.fromkeys(waiting, (b"not read",)))
