"""Benchmark of reading the present fleet: `status`, `devices` and `device` of a large home.

Rule 1: each command runs as typed, in a process of its own; the figures are medians.
Rule 2: the fleet is generated in the declared tables, without broker and job. All histories of a run
have the same devices, and end at the same instant.
Rule 3: a command reads the kept facts and newer rows: a minute of messages, and some transitions.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from bench.folders import own_folder
from cli.dev.test_run import calibrate
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import hash64
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES, TABLES, Table
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.row_accounting import IngestCounters

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

RUNS: Final = 3
_LIMIT_S: Final = 600.0
_NOW_MS: Final = 1_764_000_000_000
_SPAN_MS: Final = 30 * 86_400_000  # of the transitions
_ROWS: Final = 250_000  # rows of a commit
_ID: Final = "pump-0001234"


def bench_present(
    devices: int, histories: list[int], report: Callable[[str], None], *, unkept: bool = False
) -> Iterator[dict[str, Any]]:
    """Measure the commands over each history, and yield a row each.

    Args:
        devices: number of devices.
        histories: lengths of history, as multiples of about 4.5 transitions and 3 messages a device.
        report: callback for progress.
        unkept: whether to measure also before the facts are kept, when all rows are read.

    Raises:
        FleetError: a command failed or took longer than its limit, or two reads differ.
    """
    unit_s = calibrate()
    for history in histories:
        with own_folder(Path(tempfile.mkdtemp(prefix="fleet-present-"))) as place:
            report(f"generating {devices:,} devices, history x{history}")
            home = Home(place / "home")
            transitions, messages = _generate(home, devices, history)
            same = {"devices": devices, "transitions": transitions, "messages": messages}
            if unkept:
                yield from _measured(home, {**same, "facts": "read from all rows"}, unit_s, report)
            yield {**same, "facts": "", **_run(home, "maintain"), "command": "maintain", "runs": 1}
            _add_newer(home, devices)
            yield from _measured(home, {**same, "facts": "kept"}, unit_s, report)


def _measured(home: Home, same: dict[str, Any], unit_s: float, report: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    commands = (
        ("status", "--json"),
        ("devices", "--last", "50"),
        ("devices", "--mode", "offline", "--last", "50"),
        ("device", _ID),
    )
    for words in commands:
        report(" ".join(words))
        runs = [_run(home, *words) for _ in range(RUNS + 1)][1:]
        figures = {name: round(median(run[name] for run in runs), 2) for name in ("cpu_s", "wall_s", "peak_mb")}
        yield {**same, "command": " ".join(words), **figures, "units": round(figures["cpu_s"] / unit_s, 2), "runs": RUNS}


def _run(home: Home, *words: str) -> dict[str, float]:
    """Run a command; return its CPU and wall seconds, and its peak memory in megabytes."""
    report = home.path.parent / "usage.json"
    measure = (
        "import json, resource, subprocess, sys, time; began = time.monotonic();"
        "done = subprocess.run(sys.argv[2:], stdout=subprocess.DEVNULL, check=False);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "found = dict(wall_s=time.monotonic() - began, cpu_s=used.ru_utime + used.ru_stime, peak_mb=used.ru_maxrss / 1024);"
        "open(sys.argv[1], 'w').write(json.dumps(found)); sys.exit(done.returncode)"
    )
    command = [sys.executable, "-m", "cli", *words, "--home", str(home.path)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", measure, str(report), *command],
            env={**os.environ, "COLUMNS": "200"}, check=False, capture_output=True, text=True, timeout=_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        raise FleetError(f'"fleet {" ".join(words)}" took longer than {_LIMIT_S:g} s', code="bench-run-too-long") from late
    if done.returncode:
        raise FleetError(f'"fleet {" ".join(words)}" failed:\n{done.stderr[-2000:]}', code="bench-run-failed")
    return json.loads(report.read_text(encoding="utf-8"))


def _generate(home: Home, devices: int, history: int) -> tuple[int, int]:
    """Write transitions and messages of a fleet; return the number of each."""
    home.prepare(Deployment())
    for table in TABLES:
        tables.create(home, table)
    with tables.connect() as connection:
        _create_fleet(connection, devices, f"{4 * history} + n % {history + 1}")
        transitions = _append(home, JUDGEMENTS, connection, _TRANSITIONS.format(now=_NOW_MS, span=_SPAN_MS))
        messages = _append(home, MESSAGES, connection, _MESSAGES.format(now=_NOW_MS, last=3 * history, first=0))
    _commit_batch(home, _NOW_MS)
    return transitions, messages


def _create_fleet(connection: "DuckDBPyConnection", devices: int, changes: str) -> None:
    """Create the table of the devices, with their number of transitions."""
    hashes = pa.table({"n": range(devices), "device_hash": [hash64(f"pump-{n:07d}") for n in range(devices)]})
    connection.register("hashes", hashes)
    connection.execute(f"""CREATE TABLE fleet AS SELECT n, device_hash, format('pump-{{:07d}}', n) AS device_id,
        format('site-{{:03d}}', floor(sqrt(hash(n) % 250000))::INT) AS site, format('class-{{}}', n % 6) AS device_class,
        {changes} AS changes FROM hashes""")


_TRANSITIONS: Final = """
    SELECT 'transition' AS kind, device_id, site, device_class, epoch_ms(life) AS life_ms, j + 1 AS transition_no,
           CASE WHEN j % 2 = 1 THEN 'online' ELSE 'offline' END AS from_mode,
           CASE WHEN j % 2 = 0 THEN 'online' WHEN n % 37 = 0 THEN 'degraded' ELSE 'offline' END AS to_mode,
           CASE WHEN j % 2 = 0 THEN 'signal' ELSE 'silence' END AS "trigger", epoch_ms(moment) AS event_time_ms,
           epoch_ms(moment - INTERVAL 3 MINUTE) AS last_seen_ms, 1000 * j AS runtime_ms, '[]' AS last_errors,
           'p1' AS policy_version, epoch_ms(moment + INTERVAL 1 MINUTE) AS judged_at_ms, 1 AS generation
    FROM (SELECT *, make_timestamp(1000 * ({now} - {span}))::TIMESTAMPTZ AS life,
                 make_timestamp(1000 * ({now} - {span} + ((j + (hash(n, j) % 1000) / 1000.0) / changes * {span})::BIGINT)
                 )::TIMESTAMPTZ AS moment FROM fleet, range(30) AS numbers(j) WHERE j < changes)
    ORDER BY moment, device_id
"""
_MESSAGES: Final = """
    SELECT epoch_ms(moment) AS received_at_ms, epoch_ms(moment) AS event_time_ms, 'telemetry' AS kind, device_id, site,
           'device' AS clock, 'b1' AS boot, j AS seq, '{{"temperature": 21.5}}' AS metrics, n AS digest, 0 AS position,
           device_hash, 'mqtt' AS origin, 'bridge-1' AS bridge, 1 AS segment
    FROM (SELECT *, make_timestamp(1000 * ({now} - ({last} - j) * 60000 + (hash(n) % 60000)::BIGINT))::TIMESTAMPTZ AS moment
          FROM fleet, range({first}, {last}) AS numbers(j))
    ORDER BY moment, device_id
"""


def _append(home: Home, table: Table, connection: "DuckDBPyConnection", sql: str) -> int:
    """Append the rows of a query in commits of `_ROWS` rows; return their number."""
    count, number = 0, tables.landed(home, table, "bench")
    for batch in connection.sql(sql).to_arrow_reader(_ROWS):
        rows = pa.Table.from_batches([batch])
        count, number = count + rows.num_rows, number + 1
        held = tables.from_columns(table, {name: rows[name] for name in rows.column_names}, rows.num_rows)
        counters = IngestCounters(count, 0).numbers() if table is MESSAGES else {}
        tables.append_of(home, table, held, {"bench": number, **counters})
    return count


def _add_newer(home: Home, devices: int) -> None:
    """Add a minute of messages, and a transition of every two-hundredth device."""
    with tables.connect() as connection:
        _create_fleet(connection, devices, "1")
        newest = """SELECT 'transition' AS kind, device_id, site, device_class, {life} AS life_ms, 1000 AS transition_no,
            'offline' AS from_mode, 'online' AS to_mode, 'signal' AS "trigger", {now} + n % 60000 AS event_time_ms,
            {now} AS last_seen_ms, 0 AS runtime_ms, '[]' AS last_errors, 'p1' AS policy_version, {now} + 60000 AS judged_at_ms,
            1 AS generation FROM fleet WHERE n % 200 = 0 ORDER BY event_time_ms, device_id"""
        _append(home, JUDGEMENTS, connection, newest.format(now=_NOW_MS, life=_NOW_MS - _SPAN_MS))
        _append(home, MESSAGES, connection, _MESSAGES.format(now=_NOW_MS + 60_000, last=1, first=0))
    _commit_batch(home, _NOW_MS + 60_000)


def _commit_batch(home: Home, received_ms: int) -> None:
    """Write the files of a committed batch that judged rows up to an instant."""
    for folder in ("offsets", "commits"):
        (home.checkpoint / folder).mkdir(parents=True, exist_ok=True)
    number = len(list((home.checkpoint / "offsets").iterdir()))
    metadata = json.dumps({"batchWatermarkMs": received_ms - 1, "conf": {"spark.sql.shuffle.partitions": "2"}})
    position = json.dumps({"version": 1})
    (home.checkpoint / "offsets" / str(number)).write_text(f"v1\n{metadata}\n{position}\n", encoding="utf-8")
    committed = json.dumps({"nextBatchWatermarkMs": received_ms - 1})
    (home.checkpoint / "commits" / str(number)).write_text(f"v1\n{committed}", encoding="utf-8")
