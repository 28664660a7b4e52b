"""Benchmark of the streams beside the lifecycle: CPU a message, beside plain Spark over the same bronze.

Rule 1: contenders run in turns in one Spark session, each from an empty checkpoint over the whole of bronze. CPU is
that of this process and all its descendants. The first round is not measured: it compiles.
Rule 2: the results of both are compared row by row, over what both define alike.
"""

import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from deltalake import DeltaTable

from bench.folders import own_folder
from bench.large_home import append
from bench.measure import Meter
from cli.dev.test_run import calibrate
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import EVERYONE, hash64
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.core.tables import MESSAGES
from fleetpulse.core.times import format_duration
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables

OURS, PLAIN = "fleetpulse", "plain Spark"
_START_MS: Final = 1_764_000_000_000 // 600_000 * 600_000
_PERIOD_MS: Final = 60_000  # between two messages of a device
_WINDOW_MS: Final = 600_000
_SILENCE_MS: Final = 300_000
_ANSWER_MS: Final = 120_000
_LIMIT_S: Final = 1_800.0
_LATENESS_MS: Final = 60_000


def bench_streams(devices: int, minutes: int, rounds: int, report: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Measure each stream beside its peer; yield a row for each contender and stream.

    Args:
        devices: number of devices; each sends a message a minute.
        minutes: length of bronze.
        rounds: measured rounds.
        report: callback for progress.

    Raises:
        FleetError: a contender failed, or the results differ.
    """
    unit_s = calibrate()
    with own_folder(Path(tempfile.mkdtemp(prefix="fleet-streams-"))) as place:
        report(f"generating {devices:,} devices, {minutes} minutes")
        source = Home(place / "source")
        messages = _generate(source, devices, minutes)
        from fleetpulse.io.spark.session import SparkResources, spark_session

        spark = spark_session("bench-streams", local_dir=place / "spark", size=SparkResources(memory="4g"))
        try:
            for stream in StreamName:
                used: dict[str, list[float]] = defaultdict(list)
                walls: dict[str, list[float]] = defaultdict(list)
                found: dict[str, list[tuple[Any, ...]]] = {}
                for number in range(rounds + 1):
                    for contender in (OURS, PLAIN):
                        home = _copy(source, place / f"{stream}-{number}-{contender.split()[0]}")
                        report(f"{stream}, round {number} of {rounds}, {contender}")
                        cpu_s, wall_s = _run(spark, home, stream, contender)
                        if number:
                            used[contender].append(cpu_s)
                            walls[contender].append(wall_s)
                        found[contender] = _result(home, stream, contender)
                        shutil.rmtree(home.path)
                _require_equal(stream, found)
                for contender in (OURS, PLAIN):
                    yield {
                        "stream": stream.value, "contender": contender, "devices": devices, "messages": messages,
                        "cpu_us_a_message": round(median(used[contender]) / messages * 1e6, 2),
                        "wall_s": round(median(walls[contender]), 1), "rows": len(found[contender]),
                        "ratio": round(median(used[contender]) / median(used[PLAIN]), 2), "unit_s": round(unit_s, 2),
                    }  # fmt: skip
        finally:
            spark.stop()


def _generate(home: Home, devices: int, minutes: int) -> int:
    """Write bronze: each device sends a message a minute; some connect again, die, fall silent, or answer commands."""
    home.prepare(Deployment(_LATENESS_MS))
    tables.create(home, MESSAGES)
    import pyarrow as pa

    policy = parse_policy({"vitals": {"battery": {"window": format_duration(_WINDOW_MS)}}}).normalised()
    first = {
        "received_at_ms": _START_MS, "event_time_ms": _START_MS, "kind": "policy", "device_id": EVERYONE, "site": EVERYONE,
        "clock": "received", "body": json.dumps({"policy": policy}), "digest": 0, "device_hash": hash64(EVERYONE),
        "origin": "command", "bridge": "bridge-1", "segment": 0,
    }  # fmt: skip
    tables.append_of(home, MESSAGES, tables.to_table(MESSAGES, [first]), {"bench": 0})
    count = 1
    with tables.connect() as connection:
        ids = [f"pump-{n:07d}" for n in range(devices)]
        connection.register("fleet", pa.table({"n": range(devices), "device_id": ids, "device_hash": [*map(hash64, ids)]}))
        for minute in range(minutes):
            count += append(home, MESSAGES, connection, _MINUTE.format(minute=minute, start=_START_MS, period=_PERIOD_MS))
    return count


_MINUTE: Final = """
    WITH sent AS (SELECT *, {start} + {minute} * {period} + (hash(n) % {period})::BIGINT AS moment,
                         hash(n, {minute}) % 1000 AS dice
                  FROM fleet WHERE NOT (n % 50 = 7 AND {minute} >= 3)),
    messages AS (
        SELECT n, device_id, device_hash, moment AS received_at_ms,
               moment - (hash(n, 5, {minute}) % 5000)::BIGINT AS event_time_ms,
               CASE WHEN {minute} = 0 OR dice < 5 THEN 'birth' WHEN dice < 8 THEN 'death' ELSE 'telemetry' END AS kind,
               printf('{{"battery":%.2f,"temperature":%.1f}}', 3 + dice / 1000.0, 20 + dice / 100.0) AS metrics, NULL AS body,
               printf('s%d', {minute}) AS session
        FROM sent
        UNION ALL BY NAME
        SELECT n, device_id, device_hash, moment + 1 AS received_at_ms, moment + 1 AS event_time_ms, 'control' AS kind,
               printf('{{"op":"command","id":"c%d-%d","name":"set","payload":{{}}}}', {minute}, n) AS body
        FROM sent WHERE dice BETWEEN 20 AND 39
        UNION ALL BY NAME
        SELECT n, device_id, device_hash, moment + 2 + dice AS received_at_ms, moment + 2 + dice AS event_time_ms, 'ack' AS kind,
               printf('{{"id":"c%d-%d","status":"accepted"}}', {minute}, n) AS body
        FROM sent WHERE dice BETWEEN 20 AND 36)
    SELECT received_at_ms, CASE WHEN kind = 'death' THEN received_at_ms ELSE event_time_ms END AS event_time_ms, kind, device_id,
           'site-1' AS site, CASE WHEN kind IN ('control', 'death') THEN 'received' ELSE 'device' END AS clock,
           CASE WHEN kind = 'telemetry' THEN metrics END AS metrics, body,
           CASE WHEN kind = 'birth' THEN session END AS session, hash(n, kind, {minute})::HUGEINT - 9223372036854775808 AS digest,
           {minute} AS seq, 'b1' AS boot, 0 AS position, device_hash,
           CASE WHEN kind = 'control' THEN 'command' ELSE 'mqtt' END AS origin, 'bridge-1' AS bridge, {minute} AS segment
    FROM messages ORDER BY received_at_ms, device_id
"""


def _copy(source: Home, path: Path) -> Home:
    """Return a copy of a home that shares the files of bronze."""
    shutil.copytree(source.path, path, copy_function=os.link)
    return Home(path)


def _run(spark: Any, home: Home, stream: StreamName, contender: str) -> tuple[float, float]:
    """Run a contender over all of bronze; return its CPU seconds and wall seconds."""
    from fleetpulse.io.streams.runner import start_stream

    with Meter() as meter:
        began = meter.read()
        if contender == OURS:
            query = start_stream(spark, home, stream, StreamOptions((stream,), 0, _SILENCE_MS, _ANSWER_MS))
        else:
            query = _plain(spark, home, stream)
        limit = time.monotonic() + _LIMIT_S
        while query.isActive and time.monotonic() < limit:
            time.sleep(0.1)
        ended = meter.read()
    if query.isActive or query.exception() is not None:
        query.stop()
        raise FleetError(f"{contender} failed for {stream}: {query.exception() or 'time limit'}", code="bench-run-failed")
    return ended.cpu_s - began.cpu_s, ended.wall_s - began.wall_s


def _plain(spark: Any, home: Home, stream: StreamName) -> Any:
    from bench.peers import spark_streams as peers

    messages, table, checkpoint = home.table(MESSAGES.name), home.path / "plain", home.path / "plain-checkpoint"
    rows = {
        StreamName.SESSIONS: lambda: peers.sessions(spark, messages, _SILENCE_MS, 1),
        StreamName.VITALS: lambda: peers.vitals(spark, messages, _WINDOW_MS, _LATENESS_MS),
        StreamName.COMMANDS: lambda: peers.commands(spark, messages, _ANSWER_MS, 1),
    }[stream]()
    return peers.write(rows, table, checkpoint)


_COMPARED: Final[Mapping[tuple[StreamName, str], str]] = {
    (StreamName.SESSIONS, OURS): "SELECT device_id, started_at, ended_at, ended_by, messages FROM {} WHERE ended_at IS NOT NULL",
    (StreamName.SESSIONS, PLAIN): "SELECT device_id, started_at, ended_at, ended_by, messages FROM {}",
    (StreamName.VITALS, OURS): "SELECT device_id, window_start, count, min, max, round(mean, 9) FROM {} WHERE metric = 'battery'",
    (StreamName.VITALS, PLAIN): "SELECT device_id, window_start, count, min, max, round(mean, 9) FROM {}",
    (
        StreamName.COMMANDS,
        OURS,
    ): "SELECT device_id, command_id, answered_at FROM {} WHERE status IN ('acknowledged', 'timed_out')",
    (StreamName.COMMANDS, PLAIN): "SELECT sent_device, sent_id, answer_at FROM {}",
}


def _result(home: Home, stream: StreamName, contender: str) -> list[tuple[Any, ...]]:
    folder = home.table(stream) if contender == OURS else home.path / "plain"
    with tables.connect() as connection:
        if not (files := DeltaTable(str(folder)).file_uris()):
            raise FleetError(f"{contender} has no result of {stream}: use more --minutes", code="bench-input-invalid")
        scan = f"read_parquet({files!r})"
        return sorted(connection.sql(_COMPARED[stream, contender].format(scan)).fetchall(), key=repr)


def _require_equal(stream: StreamName, found: Mapping[str, list[tuple[Any, ...]]]) -> None:
    ours, plain = found[OURS], found[PLAIN]
    if ours != plain:
        differing = next(iter(set(ours) ^ set(plain)), None)
        raise FleetError(
            f"the results of {stream} differ: {len(ours):,} rows and {len(plain):,}; for example {differing}",
            code="bench-differs",
        )
