"""Benchmark of the quality suites on a generated day without faults.

Run it by ``./fleet bench quality``.

Rule 1: the day is judged by the job's fold, in key groups and batches; the suites replay it.
Rule 2: every expectation must pass; a warning, failure or skipped expectation is an error.
Rule 3: CPU is that of the whole process tree, the JVM included.
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa
import pyarrow.compute
from deltalake import CommitProperties, write_deltalake

from batch.backtest import unpacked
from batch.quality.run import lazy_session, run
from bench.load import LATENESS_MS, Load
from bench.measure import Reading, read
from fleetpulse.columnar.codec.arrow import NO_SIGNALS
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.columnar.snapshot.rows import snapshot_rows
from fleetpulse.core.catalog import TABLES
from fleetpulse.core.errors import FleetError
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Kind
from fleetpulse.core.tables import COVERAGE, DEVICE_SNAPSHOTS, DEVICES, JUDGEMENTS, MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.session import SparkResources
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.bronze_slices import blocks_of, pieces_of, slices_of
from fleetpulse.io.tables.row_accounting import IngestCounters
from fleetpulse.io.tables.snapshots import SnapshotInfo

pc: Any = pyarrow.compute  # its functions are generated at run time, unknown to type checkers
_DAY: Final = Load(devices=230, leaving=1)  # a message of each device every 20 s: 1,000,000 a day
_STEPS: Final = 4_320
_QUICK_STEPS: Final = 216
_A_COMMIT: Final = 72
_GROUPS: Final = 8
_BATCH_ROWS: Final = 20_000


def bench_quality(*, quick: bool, report: Callable[[str], None]) -> Iterable[dict[str, Any]]:
    """Generate and judge the day, evaluate all suites, and yield result rows.

    There is a row per suite and one per phase.

    Args:
        quick: whether to use a twentieth of the day.
        report: callback for progress lines.

    Raises:
        FleetError: an expectation did not pass.
    """
    tree = psutil.Process()
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as place:
        home = Home(Path(place) / "home")
        before = read(tree)
        messages = _land(home, _QUICK_STEPS if quick else _STEPS)
        report(f"{messages:,} messages have landed")
        judged = _judge(home)
        judged_reading = read(tree)
        report(f"{judged:,} judgements; evaluating the suites")
        with lazy_session(home, SparkResources()) as session:
            results = run(home, session=session)
            reading = read(tree)
        for one in results.suite_runs:
            raised = sum(each.outcome in ("failed", "fault") for each in one.findings)
            same = {"what": one.suite, "engine": one.engine, "rows": one.rows}
            yield {**same, "wall_s": round(one.took_ms / 1000, 1), "cpu_s": None, "raised": raised}
        raised = [one.sentence() for one in results.findings() if one.outcome in ("failed", "fault", "skipped")]
        yield _row("made and judged", messages, before, judged_reading)
        yield _row("evaluated by all suites", messages, judged_reading, reading, len(raised))
        if raised:
            raise FleetError("all expectations must pass on this day; got\n" + "\n".join(raised), code="quality-not-clean")


def _row(label: str, rows: int, start: Reading, end: Reading, raised: int = 0) -> dict[str, Any]:
    wall_s, cpu_s = round(end.wall_s - start.wall_s, 1), round(end.cpu_s - start.cpu_s, 1)
    return {"what": label, "engine": "", "rows": rows, "wall_s": wall_s, "cpu_s": cpu_s, "raised": raised}


def _land(home: Home, steps: int) -> int:
    """Write bronze and the tables of landing; return the number of messages."""
    home.prepare(Deployment(LATENESS_MS))
    for table in TABLES:
        tables.create(home, table)
    count = 0
    for number, first in enumerate(range(0, steps, _A_COMMIT), 1):
        rows = pa.concat_tables([_DAY.step(step) for step in range(first, min(first + _A_COMMIT, steps))])
        for table, kind in ((COVERAGE, Kind.GAP), (DEVICES, Kind.REGISTRY)):
            tables.append(home, table, tables.to_table(table, _own(rows, kind)), "bench", number)
        count += rows.num_rows
        tables.append_of(home, MESSAGES, rows, {"bench": number, **IngestCounters(count, 0).numbers()})
    return count


def _own(rows: pa.Table, kind: Kind) -> list[dict[str, Any]]:
    """Return the rows of coverage or devices that landing derives from rows of a kind."""
    found: list[dict[str, Any]] = []
    for row in rows.filter(pc.equal(rows["kind"], kind.value)).to_pylist():
        content = json.loads(row["body"])
        at_ms = content.get("from" if content["op"] == "open" else "until")
        same = {name: row[name] for name in ("device_id", "site", "origin", "segment")}
        instants = {"received_at_ms": _millis(row["received_at"]), "effective_from_ms": _millis(row["event_time"])}
        found.append({**same, **instants, "bridge": "bench", "op": content["op"], "at_ms": at_ms})
    return found


def _millis(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)


def _judge(home: Home) -> int:
    """Judge as the job does; write judgements, a snapshot and a checkpoint position.

    Returns:
        Number of judgements.
    """
    deployment, pieces = home.deployment(), pieces_of(home)
    started_ms, newest_ms = pieces[0].first_ms, max(one.last_ms for one in pieces)
    groups = [KeyGroup(Shards.begin(started_ms)) for _ in range(_GROUPS)]
    chunks: list[dict[int, bytes]] = [{} for _ in groups]
    count = 0

    def fold(number: int, signals: pa.RecordBatch, others: Any, through_ms: int) -> pa.RecordBatch:
        step = groups[number].fold(signals, others, through_ms, deployment, chunks[number].__getitem__)
        for deleted in step.deleted_chunks:
            del chunks[number][deleted]
        chunks[number].update(step.chunks)
        return step.judgements

    for each in slices_of(pieces, _BATCH_ROWS):
        blocks = blocks_of(each, _GROUPS, started_ms)
        batches = [
            fold(number, signals, others, each.newest_ms)
            for number, (signals, others) in zip(blocks["key_group"].to_pylist(), unpacked(blocks), strict=True)
        ]
        count += _append_judgements(home, batches, each.number + 1)
    count += _append_judgements(
        home, [fold(number, NO_SIGNALS, [], newest_ms) for number in range(_GROUPS)], len(pieces) + 1_000_000
    )
    _publish(home, groups, chunks, newest_ms)
    _note(home, newest_ms)
    return count


def _append_judgements(home: Home, batches: list[pa.RecordBatch], number: int) -> int:
    judgements = pa.Table.from_batches(batches)
    columns = dict(zip(judgements.column_names, judgements.columns, strict=True))
    tables.append(home, JUDGEMENTS, tables.from_columns(JUDGEMENTS, columns, judgements.num_rows), "bench", number)
    return judgements.num_rows


def _publish(home: Home, groups: list[KeyGroup], chunks: list[dict[int, bytes]], newest_ms: int) -> None:
    rows = [
        batch
        for number, group in enumerate(groups)
        for batch in snapshot_rows(number, group.to_bytes(), chunks[number], newest_ms, home.deployment())
    ]
    about = SnapshotInfo(1, 1, 1, newest_ms, groups[0].shards.frontier_ms, sum(len(group.devices) for group in groups), _GROUPS)
    note = {name: value for name, value in asdict(about).items() if name not in ("version", "at_ms")}
    properties = CommitProperties(custom_metadata={"userMetadata": json.dumps(note)})
    place = str(home.table(DEVICE_SNAPSHOTS.name))
    write_deltalake(place, pa.Table.from_batches(rows), mode="overwrite", partition_by=["part"], commit_properties=properties)


def _note(home: Home, newest_ms: int) -> None:
    """Write the position in the format of the job's checkpoint."""
    for folder in ("offsets", "commits"):
        (home.checkpoint / folder).mkdir(parents=True, exist_ok=True)
    (home.checkpoint / "offsets" / "1").write_text('v1\n{"batchWatermarkMs": 0}\n{"version": 1}\n')
    (home.checkpoint / "commits" / "1").write_text(f'v1\n{{"nextBatchWatermarkMs": {newest_ms - 1}}}')
