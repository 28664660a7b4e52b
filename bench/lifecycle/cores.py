"""Benchmark of the lifecycle job on different numbers of cores of this machine, and a model beyond.

Rule 1: a process may use only its number of cores, the JVM's own threads included.
Rule 2: rounds are interleaved: each runs every number of cores once, in alternating order. Figures
are medians of the measured rounds.
Rule 3: the results of all numbers of cores are compared row by row. If they differ, there are no
figures.
Rule 4: rows of the model are marked, see `bench.lifecycle.scaling_model`.
"""

import os
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from rich.console import Console

from bench.lifecycle.compare import NEEDED, difference, triggers
from bench.lifecycle.contenders import OURS, key_groups, named
from bench.lifecycle.generate import Fleet, Input, prepare
from bench.lifecycle.harness import DidNotFinish, Run, WarmProcess
from bench.lifecycle.plans import SIZES, SMALL_DEVICES, WARMING_LIMIT_S
from bench.lifecycle.scaling_model import CORES, ScalingModel, medians
from bench.peers.scala_jar import compiled
from cli.common.output import as_json, as_table, console
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.paths import cache_dir
from fleetpulse.planning.partition_skew import busiest

_FILES: Final = 16  # files of a batch: a task for each core
_TINY: Final = Fleet(2_000, 1, batches=12)  # its batches measure the fixed work of a batch
_LIMIT_S: Final = 600.0
_MEASURED, _MODEL = "measured", "model"
COLUMNS: Final = (
    "kind", "cores", "key_groups", "skew", "batch_ms", "driver_ms", "read_ms", "fold_ms", "messages_per_s", "speed_up",
    "cpu_s_per_million", "wall_s_per_million", "equal",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CoresPlan:
    """Plan of the benchmark.

    Attributes:
        cores: numbers of cores, ascending.
        fleet: fleet of the input; its first batch is not measured.
        rounds: number of measured rounds.
    """

    cores: tuple[int, ...]
    fleet: Fleet
    rounds: int


def cores_plan(text: str, devices: int | None = None, *, small: bool = False, available: int | None = None) -> CoresPlan:
    """Return the plan for numbers of cores.

    Args:
        text: numbers of cores, separated by commas.
        devices: number of devices; None takes the default.
        small: whether to measure small batches, to check that the results are equal.
        available: cores of this machine; None takes those that this process may use.

    Raises:
        Misuse: the numbers are invalid, or greater than the number of cores of this machine.
    """
    most = usable_cores() if available is None else available
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise Misuse(
            f'--cores needs numbers from 1 to {most}, the cores of this machine; got "{text}"; write them like 1,{most}',
            code="bench-cores-invalid",
        )
    count = devices or (SMALL_DEVICES if small else SIZES[0])
    messages = 6 if small else max(2, 1_200_000 // count)
    return CoresPlan(
        tuple(sorted({int(part) for part in parts})), Fleet(count, messages, batches=4, files=_FILES), 3 if small else 5
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bench_cores(plan: CoresPlan, *, json_lines: bool) -> None:
    """Run the benchmark, and print the measured rows and those of the model.

    Raises:
        FleetError: results differ, or a run failed or exceeded its time limit.
    """
    shown = Console(stderr=True)
    runs, tiny = _measure(plan, shown)
    rows = measured_rows(plan.fleet, runs)
    rows += model_rows(model_of(plan.fleet, runs, tiny))
    if json_lines:
        as_json(rows)
        return
    for kind, title in ((_MEASURED, "measured on this machine"), (_MODEL, "model, not measured")):
        console().print(as_table([_for_people(row) for row in rows if row["kind"] == kind], COLUMNS[1:], title))
    console().print("\n".join(explanation(model_of(plan.fleet, runs, tiny))), highlight=False, soft_wrap=True)


Runs = dict[int, list[Run]]


def _measure(plan: CoresPlan, shown: Console) -> tuple[Runs, Runs]:
    """Return the measured runs by number of cores, over the input and over very small batches."""
    work = cache_dir().resolve() / "bench" / f"work-{os.getpid()}"
    running: dict[int, WarmProcess] = {}
    runs: Runs = {cores: [] for cores in plan.cores}
    tiny: Runs = {cores: [] for cores in plan.cores}
    try:
        with shown.status("generating inputs and warming up") if shown.is_terminal else nullcontext():
            sources = prepare(plan.fleet), prepare(_TINY)
            compiled()
            for cores in plan.cores:
                running[cores] = WarmProcess(named(OURS, cores), work / str(cores), _LIMIT_S)
                _run(running[cores], sources[1], "warming", WARMING_LIMIT_S)
        for number in range(plan.rounds + 1):
            found: dict[str, Run] = {}
            for cores in plan.cores if number % 2 else reversed(plan.cores):
                run = found[named(OURS, cores)] = _run(running[cores], sources[0], f"round{number}")
                fixed = _run(running[cores], sources[1], f"tiny{number}")
                if number:
                    runs[cores].append(run)
                    tiny[cores].append(fixed)
                shutil.rmtree(fixed.out.parent, ignore_errors=True)
                shown.print(round_line(cores, number, plan.rounds, run), highlight=False, soft_wrap=True)
            _require_equal(found, sources[0], number)
            for run in found.values():
                shutil.rmtree(run.out.parent, ignore_errors=True)
    finally:
        for warm in running.values():
            warm.end()
        shutil.rmtree(work, ignore_errors=True)
    return runs, tiny


def _run(warm: WarmProcess, source: Input, label: str, limit_s: float = _LIMIT_S) -> Run:
    try:
        return warm.run(source, label, limit_s)
    except DidNotFinish:
        raise FleetError(f"{warm.name} did not finish in {limit_s:.0f} s", code="contender-unfinished") from None


def round_line(cores: int, number: int, last: int, run: Run) -> str:
    """Format the result of a run, printed immediately in case of interruption."""
    warm = "" if number else " (warm-up)"
    rates = f"{run.messages / run.wall_s:,.0f} messages a second, {run.messages / run.cpu_s:,.0f} a CPU second"
    return f"round {number} of {last}{warm}, cores: {cores}: {rates}"


def _require_equal(found: dict[str, Run], source: Input, number: int) -> None:
    if differences := difference({name: run.out for name, run in found.items()}, source.judged_to_ms):
        raise FleetError(
            f"the results differ by the number of cores in round {number} over {source.fleet}\n{differences}",
            code="contenders-differ",
        )
    name, run = next(iter(found.items()))
    if absent := NEEDED - triggers(name, run.out, source.judged_to_ms):
        raise FleetError(
            f"no transition by {', '.join(sorted(absent))} was compared over {source.fleet}; use more devices",
            code="contenders-compare-nothing",
        )


def measured_rows(fleet: Fleet, runs: Runs) -> list[dict[str, Any]]:
    """Return a row for each number of cores, with medians over its runs."""
    rows: list[dict[str, Any]] = []
    first = min(runs)
    for cores, own in sorted(runs.items()):
        parts = medians([batch for run in own for batch in run.parts])
        per_s = median(run.messages / run.wall_s for run in own)
        row = _row(_MEASURED, fleet.devices, cores, per_s, per_s / median(run.messages / run.wall_s for run in runs[first]))
        row |= {"batch_ms": round(parts.batch_ms), "driver_ms": round(parts.driver_ms)}
        row |= {"read_ms": round(parts.read_ms), "fold_ms": round(parts.fold_ms)}
        row["cpu_s_per_million"] = round(median(run.cpu_s / run.messages for run in own) * 1e6, 3)
        row["equal"] = True if len(runs) > 1 else None
        rows.append(row)
    return rows


def model_of(fleet: Fleet, runs: Runs, tiny: Runs) -> ScalingModel:
    """Return the model of the greatest measured number of cores."""
    cores = max(runs)
    messages = round(median(run.messages / len(run.parts) for run in runs[cores]))
    batches, small = ([batch for run in one[cores] for batch in run.parts] for one in (runs, tiny))
    return ScalingModel.measured(fleet.devices, messages, cores, batches, small)


def model_rows(model: ScalingModel) -> list[dict[str, Any]]:
    """Return a row of the model for one core, the measured number and each of `CORES`."""
    rows: list[dict[str, Any]] = []
    for cores in sorted({1, model.cores, *CORES}):
        batch_ms = model.batch_ms(cores)
        row = _row(_MODEL, model.devices, cores, model.messages * 1000 / batch_ms, model.batch_ms(1) / batch_ms)
        row |= {"batch_ms": round(batch_ms), "driver_ms": round(model.parts.driver_ms)}
        row |= {"read_ms": round(model.read_ms(cores)), "fold_ms": round(model.fold_ms(cores))}
        rows.append(row)
    return rows


def _row(kind: str, devices: int, cores: int, per_s: float, speed_up: float) -> dict[str, Any]:
    groups = key_groups(devices, cores)
    row: dict[str, Any] = {**dict.fromkeys(COLUMNS), "kind": kind, "cores": cores, "key_groups": groups}
    row |= {"skew": round(busiest(groups, cores), 2), "messages_per_s": round(per_s), "speed_up": round(speed_up, 2)}
    return {**row, "wall_s_per_million": round(1e6 / per_s, 3)}


def explanation(model: ScalingModel) -> list[str]:
    """Describe the model and its measured parts."""
    parts = model.parts
    return [
        f"The model takes batches of {model.messages:,} messages, and their parts on {model.cores} cores of this machine:",
        f"  serial, {parts.driver_ms:.0f} ms: planning {parts.planning_ms:.0f}, logs of the checkpoint {parts.logs_ms:.0f}, "
        f"commit of the judgements and the rest of the driver {parts.sink_ms:.0f}",
        f"  fixed for a task: {model.read_task_ms:.0f} ms (reading), {model.fold_task_ms:.0f} ms (folding)",
        f"  divided by the cores: {parts.read_run_ms:.0f} ms (reading), {parts.fold_run_ms:.0f} ms (folding, times the skew)",
        f"No number of cores exceeds {model.limit:.1f} times one core with batches of this size; larger batches have a higher "
        "limit. The model leaves out memory bandwidth and the driver's work for more tasks.",
    ]


def _for_people(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value for name, value in row.items()
    }
