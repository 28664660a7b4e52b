"""Benchmark of simultaneous silence: batch durations with and without a jitter.

All devices of a fleet fall silent at the same instant.

Rule 1: the query is that of the job. Devices come from initialState; only ticks advance time, one
per batch.
Rule 2: both cases must emit the same transitions, one per device, at the common deadline.
Rule 3: each case runs once, after a small warm-up run. The first two batches of a case are not
measured: they load and count the devices.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import SparkSession
from rich.console import Console

from bench.lifecycle.contenders import key_groups, start_ours
from bench.lifecycle.generate import LATENESS_MS, START_MS
from cli.common.output import as_table, console
from fleetpulse.columnar.snapshot.bootstrap import REGISTERED_SCHEMA
from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.policy import Dated, Policies, parse_policy
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import EVERYONE, Origin, Row, hash64
from fleetpulse.core.tables import MESSAGES
from fleetpulse.core.times import format_duration
from fleetpulse.io.checkpoints.generations import Generation
from fleetpulse.io.lifecycle.initial_state import initial_state
from fleetpulse.io.lifecycle.query import InitialState, judgement_stream
from fleetpulse.io.spark.session import SparkResources, spark_session
from fleetpulse.io.tables.tables import arrow_schema, to_table
from fleetpulse.paths import ROOT, cache_dir

pc: Any = pyarrow.compute  # its functions are generated at run time, unknown to type checkers
MEMORY: Final = "4g"  # heap of the JVM, as in the lifecycle benchmark
TICK_MS: Final = 10_000  # event time between two batches
TIMEOUT_MS: Final = 60_000
WARMING_DEVICES: Final = 20_000
_REPORTS: Final = "10000"  # number of progress reports kept, more than the batches of a run
COLUMNS: Final = (
    "jitter",
    "devices",
    "key_groups",
    "batches",
    "batch_p50_ms",
    "batch_p95_ms",
    "batch_max_ms",
    "expiring_batches",
    "expiring_p50_ms",
    "most_in_a_batch",
    "its_batch",
    "its_ms",
)


def bench_expiry(*, devices: int, jitter_ms: int, json_lines: bool) -> None:
    """Run the benchmark, and print the results.

    Args:
        devices: number of devices with the common deadline.
        jitter_ms: verdict jitter of the second case, milliseconds; the first case has none.
        json_lines: whether to print one JSON object a line instead of a table.

    Raises:
        FleetError: a case did not emit one transition per device, at the deadline.
    """
    work = cache_dir().resolve() / "bench" / f"expiry-{os.getpid()}"
    work.mkdir(parents=True)
    shown = Console(stderr=True)
    try:
        with shown.status(f"{devices:,} devices, twice") if shown.is_terminal else nullcontext():
            rows = _in_a_process(work, devices, jitter_ms)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if json_lines:
        for row in rows:
            sys.stdout.write(json.dumps(row) + "\n")
        return
    formatted = [{name: f"{value:,}" if isinstance(value, int) else value for name, value in row.items()} for row in rows]
    console().print(as_table(formatted, COLUMNS, "simultaneous silence of a fleet"))


def _in_a_process(work: Path, devices: int, jitter_ms: int) -> list[dict[str, Any]]:
    """Run the cases in a separate process, whose standard error goes to a log."""
    command = [sys.executable, "-P", "-m", "bench.expiry", str(work), str(devices), str(jitter_ms)]
    with (work / "log").open("wb") as log:
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, env=variables, cwd=work, check=False)
    if done.returncode:
        last_lines = (work / "log").read_text(errors="replace").splitlines()[-5:]
        raise FleetError("\n".join(["the benchmark failed:", *last_lines]), code="bench-failed")
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_cases(work: Path, devices: int, jitter_ms: int) -> None:
    """Run the warm-up and both cases; print a row per case as JSON."""
    extra = {"spark.sql.streaming.numRecentProgressUpdates": _REPORTS}
    spark = spark_session("bench-expiry", local_dir=work / "spark", size=SparkResources(memory=MEMORY), extra=extra)
    _land(work / "few", _ticks(0))
    _land(work / "many", _ticks(jitter_ms))
    _run(spark, work / "few", work / "warm", WARMING_DEVICES, 0)
    for width_ms in (0, jitter_ms):
        row = _run(spark, work / "many", work / f"case-{width_ms}", devices, width_ms)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
    spark.stop()


def _ticks(jitter_ms: int) -> list[Row]:
    """Return ticks from the start until all verdicts are due, the jitter included."""
    end_ms = START_MS + TIMEOUT_MS + LATENESS_MS + jitter_ms + 2 * TICK_MS
    topic = f"fleet/{EVERYONE}/bench/tick"
    ticks = [decode(topic, b"{}", at_ms, Origin.BRIDGE) for at_ms in range(START_MS + TICK_MS, end_ms, TICK_MS)]
    return [one for one in ticks if isinstance(one, Row)]


def _land(path: Path, ticks: Sequence[Row]) -> None:
    """Write a table of messages with one version per tick."""
    DeltaTable.create(str(path), schema=arrow_schema(MESSAGES))
    arrival = {"origin": "bridge", "bridge": "bench", "device_hash": hash64(EVERYONE)}
    for segment, one in enumerate(ticks, 1):
        rows = to_table(MESSAGES, [{**asdict(one), **arrival, "segment": segment}])
        write_deltalake(str(path), rows, mode="append")


def _fleet(devices: int) -> pa.Table:
    """Return a registry of devices, all registered at the same instant."""
    number = np.arange(devices)
    ids = pc.binary_join_element_wise("meter-", pc.utf8_lpad(pa.array(number).cast(pa.string()), 7, "0"), "")
    columns = {
        "device_id": ids,
        "site": pa.array([f"site-{one}" for one in range(5)]).take(pa.array(number % 5)),
        "device_class": pa.nulls(devices, pa.string()),
        "gateway": pa.array([f"gateway-{one}" for one in range(7)]).take(pa.array(number % 7)),
        "registered_at": pa.array(np.full(devices, START_MS * 1000)).cast(REGISTERED_SCHEMA.field("registered_at").type),
    }
    return pa.table(columns, schema=REGISTERED_SCHEMA)


def _run(spark: SparkSession, messages: Path, place: Path, devices: int, jitter_ms: int) -> dict[str, Any]:
    """Run one case to its end, and return its row."""
    policy = parse_policy({"rules": {"timeout": format_duration(TIMEOUT_MS)}})
    policies = Policies().including(Dated(0, 0, policy.version, policy))
    shards = Shards.judged_through(START_MS, START_MS, LATENESS_MS)
    groups = key_groups(devices)
    initial = initial_state(spark, _fleet(devices), shards, policies, groups)
    deployment = Deployment(LATENESS_MS, verdict_jitter_ms=jitter_ms)
    rows = judgement_stream(
        spark, messages, deployment, Generation.first(groups), initial=InitialState(initial), max_rows=1, table=place / "out"
    )
    query = start_ours(rows, place)
    try:
        query.processAllAvailable()
        took_ms = {one["batchId"]: one["durationMs"]["triggerExecution"] for one in query.recentProgress if one["batchId"] > 1}
    finally:
        query.stop()
    emitted = _transitions_per_batch(place / "out", devices)
    shutil.rmtree(place)
    return {"jitter": format_duration(jitter_ms), "devices": devices, "key_groups": groups, **figures(took_ms, emitted)}


def _transitions_per_batch(out: Path, devices: int) -> dict[int, int]:
    """Return the number of transitions per batch, checked against the common deadline."""
    found: dict[int, int] = {}
    ids: list[pa.ChunkedArray] = []
    for commit in sorted((out / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        batch = next((one["txn"]["version"] for one in actions if "txn" in one), None)
        added = [one["add"] for one in actions if "add" in one]
        for path in (add["path"] for add in added if add["partitionValues"]["kind"] == "transition"):
            rows = pq.ParquetFile(out / path).read(columns=["device_id", "event_time"])
            at_ms = pc.unique(rows["event_time"].cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64())).to_pylist()
            if at_ms != [START_MS + TIMEOUT_MS]:
                raise FleetError(
                    f"batch {batch} has transitions at {at_ms}; the deadline is {START_MS + TIMEOUT_MS}",
                    code="bench-transitions-wrong",
                )
            ids.append(rows["device_id"])
            found[batch] = found.get(batch, 0) + rows.num_rows
    distinct = pc.count_distinct(pa.chunked_array([chunk for one in ids for chunk in one.chunks], pa.string())).as_py()
    if not distinct == sum(found.values()) == devices:
        raise FleetError(
            f"one transition per device expected; got {sum(found.values())} of {distinct} devices; there are {devices} devices",
            code="bench-transitions-wrong",
        )
    return found


def figures(took_ms: dict[int, int], emitted: dict[int, int]) -> dict[str, Any]:
    """Return the figures of a run.

    Args:
        took_ms: duration of each measured batch, by batch number.
        emitted: number of transitions of each batch, by batch number.
    """
    times = list(took_ms.values())
    most = max(emitted, key=lambda batch: emitted[batch])
    return {
        "batches": len(times),
        "batch_p50_ms": round(median(times)),
        "batch_p95_ms": round(float(np.percentile(times, 95))),
        "batch_max_ms": max(times),
        "expiring_batches": len(emitted),
        "expiring_p50_ms": round(median(took_ms[batch] for batch in emitted)),
        "most_in_a_batch": emitted[most],
        "its_batch": most,
        "its_ms": took_ms[most],
    }


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), *map(int, sys.argv[2:]))
