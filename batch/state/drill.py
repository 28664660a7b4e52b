"""Drill: judge a recorded history in parts, with a state operation in between.

The verdicts must equal those of the same history judged without interruption.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from batch.common.progress import ReportProgress
from batch.state import snapshot
from batch.state.generation import await_termination
from batch.state.operations import StateOperation, bootstrap, migrate, repartition, rescale, rollback
from fleetpulse.columnar.codec.versions import STORED_FORM, WRITTEN_FORMS
from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.generations import Generation, Generations, save_generations
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import KEY_GROUPS, Home
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import find_snapshot

_PARTITIONS: Final = 4
_MORE_PARTITIONS: Final = 7
_OTHER_GROUPS: Final = 13
_FORM: Final = min(WRITTEN_FORMS)


@dataclass(frozen=True, slots=True)
class Step:
    """One state operation between two parts of the history."""

    name: str
    act: Callable[[StateOperation], object]


STEPS: Final = (
    Step("snapshot", lambda work: snapshot.take(work.spark, work.home, None, work.report)),
    Step(f"migrate from stored form {_FORM} to {STORED_FORM}", migrate),
    Step(f"repartition {_PARTITIONS} to {_MORE_PARTITIONS}", lambda work: repartition(work, _MORE_PARTITIONS)),
    Step(f"rescale {KEY_GROUPS} to {_OTHER_GROUPS} key groups", lambda work: rescale(work, _OTHER_GROUPS)),
    Step("roll back", rollback),
    Step("bootstrap from the snapshot", lambda work: bootstrap(work, find_snapshot(work.home))),
)


def run_drill(spark: SparkSession, home: Home, undisturbed: Home, report: ReportProgress) -> None:
    """Judge the history of another home in parts, with state operations in between.

    Args:
        spark: Spark session.
        home: new home, in which the drill runs.
        undisturbed: home whose bronze is judged.
        report: callback for progress lines.

    Raises:
        FleetError: the history is too short, or a step is refused.
    """
    parts = len(STEPS) + 1
    landings = cut(_files(undisturbed), parts)
    if len(landings) < parts:
        raise FleetError(
            f"a drill needs a recording of at least {parts} messages; got {len(landings)}; use a longer one",
            code="recording-too-short",
        )
    home.lifecycle.mkdir(parents=True, exist_ok=True)
    save_generations(home.lifecycle, Generations(1, {1: Generation.first(KEY_GROUPS, _FORM)}))
    tables.create(home, MESSAGES)
    spark.conf.set("spark.sql.shuffle.partitions", _PARTITIONS)
    edges = [len(landings) * part // parts for part in range(parts + 1)]
    work = StateOperation(spark, home, report)
    for number, (first, end) in enumerate(pairwise(edges), 1):
        report(f"part {number} of {parts}: {end - first} batches of landing")
        _land(home, landings[first:end], first)
        await_termination(start(spark, home, None), partial(_report_position, report, number, end + 1))
        if number <= len(STEPS):
            step = STEPS[number - 1]
            report(f"step {number} of {len(STEPS)}: {step.name}")
            with home.state_held("fleet drill"):
                step.act(work)


def _report_position(report: ReportProgress, part: int, versions: int, version: int) -> None:
    report(f"part {part}: bronze is judged up to version {version} of {versions}")


@dataclass(frozen=True, slots=True)
class Landing:
    """Rows that one commit appends to bronze: a slice of a file.

    Attributes:
        path: path of the source file.
        begin: index of the first row.
        end: index after the last row.
    """

    path: Path
    begin: int
    end: int


def cut(files: Sequence[Path], parts: int) -> list[Landing]:
    """Divide the rows of bronze files, in order, into at least `parts` commits.

    There are fewer only if there are fewer rows. Files are divided, as the number of commits of a
    recording depends on the speed of its landing. A commit may start at any row: no two rows have
    the same instant.
    """
    rows = {path: pq.read_metadata(path).num_rows for path in files}
    most = max(1, sum(rows.values()) // parts)
    return [Landing(path, first, min(first + most, count)) for path, count in rows.items() for first in range(0, count, most)]


def _files(home: Home) -> list[Path]:
    log = DeltaLog(home.table(MESSAGES.name))
    return [Path(path) for version in range(log.latest() + 1) for path, _ in log.appended(version)]


def _land(home: Home, landings: Sequence[Landing], before: int) -> None:
    for number, one in enumerate(landings, before + 1):
        rows = pq.ParquetFile(one.path).read().slice(one.begin, one.end - one.begin)
        tables.append(home, MESSAGES, rows, "drill", number)
