"""Benchmark of state operations, relative to a plain Spark copy of a snapshot.

Run it by ``./fleet bench state``.

Rule 1: all measurements use one warm session; CPU is that of the whole process tree, the JVM and
the Python workers.
Rule 2: the reference cost is that of reading a snapshot and writing it as plain Delta. It is
measured before each operation, and the median counts.
Rule 3: the checks at the end of an operation are part of its cost.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from pyspark.sql import SparkSession

from batch.common.spark_session import batch_session
from batch.state import snapshot
from batch.state.generation import await_termination
from batch.state.operations import StateOperation, bootstrap, migrate, repartition, rollback
from bench.lifecycle.contenders import key_groups
from bench.lifecycle.generate import LATENESS_MS, Fleet, prepare
from bench.measure import Meter, size_bytes
from fleetpulse.columnar.codec.versions import WRITTEN_FORMS
from fleetpulse.core.errors import FleetError
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, MESSAGES
from fleetpulse.io.checkpoints.checkpoint import position_after
from fleetpulse.io.checkpoints.generations import Generation, Generations, save_generations
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.lifecycle.state_reader import overview
from fleetpulse.io.spark.session import SparkResources
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import find_snapshot, snapshots

BAR: Final = 3.0  # limit of an operation, in multiples of the reference cost
BYTES_BAR: Final = 64  # limit of the state's bytes per device, without pending rows
_DEVICES: Final = 1_000_000
_QUICK: Final = 100_000
_MESSAGES: Final = 2
_BATCHES: Final = 2
_JUDGED: Final = 0.95  # least share of the fleet in the state at the end; all messages of the others are pending


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one run of an operation."""

    wall_s: float
    cpu_s: float
    peak_mb: float


def bench_state(*, quick: bool, report: Callable[[str], None]) -> Iterable[dict[str, Any]]:
    """Measure each operation; yield a row with its absolute and relative cost.

    Args:
        quick: whether to use 100,000 devices instead of 1,000,000.
        report: callback for progress lines.

    Raises:
        FleetError: an operation failed, or the state lacks devices.
    """
    devices = _QUICK if quick else _DEVICES
    place = Path(tempfile.mkdtemp(prefix="fleet-bench-state-"))
    try:
        home = _judged(Home(place / "home"), devices, report)
        with batch_session(home, SparkResources(memory="4g")) as spark, Meter() as meter:
            yield from _measured(spark, home, devices, meter, report)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _judged(home: Home, devices: int, report: Callable[[str], None]) -> Home:
    """Make a home with a generated history, to be judged by the session."""
    report(f"generating {devices:,} devices")
    source = prepare(Fleet(devices, _MESSAGES, _BATCHES))
    home.prepare(Deployment(LATENESS_MS))
    home.lifecycle.mkdir(parents=True, exist_ok=True)
    save_generations(home.lifecycle, Generations(1, {1: Generation.first(key_groups(devices))}))
    shutil.copytree(source.path, home.table(MESSAGES.name))
    return home


def _measured(
    spark: SparkSession, home: Home, devices: int, meter: Meter, report: Callable[[str], None]
) -> Iterable[dict[str, Any]]:
    report("judging the history")
    await_termination(start(spark, home, None))
    work = StateOperation(spark, home, report)
    yield _size(spark, home)
    taken_snapshot = snapshot.take(spark, home, None, report)
    if taken_snapshot.devices < devices * _JUDGED:
        raise FleetError(f"only {taken_snapshot.devices:,} of {devices:,} devices are in the state", code="bench-devices-missing")
    _plain(spark, home)  # warm-up
    verbs: dict[str, Callable[[], object]] = {
        "snapshot": lambda: snapshot.take(spark, home, None, report),
        "bootstrap": lambda: bootstrap(work, find_snapshot(home)),
        "migrate": lambda: migrate(work, next(form for form in WRITTEN_FORMS if form != home.generation().form)),
        "repartition": lambda: repartition(work, position_after(home.checkpoint).partitions + 1),
        "rollback": lambda: rollback(work, home.generation().number - 1),
    }
    yardsticks: list[Cost] = []
    costs: dict[str, list[Cost]] = {name: [] for name in verbs}
    for _ in range(2):  # the first round is warm-up
        for name, verb in verbs.items():
            yardsticks.append(_cost(meter, lambda: _plain(spark, home)))
            costs[name].append(_cost(meter, verb))
    unit = median(cost.cpu_s for cost in yardsticks[len(verbs) :])
    rows = snapshots(home)[0]
    yield {"what": "read and written by plain Spark", "devices": rows.devices, "cpu_s": round(unit, 2),
           "wall_s": round(median(cost.wall_s for cost in yardsticks[len(verbs) :]), 2), "times": 1.0, "bar": None}  # fmt: skip
    for name, (_, warm) in costs.items():
        yield {
            "what": name,
            "devices": rows.devices,
            "cpu_s": round(warm.cpu_s, 2),
            "wall_s": round(warm.wall_s, 2),
            "times": round(warm.cpu_s / unit, 2),
            "bar": BAR if name != "rollback" else None,
            "peak_mb": round(warm.peak_mb),
            "checkpoint_mb": round(size_bytes(home.checkpoint) / 1e6, 1),
        }


def _size(spark: SparkSession, home: Home) -> dict[str, Any]:
    """Return the size of the state without pending rows, and of the checkpoint."""
    groups = overview(spark, home.checkpoint, position_after(home.checkpoint).batch)
    devices = sum(group.devices for group in groups)
    return {
        "what": "the state",
        "devices": devices,
        "bytes_a_device": round(sum(group.block_bytes for group in groups) / devices, 1),
        "bar": BYTES_BAR,
        "checkpoint_mb": round(size_bytes(home.checkpoint) / 1e6, 1),
    }


def require_few_bytes(rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that the state has at most `BYTES_BAR` bytes per device.

    The size follows from the input alone, so unlike a cost it can be checked anywhere.

    Raises:
        FleetError: the state is larger.
    """
    for row in rows:
        size = row.get("bytes_a_device", 0)
        if size > BYTES_BAR:
            raise FleetError(
                f"the state may have at most {BYTES_BAR} bytes per device; got {size}; see fleetpulse/columnar/state/codec.py",
                code="state-too-large",
            )


def _plain(spark: SparkSession, home: Home) -> None:
    """Copy a snapshot with plain Spark: the reference cost."""
    version = tables.version(home.table(DEVICE_SNAPSHOTS.name))
    rows = spark.read.format("delta").option("versionAsOf", version).load(str(home.table(DEVICE_SNAPSHOTS.name)))
    rows.write.format("delta").mode("overwrite").partitionBy("part").save(str(home.path / "plain"))


def _cost(meter: Meter, act: Callable[[], object]) -> Cost:
    before = meter.read()
    meter.peak_bytes()  # resets the peak
    act()
    after = meter.read()
    return Cost(after.wall_s - before.wall_s, after.cpu_s - before.cpu_s, meter.peak_bytes() / 1e6)
