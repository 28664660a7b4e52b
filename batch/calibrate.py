"""Calibration: measure the cost of a device and of a message on this machine.

It takes about a minute.

Rule 1: bytes are those of real key groups, and of files written by landing and compaction; none are
estimated.
Rule 2: only the CPU time of the fold is measured; the share of the JVM is scaled by it, see
`Figures.message_us`.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pyarrow as pa
from deltalake import write_deltalake

from fleetpulse.columnar.codec.arrow import KINDS, SIGNAL_SCHEMA
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.fold.key_group import FoldResult, KeyGroup, begin
from fleetpulse.columnar.snapshot.rows import snapshot_rows
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Kind, hash64
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, JUDGEMENTS, MESSAGES, STREAM_HEALTH
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance import compaction
from fleetpulse.io.maintenance.readers import ReaderPin
from fleetpulse.io.tables import tables
from fleetpulse.planning.model import Figures, Fleet, Parquet, group_bytes

START_MS: Final = 1_700_006_400_000  # some hours after midnight
DEPLOYMENT: Final = Deployment(30_000)
FILE: Final = "planning.json"
REFERENCE_FOLD_US: Final = 0.85  # `fold_cpu_us` on the two cores of docs/reference/benchmarks.md, which were busy
_CALLS: Final = 24
_CALL_MS: Final = 600_000
_SILENT_CALLS: Final = range(4, 14)  # intervals of silence, longer than the default timeout
_SILENT_SHARE: Final = 0.5
_METRICS: Final = 36
_SIZES: Final = ((500, 200), (2_000, 4_000), (10_000, 500), (20_000, 20_000))  # rows and devices of a file


def calibrate(report: Callable[[str], None]) -> Figures:
    """Measure the cost figures of this machine.

    Args:
        report: callback that receives the name of each measurement at its start.
    """
    report("key groups")
    figures = _of_groups(Figures())
    with TemporaryDirectory() as folder:
        home = Home(Path(folder) / "home")
        home.prepare(DEPLOYMENT)
        report("bronze")
        figures = _of_bronze(figures, home)
        report("judgements")
        figures = replace(figures, judgements=_of_judgements(home), health_bytes=_of_health(home))
        report("snapshots")
        figures = _of_snapshots(figures, Path(folder))
    report("the fold")
    slower = max(0.5, fold_cpu_us() / REFERENCE_FOLD_US)
    scaled = {name: getattr(figures, name) * slower for name in ("message_us", "touched_us", "batch_s", "ingest_us")}
    return replace(figures, source="this machine, by: fleet plan --calibrate", **scaled)


def save(figures: Figures, cache: Path) -> None:
    """Write figures to the cache folder."""
    cache.mkdir(parents=True, exist_ok=True)
    fresh = cache / f"{FILE}.new"
    fresh.write_text(json.dumps(asdict(figures), indent=1))
    fresh.replace(cache / FILE)


def load(cache: Path) -> Figures:
    """Read the figures in the cache folder; return the defaults if there are none.

    Raises:
        FleetError: the file cannot be read.
    """
    path = cache / FILE
    if not path.exists():
        return Figures()
    try:
        content: Mapping[str, Any] = json.loads(path.read_text())
        read: dict[str, Any] = {name: Parquet(**one) if isinstance(one, dict) else one for name, one in content.items()}
        return Figures(**read)
    except (OSError, ValueError, TypeError) as error:
        raise FleetError(
            f'"{path}" cannot be read ({error}); measure again: fleet plan --calibrate', code="calibration-unreadable"
        ) from None


def signals(devices: int, call: int, errors: float, silent_share: float = 0.0, seed: int = 1) -> pa.RecordBatch:
    """Generate one signal of each device in ten minutes, in order of arrival.

    Args:
        devices: number of devices.
        call: number of the ten-minute interval.
        errors: share of errors among the signals.
        silent_share: share of the devices that are silent for longer than the timeout, and return later.
        seed: seed of the generator; the same seed gives the same signals.
    """
    rng = np.random.default_rng([seed, call])
    at_ms = _end_ms(call - 1) + np.sort(rng.integers(0, _CALL_MS, devices))
    error = rng.random(devices) < errors
    kinds = np.where(error, KINDS.index(Kind.ERROR), KINDS.index(Kind.HEARTBEAT)).astype(np.int8)
    codes = pa.array([f"E{number:02d}" for number in range(20)])
    columns: dict[str, Any] = {
        "device_id": pa.array([f"sensor-{number:08d}" for number in rng.permutation(devices).tolist()]),
        "site": pa.array(["main"] * devices),
        "received_at_ms": pa.array(at_ms),
        "position": pa.array(np.zeros(devices, np.int64)),
        "presence_ms": pa.array(at_ms - rng.integers(20, 900, devices)),
        "offset_ms": pa.array(np.zeros(devices, np.int64)),
        "trust": pa.array(np.zeros(devices, np.int8)),
        "kind": pa.array(kinds),
        "device_clock": pa.array(np.ones(devices, bool)),
        "boot": pa.array(["b1"] * devices),
        "session": pa.nulls(devices, pa.string()),
        "seq": pa.array(np.full(devices, call, np.int64)),
        "firmware": pa.nulls(devices, pa.string()),
        "code": codes.take(pa.array(rng.integers(0, 20, devices), mask=~error)),
        "gateway": pa.array([f"gw-{number % 20}" for number in range(devices)]),
        "digest": pa.array(np.zeros(devices, np.int64)),
    }
    batch = pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in SIGNAL_SCHEMA], schema=SIGNAL_SCHEMA)
    if call not in _SILENT_CALLS or not silent_share:
        return batch
    number = np.array([int(name[-8:]) for name in batch["device_id"].to_pylist()])
    return batch.filter(pa.array(number * 7919 % 1_000 >= 1_000 * silent_share))


def _end_ms(call: int) -> int:
    return START_MS + (call + 1) * _CALL_MS


def sample_key_group(devices: int, calls: int, errors: float, silent_share: float) -> tuple[KeyGroup, FoldResult]:
    """Return a key group after some calls of `signals`, and its last fold result."""
    group, chunks = begin(START_MS), dict[int, bytes]()
    step = None
    for call in range(calls):
        step = group.fold(signals(devices, call, errors, silent_share), [], _end_ms(call), DEPLOYMENT, chunks.__getitem__)
        chunks |= dict(step.chunks)
        for number in step.deleted_chunks:
            del chunks[number]
    assert step is not None, "there is at least one interval"
    return group, step


def _of_groups(figures: Figures) -> Figures:
    """Fit the bytes of a key group, a device, its mode changes and its errors."""
    small, large, changed = (_block_bytes(*shape) for shape in ((1_000, 0, 0), (8_000, 0, 0), (8_000, 0, _SILENT_SHARE)))
    device = (large - small) / 7_000
    alone = replace(
        figures,
        device_bytes=device,
        group_bytes=small - 1_000 * device,
        changed_bytes=(changed - large) / (8_000 * _SILENT_SHARE),
        remembered_bytes=0.0,
        code_bytes=0.0,
    )

    def predicted(errors: float, **one: float) -> float:
        return group_bytes(
            4_000, _CALLS - 1, 0, Fleet(4_000, error_share=errors), replace(alone, **one)
        )  # the last signal is pending

    shares = (0.02, 0.1, 0.5)
    rest = [_block_bytes(4_000, errors, 0) - predicted(errors) for errors in shares]
    terms = [
        [predicted(errors, **{name: 1.0}) - predicted(errors) for name in ("remembered_bytes", "code_bytes")] for errors in shares
    ]
    remembered, code = np.linalg.lstsq(np.array(terms), np.array(rest), rcond=None)[0].tolist()
    group, step = sample_key_group(8_000, 2, 0, 0)
    waiting = sum(len(rows) for _, rows in step.chunks) / sum(map(len, group.waiting))
    return replace(alone, remembered_bytes=remembered, code_bytes=code, waiting_bytes=waiting)


def _block_bytes(devices: int, errors: float, silent_share: float) -> int:
    return len(sample_key_group(devices, _CALLS, errors, silent_share)[0].to_bytes())


def bronze(rows: int, devices: int, number: int, *, metrics: bool = False) -> pa.Table:
    """Generate messages as landing writes them, from equally likely devices.

    Args:
        rows: number of messages.
        devices: number of devices.
        number: number of the segment.
        metrics: whether each message has two metrics, of 36 bytes together.
    """
    rng = np.random.default_rng([number, rows])
    drawn = rng.integers(0, devices, rows)
    names = np.unique(drawn)
    place = np.searchsorted(names, drawn)
    ids = pa.array([f"sensor-{one:08d}" for one in names.tolist()])
    hashes = np.array([hash64(f"sensor-{one:08d}") for one in names.tolist()], np.int64)
    at_ms = START_MS + number * 20_000 + np.sort(rng.integers(0, 20_000, rows))
    constants = {"kind": "heartbeat", "site": "main", "clock": "device", "boot": "b1", "origin": "mqtt", "bridge": "bridge-1"}
    columns: dict[str, Any] = {name: pa.array([value] * rows) for name, value in constants.items()}
    columns |= {
        "received_at_ms": pa.array(at_ms),
        "event_time_ms": pa.array(at_ms - rng.integers(20, 900, rows)),
        "device_id": ids.take(pa.array(place)),
        "device_hash": pa.array(hashes[place]),
        "gateway": pa.array([f"gw-{one % 20}" for one in drawn.tolist()]),
        "seq": pa.array(rng.integers(1, 5_000, rows)),
        "digest": pa.array(rng.integers(-(2**62), 2**62, rows)),
        "segment": pa.array(np.full(rows, number)),
    }
    if metrics:
        measured = zip(rng.integers(3_300, 4_100, rows).tolist(), (rng.integers(120, 300, rows) / 10).tolist(), strict=True)
        columns["metrics"] = pa.array([f'{{"temperature":{degrees:04.1f},"battery":{volt}}}' for volt, degrees in measured])
    return tables.from_columns(MESSAGES, columns, rows)


def _of_bronze(figures: Figures, home: Home) -> Figures:
    tables.create(home, MESSAGES)
    number, found = 0, list[float]()
    for rows, devices in _SIZES:
        number += 1
        tables.append(home, MESSAGES, bronze(rows, devices, number), "calibrate", number)
        found.append(newest_file(home, MESSAGES.name))
    landed = _fit(_SIZES, found)
    number += 1
    tables.append(home, MESSAGES, bronze(20_000, 20_000, number, metrics=True), "calibrate", number)
    share = (newest_file(home, MESSAGES.name) - found[-1]) / (20_000 * _METRICS)
    sizes = ((12_000, 2_000), (60_000, 60_000), (120_000, 5_000))
    pieces = [piece_bytes(Home(home.path / f"piece-{rows}"), rows, devices) for rows, devices in sizes]
    return replace(figures, landed=landed, piece=_fit(sizes, pieces), metrics_bytes=max(0.0, share))


def piece_bytes(home: Home, rows: int, devices: int, versions: int = 12) -> float:
    """Return the bytes of a compacted piece.

    Args:
        home: new home, in which the piece is made.
        rows: number of rows of the piece.
        devices: number of devices.
        versions: number of versions that are compacted.
    """
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    for number in range(1, versions + 1):
        tables.append(home, MESSAGES, bronze(rows // versions, devices, number), "calibrate", number)
    planned = compaction.plan(
        home.table(MESSAGES.name), [ReaderPin("calibration", versions + 1, by_version=True)], None, START_MS
    )
    assert planned is not None, "there are rows"
    assert len(planned.merges) == 1, "all rows are of one day"
    part = compaction.compact(home.table(MESSAGES.name), planned.merges[0])
    assert part is not None, "there is no other writer"
    return part.size_bytes


def newest_file(home: Home, table: str) -> float:
    """Return the bytes of the newest file of a table."""
    return max(home.table(table).rglob("*.parquet"), key=lambda path: path.stat().st_mtime_ns).stat().st_size


def _fit(sizes: tuple[tuple[int, int], ...], found: list[float]) -> Parquet:
    def term(**one: float) -> list[float]:
        return [Parquet(**{"file_bytes": 0, "row_bytes": 0, **one}).size(rows, devices) for rows, devices in sizes]

    terms = np.array([term(file_bytes=1), term(row_bytes=1), term(device_bytes=1)]).T
    weights = 1 / np.array(found)  # minimise relative errors
    solved = np.linalg.lstsq(terms * weights[:, None], np.array(found) * weights, rcond=None)[0].tolist()
    return Parquet(*(max(0.0, value) for value in solved))


def transitions(devices: int) -> pa.Table:
    """Return the stored transitions of a fleet in which most devices fall silent and return later."""
    calls = (_SILENT_CALLS.start + 5, _SILENT_CALLS.start + 6, _SILENT_CALLS.start + 7, _SILENT_CALLS.stop + 1)
    judgements = pa.concat_tables(
        [pa.Table.from_batches([sample_key_group(devices, call, 0, 0.9)[1].judgements]) for call in calls]
    )
    changes = judgements.filter(pc.equal(judgements["kind"], JudgementKind.TRANSITION.value))
    columns: dict[str, Any] = {name: changes[name] for name in changes.schema.names}
    columns["judged_at_ms"] = pa.array(np.full(changes.num_rows, _end_ms(_SILENT_CALLS.stop)))
    columns["generation"] = pa.array(np.ones(changes.num_rows, np.int32))
    return tables.from_columns(JUDGEMENTS, columns, changes.num_rows)


def _of_judgements(home: Home) -> Parquet:
    tables.create(home, JUDGEMENTS)
    sizes, found = list[int](), list[float]()
    for number, devices in enumerate((200, 2_000, 8_000), 1):
        rows = transitions(devices)
        tables.append(home, JUDGEMENTS, rows, "calibrate", number)
        sizes.append(rows.num_rows)
        found.append(newest_file(home, JUDGEMENTS.name))
    slope, constant = np.polyfit(sizes, found, 1, w=1 / np.array(found)).tolist()
    return Parquet(max(0.0, constant), slope)


def snapshot_files(folder: Path, devices: int, silent_share: float = 0.1) -> tuple[dict[str, int], dict[str, int]]:
    """Write a snapshot to a folder; return its rows and bytes by part.

    The parts are ``device``, ``signal`` and ``group``.
    """
    group, step = sample_key_group(devices, _CALLS, 0.01, silent_share)
    rows = pa.Table.from_batches(snapshot_rows(0, group.to_bytes(), dict(step.chunks), _end_ms(_CALLS - 1), DEPLOYMENT))
    names = [column.name for column in DEVICE_SNAPSHOTS.columns]
    write_deltalake(str(folder), rows.select(names), partition_by=list(DEVICE_SNAPSHOTS.partitioned_by))
    sizes = {path.parent.name.partition("=")[2]: path.stat().st_size for path in folder.rglob("*.parquet")}
    return {part: pc.sum(pc.equal(rows["part"], part)).as_py() for part in sizes}, sizes


def _of_snapshots(figures: Figures, folder: Path) -> Figures:
    (few, small), (many, large) = (snapshot_files(folder / f"snapshot-{size}", size) for size in (1_000, 8_000))
    each = {part: (large[part] - small[part]) / (many[part] - few[part]) for part in ("device", "signal")}
    whole = sum(small.values()) - sum(few[part] * size for part, size in each.items())
    return replace(figures, snapshot=Parquet(whole, each["device"]), snapshot_waiting_bytes=each["signal"])


def _of_health(home: Home) -> float:
    tables.create(home, STREAM_HEALTH)
    rng = np.random.default_rng(1)
    numbers = {"long": 10**6, "int": 8, "double": 10**4}
    rows = [
        {
            **{column.name: float(rng.integers(0, numbers[column.type])) if column.type == "double" else
               int(rng.integers(0, numbers[column.type])) for column in STREAM_HEALTH.columns if column.type in numbers},
            **{f"{column.name}_ms": START_MS + number * 1_000 for column in STREAM_HEALTH.columns if column.type == "timestamp"},
            "query_id": "q" * 36, "run_id": "r" * 36, "devices": f'{{"online": {8_000 + number}}}', "judgements": "{}",
            "source_offset": f'{{"version": {number}}}',
        }
        for number in range(1_000)
    ]  # fmt: skip
    tables.append(home, STREAM_HEALTH, tables.to_table(STREAM_HEALTH, rows), "calibrate", 1)
    return newest_file(home, STREAM_HEALTH.name) / len(rows)


def fold_cpu_us(devices: int = 8_000, calls: int = 12) -> float:
    """Return the median CPU time of a message in the fold, microseconds.

    Each device sends one message per call.
    """
    stored, chunks, costs = begin(START_MS).to_bytes(), dict[int, bytes](), list[float]()
    for call in range(calls):
        block = signals(devices, call, 0)
        began = time.process_time()
        group = KeyGroup.from_bytes(stored)
        step = group.fold(block, [], _end_ms(call), DEPLOYMENT, chunks.__getitem__)
        chunks |= dict(step.chunks)
        stored = group.to_bytes()
        costs.append((time.process_time() - began) / block.num_rows * 1e6)
        for number in step.deleted_chunks:
            del chunks[number]
    return float(np.median(costs[2:]))
