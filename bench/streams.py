"""Benchmark of the streams beside the lifecycle: CPU a message, beside plain Spark over the same bronze.

Rule 1: contenders run in turns in one Spark session, each from an empty checkpoint over the whole of bronze. CPU is
that of this process and all its descendants. A round with a small fleet is not measured: it compiles.
Rule 2: each minute of bronze is one version, and so one batch of both contenders: a version lands when the batch
before it is committed. State is therefore emitted and removed as in a running fleet.
Rule 3: the results of both are compared row by row, over what both define alike: up to `_OPEN_MINUTES` before the end
of bronze, since the watermarks of the contenders differ by less.
"""

import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
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
from fleetpulse.io.checkpoints.streams import next_versions
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables

OURS, PLAIN = "fleetpulse", "plain Spark"
_START_MS: Final = 1_764_000_000_000 // 600_000 * 600_000
_PERIOD_MS: Final = 60_000  # between two messages of a device
_SENDING_MS: Final = 59_000  # of a period: answers follow within it, so versions are in the order of ``received_at``
_WINDOW_MS: Final = 300_000
_SILENCE_MS: Final = 300_000
_ANSWER_MS: Final = 120_000
_LIMIT_S: Final = 3_600.0
_EVERY_MS: Final = 100  # interval of the batches: a version is read as soon as it has landed
_LATENESS_MS: Final = 60_000
_OPEN_MINUTES: Final = 5
_FIRST_VERSIONS: Final = 2  # of an empty table, and with the policy
_SMALL: Final = 1_000  # devices of the round that is not measured


def bench_streams(
    devices: int, minutes: int, rounds: int, only: Collection[StreamName], report: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Measure each stream beside its peer; yield a row for each contender and stream.

    Args:
        devices: number of devices; each sends a message a minute.
        minutes: length of bronze.
        rounds: measured rounds.
        only: streams to measure; all if empty.
        report: callback for progress.

    Raises:
        FleetError: a contender failed, or the results differ.
    """
    unit_s = calibrate()
    with own_folder(Path(tempfile.mkdtemp(prefix="fleet-streams-"))) as place:
        report(f"generating {devices:,} devices, {minutes} minutes")
        small, source = Home(place / "small"), Home(place / "source")
        _generate(small, _SMALL, minutes)
        messages = _generate(source, devices, minutes)
        from fleetpulse.io.spark.session import SparkResources, spark_session

        spark = spark_session("bench-streams", local_dir=place / "spark", size=SparkResources(memory="4g"))
        try:
            for stream in only or StreamName:
                used: dict[str, list[float]] = defaultdict(list)
                walls: dict[str, list[float]] = defaultdict(list)
                found: dict[str, list[tuple[Any, ...]]] = {}
                for number in range(rounds + 1):
                    for contender in (OURS, PLAIN):
                        home, later = _copy(source if number else small, place / f"{stream}-{number}-{contender.split()[0]}")
                        report(f"{stream}, round {number} of {rounds}, {contender}")
                        cpu_s, wall_s = _run(spark, home, later, stream, contender)
                        if number:
                            used[contender].append(cpu_s)
                            walls[contender].append(wall_s)
                        found[contender] = _result(home, stream, contender, minutes)
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
            count += append(
                home, MESSAGES, connection, _MINUTE.format(minute=minute, start=_START_MS, period=_PERIOD_MS, sending=_SENDING_MS)
            )
    return count


_MINUTE: Final = """
    WITH sent AS (SELECT *, {start} + {minute} * {period} + (hash(n) % {sending})::BIGINT AS moment,
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


def _copy(source: Home, path: Path) -> tuple[Home, list[tuple[Path, Path]]]:
    """Return a copy of a home that shares the files of bronze, and the commits that have not landed: source and place."""
    shutil.copytree(source.path, path, copy_function=os.link)
    logs = [home.table(MESSAGES.name) / "_delta_log" for home in (source, Home(path))]
    later = [(log, logs[1] / log.name) for log in sorted(logs[0].glob("*.json"))[_FIRST_VERSIONS:]]
    for _, place in later:
        place.unlink()
    return Home(path), later


def _run(spark: Any, home: Home, later: list[tuple[Path, Path]], stream: StreamName, contender: str) -> tuple[float, float]:
    """Run a contender while versions of bronze land; return its CPU seconds and wall seconds."""
    from fleetpulse.io.streams.runner import start_stream

    checkpoint = home.stream_checkpoint(stream) if contender == OURS else home.path / "plain-checkpoint"
    with Meter() as meter:
        began = meter.read()
        if contender == OURS:
            query = start_stream(spark, home, stream, StreamOptions((stream,), _EVERY_MS, _SILENCE_MS, _ANSWER_MS))
        else:
            query = _plain(spark, home, stream, checkpoint)
        try:
            for landed, (log, place) in enumerate([(None, None), *later], _FIRST_VERSIONS):
                if log is not None and place is not None:
                    os.link(log, place)
                _await_version(query, checkpoint, landed)
            ended = meter.read()
        finally:
            failure = query.exception()
            query.stop()
        if failure is not None:
            raise FleetError(f"{contender} failed for {stream}: {failure}", code="bench-run-failed")
    return ended.cpu_s - began.cpu_s, ended.wall_s - began.wall_s


def _await_version(query: Any, checkpoint: Path, version: int) -> None:
    """Wait until a query has committed a batch after which it continues at a version of bronze, or has ended."""
    limit = time.monotonic() + _LIMIT_S
    while query.isActive and min(next_versions(checkpoint), default=0) < version:
        if time.monotonic() > limit:
            raise FleetError(f"no batch up to version {version} within {_LIMIT_S:.0f} s", code="bench-run-failed")
        time.sleep(0.05)


def _plain(spark: Any, home: Home, stream: StreamName, checkpoint: Path) -> Any:
    from bench.peers import spark_streams as peers

    messages = home.table(MESSAGES.name)
    rows = {
        StreamName.SESSIONS: lambda: peers.sessions(spark, messages, _SILENCE_MS, 1),
        StreamName.VITALS: lambda: peers.vitals(spark, messages, _WINDOW_MS, _LATENESS_MS),
        StreamName.COMMANDS: lambda: peers.commands(spark, messages, _ANSWER_MS, 1),
    }[stream]()
    return peers.write(rows, home.path / "plain", checkpoint, _EVERY_MS)


_COMPARED: Final[Mapping[tuple[StreamName, str], str]] = {
    (StreamName.SESSIONS, OURS): """SELECT device_id, started_at, ended_at, ended_by, messages FROM {}
        WHERE ended_at IS NOT NULL AND epoch_ms(ended_at) < {}""",
    (StreamName.SESSIONS, PLAIN): """SELECT device_id, started_at, ended_at, ended_by, messages FROM {}
        WHERE epoch_ms(ended_at) < {}""",
    (StreamName.VITALS, OURS): """SELECT device_id, window_start, count, min, max, round(mean, 9) FROM {}
        WHERE metric = 'battery' AND epoch_ms(window_end) < {}""",
    (StreamName.VITALS, PLAIN): f"""SELECT device_id, window_start, count, min, max, round(mean, 9) FROM {{}}
        WHERE epoch_ms(window_start) + {_WINDOW_MS} < {{}}""",
    (StreamName.COMMANDS, OURS): """SELECT device_id, command_id, answered_at FROM {}
        WHERE status IN ('acknowledged', 'timed_out') AND epoch_ms(sent_at) < {}""",
    (StreamName.COMMANDS, PLAIN): "SELECT sent_device, sent_id, answer_at FROM {} WHERE epoch_ms(sent_at) < {}",
}  # fmt: skip


def _result(home: Home, stream: StreamName, contender: str, minutes: int) -> list[tuple[Any, ...]]:
    folder = home.table(stream) if contender == OURS else home.path / "plain"
    end_ms = _START_MS + (minutes - _OPEN_MINUTES) * _PERIOD_MS + 1
    with tables.connect() as connection:
        files = DeltaTable(str(folder)).file_uris()
        sql = _COMPARED[stream, contender].format(f"read_parquet({files!r})", end_ms)
        if not (rows := connection.sql(sql).fetchall() if files else []):
            raise FleetError(f"{contender} has no result of {stream}: use more --minutes", code="bench-input-invalid")
        return sorted(rows, key=repr)


def _require_equal(stream: StreamName, found: Mapping[str, list[tuple[Any, ...]]]) -> None:
    ours, plain = found[OURS], found[PLAIN]
    if ours != plain:
        differing = next(iter(set(ours) ^ set(plain)), None)
        raise FleetError(
            f"the results of {stream} differ: {len(ours):,} rows and {len(plain):,}; for example {differing}",
            code="bench-differs",
        )
