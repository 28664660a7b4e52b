"""Benchmark of the lifecycle job against its peers, with comparison of results.

Rule 1: a figure is the median of the measured rounds. Warm-up rounds before are compared, but not
measured.
Rule 2: if results of contenders differ, the benchmark fails and shows no figures.
Rule 3: a contender that is unavailable, fails or exceeds its time limit gets a row with the reason,
and the others continue. A failure of this job or the reference ends the benchmark.
Rule 4: contender, fleet size and active share identify a row.
Rule 5: nothing else runs during a measured run. Before the rounds, contenders warm up two at a time.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console

from bench.lifecycle import plans
from bench.lifecycle.compare import NEEDED, difference, triggers
from bench.lifecycle.contenders import OURS, REFERENCE
from bench.lifecycle.generate import Input, prepare
from bench.lifecycle.harness import Crashed, DidNotFinish, Run, WarmProcess
from bench.lifecycle.plans import Plan, Workload
from bench.lifecycle.schedule import Schedule
from bench.peers import flink
from bench.peers.scala_jar import compiled
from cli.common.output import as_table, console
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.paths import cache_dir

_WARM_AT_ONCE = 2
COLUMNS = (
    "contender",
    "devices",
    "active",
    "messages_per_cpu_s",
    "messages_per_s",
    "batch_p50_ms",
    "batch_p95_ms",
    "checkpoint_bytes_per_device",
    "peak_rss_mb",
    "ratio",
    "equal",
)
NOTE = "note"  # additional column of the table, and of JSON if it is not empty


def bench_lifecycle(
    plan: str, *, json_lines: bool, only: Sequence[str] = (), devices: Sequence[int] = (), rows: int | None = None
) -> None:
    """Run the benchmark, and print the results.

    Args:
        plan: name of the plan, one of `plans.PLANS`.
        json_lines: whether to print one JSON object a line instead of a table.
        only: contenders to run; empty runs all of the plan.
        devices: fleet sizes, for plans without fixed sizes; empty takes those of the plan.
        rows: messages of a batch, for the flat plan.

    Raises:
        FleetError: results differ, or this job or the reference failed.
        Misuse: a contender is unknown, or the plan has fixed sizes or batches.
    """
    if unknown := [name for name in only if name not in plans.ALL]:
        raise Misuse(f'"{unknown[0]}" is no contender; name one of {", ".join(plans.ALL)}', code="contender-unknown")
    chosen = plans.planned(plan, devices, rows)
    found = run_plan(chosen.restricted(only) if only else chosen, Console(stderr=True))
    shown = [row for row in found if row["shown"]]
    if json_lines:
        for row in shown:
            sys.stdout.write(json_line(row) + "\n")
    else:
        console().print(as_table([_for_people(row) for row in shown], (*COLUMNS, NOTE), "lifecycle"))
    if summary := cost_by_size(found) if plan == plans.FLAT else python_ratios(found):
        (Console(stderr=True) if json_lines else console()).print("\n".join(summary), highlight=False, soft_wrap=True)


def json_line(row: dict[str, Any]) -> str:
    """Return a row as JSON: all columns, and the note if there is one."""
    return json.dumps({name: row[name] for name in (*COLUMNS, NOTE) if name != NOTE or row[NOTE]})


def run_plan(plan: Plan, shown: Console) -> list[dict[str, Any]]:
    """Run a plan, and return a row for each contender of each workload.

    The entry ``shown`` of a row is whether to print it.

    Args:
        plan: the plan.
        shown: console for status and progress.
    """
    pace = Schedule(plan)
    work = cache_dir().resolve() / "bench" / f"work-{os.getpid()}"
    running: dict[str, WarmProcess] = {}
    runs: dict[tuple[int, str], list[Run]] = {}
    notes: dict[tuple[int, str], str] = {}
    compared: set[int] = set()
    try:
        with _status(shown, "generating inputs and warming up contenders"):
            absent = _warm_up(plan, work, running)
        for name, why in absent.items():
            shown.print(f"{name}: {why}", highlight=False, markup=False, soft_wrap=True)
        notes |= {
            (place, name): why.partition("\n")[0]
            for place, workload in enumerate(plan.workloads)
            for name, why in absent.items()
            if name in workload.contenders
        }
        last = plan.rounds[-1]
        for step in pace.steps():
            number, place, workload = step.number, step.place, step.workload
            with _status(shown, f"round {number} of {last}: {workload.fleet.devices:,} devices"):
                source = prepare(workload.fleet)
                found = _round(workload, source, number, (plan, work, running, {n for p, n in notes if p == place}))
            outcome = {name: run for name, run in found.items() if isinstance(run, Run)}
            notes |= {(place, name): why.partition("\n")[0] for name, why in found.items() if isinstance(why, str)}
            _require_equal(outcome, source, number)
            shown.print(round_line(workload, number, last, found), highlight=False, markup=False, soft_wrap=True)
            compared |= {place} if len(outcome) > 1 else set()
            for name, run in outcome.items():
                if workload.counts_in(number, last):
                    runs.setdefault((place, name), []).append(run)
                shutil.rmtree(run.out.parent, ignore_errors=True)
        for step in pace.left_out:
            line = f"round {step.number} of {last}, {step.workload.fleet.devices:,} devices: left out, over the time budget"
            shown.print(line, highlight=False)
    finally:
        _end(running)
        shutil.rmtree(work, ignore_errors=True)
    rows: list[dict[str, Any]] = []
    for place, workload in enumerate(plan.workloads):
        for name in workload.contenders:
            row = figures(workload, name, runs, place, notes.get((place, name)), compared=place in compared)
            row[NOTE] = row[NOTE] or pace.note(place, len(runs.get((place, name), [])))
            rows.append(row)
    return rows


def _warm_up(plan: Plan, work: Path, running: dict[str, WarmProcess]) -> dict[str, str]:
    """Start all contenders and generate inputs; return the reasons of failed starts."""
    prepare(plans.WARMING)
    compiled()  # once here, so that the processes do not all compile
    absent: dict[str, str] = {}
    with ThreadPoolExecutor(_WARM_AT_ONCE) as pool:
        starting = {name: pool.submit(_start, name, plan, plans.WARMING_LIMIT_S, work, running) for name in plan.contenders}
        try:
            for workload in plan.workloads:
                prepare(workload.fleet)
            for name, started in starting.items():
                absent |= _why_absent(name, started)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            _end(running)  # otherwise the pool would wait for the answers of the contenders
            raise
    return absent


def _why_absent(name: str, started: Future[None]) -> dict[str, str]:
    try:
        started.result()
    except DidNotFinish:
        return {name: _unfinished(name, f"did not warm up in {plans.WARMING_LIMIT_S} s")}
    except FleetError as error:
        if name == flink.NAME and not isinstance(error, Crashed):
            return {name: f"absent: {error}"}
        return {name: _unfinished(name, f"did not finish: {error}")}
    return {}


def _unfinished(name: str, reason: str) -> str:
    """Return the note on an unfinished contender; raise it for job or reference."""
    if name in {OURS, REFERENCE}:
        raise FleetError(f"{name} {reason}", code="contender-unfinished")
    return reason


def _start(name: str, plan: Plan, limit_s: float, work: Path, running: dict[str, WarmProcess]) -> None:
    """Start and warm up a contender's process, registered in ``running`` for cleanup."""
    running[name] = WarmProcess(name, work / name, plan.limit_s)
    try:
        running[name].run(prepare(plans.WARMING), "warming", limit_s)
    except (DidNotFinish, FleetError):
        running.pop(name).end()
        raise


def _end(running: dict[str, WarmProcess]) -> None:
    for warm in list(running.values()):
        warm.end()


def _status(shown: Console, text: str) -> AbstractContextManager[Any]:
    return shown.status(text) if shown.is_terminal else nullcontext()


def round_line(workload: Workload, number: int, last: int, found: dict[str, Run | str]) -> str:
    """Format the result of a round, printed immediately in case of interruption."""
    results = (
        f"{name} {run.messages / run.cpu_s:,.0f}" if isinstance(run, Run) else f"{name} {run}" for name, run in found.items()
    )
    active = f", one in {workload.fleet.one_in} active" if workload.fleet.one_in > 1 else ""
    counted = "" if workload.counts_in(number, last) else " (warm-up)"
    return (
        f"round {number} of {last}{counted}, {workload.fleet.devices:,} devices{active}, "
        f"messages per CPU second: {'; '.join(results)}"
    )


def _round(
    workload: Workload, source: Input, number: int, state: tuple[Plan, Path, dict[str, WarmProcess], set[str]]
) -> dict[str, Run | str]:
    """Run each contender once; return its run, or the reason why there is none."""
    plan, work, running, out_of_it = state
    found: dict[str, Run | str] = {}
    for name in workload.contenders:
        if name in out_of_it:
            continue
        try:
            until_s = time.monotonic() + plan.limit_s
            if name not in running:  # it did not finish another workload
                _start(name, plan, plan.limit_s, work, running)
            found[name] = running[name].run(source, f"round{number}", until_s - time.monotonic())
        except DidNotFinish:
            running.pop(name, None)
            found[name] = _unfinished(name, f"did not finish in {plan.limit_s:.0f} s")
        except FleetError as error:
            found[name] = _unfinished(name, f"did not finish: {error}")
            if name in running:
                running.pop(name).end()
    return found


def _require_equal(found: dict[str, Run], source: Input, number: int) -> None:
    if found and (differences := difference({name: run.out for name, run in found.items()}, source.judged_to_ms)):
        raise FleetError(
            f"the contenders disagree in round {number} over {source.fleet}\n{differences}", code="contenders-differ"
        )
    name, run = next(iter(found.items()), ("", None))
    if run and (absent := NEEDED - triggers(name, run.out, source.judged_to_ms)):
        raise FleetError(
            f"no transition by {', '.join(sorted(absent))} was compared: {name} has none in round {number} over "
            f"{source.fleet}; use more devices",
            code="contenders-compare-nothing",
        )


def figures(
    workload: Workload, name: str, runs: dict[tuple[int, str], list[Run]], place: int, note: str | None, *, compared: bool
) -> dict[str, Any]:
    """Return the row of a contender, with medians over its runs.

    Args:
        workload: workload of the runs.
        name: name of the contender.
        runs: measured runs by index of the workload and contender.
        place: index of the workload.
        note: reason why the contender has no figures; None if it has.
        compared: whether its results were compared; otherwise ``equal`` is None.
    """
    own_runs, reference = runs.get((place, name), []), runs.get((place, REFERENCE), [])
    row: dict[str, Any] = {**dict.fromkeys(COLUMNS), NOTE: note, "shown": name in workload.shown}
    row |= {"contender": name, "devices": workload.fleet.devices, "active": round(1 / workload.fleet.one_in, 3)}
    if not own_runs or note:
        return row
    batch_ms = [each for run in own_runs for each in run.batch_ms]
    per_cpu_s = median(run.messages / run.cpu_s for run in own_runs)
    checkpoint = median(run.checkpoint_bytes for run in own_runs) / workload.fleet.devices
    row |= {
        "messages_per_cpu_s": round(per_cpu_s),
        "messages_per_s": round(median(run.messages / run.wall_s for run in own_runs)),
        "batch_p50_ms": round(median(batch_ms)) if batch_ms else None,
        "batch_p95_ms": round(quantiles(batch_ms, n=20, method="inclusive")[-1]) if len(batch_ms) > 1 else None,
        "checkpoint_bytes_per_device": round(checkpoint, 1) or None,
        "peak_rss_mb": round(max(run.peak_bytes for run in own_runs) / 1e6),
        "equal": True if compared else None,
    }
    if reference:
        row["ratio"] = round(per_cpu_s / max(run.messages / run.cpu_s for run in reference), 3)
    return row


def cost_by_size(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Describe for each contender how the cost of a message depends on the fleet size."""
    lines: list[str] = []
    for name in dict.fromkeys(row["contender"] for row in rows):
        costs = sorted((1e6 / row["messages_per_cpu_s"], row["devices"]) for row in rows
                      if row["contender"] == name and row["messages_per_cpu_s"])  # fmt: skip
        if len(costs) > 1:
            (least, cheapest), (most, dearest) = costs[0], costs[-1]
            lines.append(
                f"{name}: a message costs {least:.2f} us of CPU at {cheapest:,} devices and {most:.2f} us at {dearest:,}: "
                f"{most / least - 1:.0%} between them"
            )
    return lines


def python_ratios(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Describe the throughput per CPU second as a multiple of per-device Python's."""
    lines: list[str] = []
    job_row: dict[str, Any] | None = None
    for row in rows:  # in the order of the workloads; this job is the first contender of each
        if row["contender"] == plans.OURS:
            job_row = row
        elif row["contender"] in plans.PER_DEVICE and job_row and job_row["messages_per_cpu_s"] and row["messages_per_cpu_s"]:
            times = job_row["messages_per_cpu_s"] / row["messages_per_cpu_s"]
            lines.append(f"{row['devices']:,} devices: {times:.1f} times the messages per CPU second of {row['contender']}")
    return lines


def _for_people(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value for name, value in row.items()
    }
