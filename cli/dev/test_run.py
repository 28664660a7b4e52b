"""Test runner: one scheduler for the parts of all layers, progress, and costs.

Rule 1: the output of a part goes to a file, and is printed whole if the part fails.
Rule 2: each part has its own environment and process, so that no layer affects the next one.
"""

import ctypes
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import psutil

from cli.dev.jvm_pool import pool_of_jvms
from cli.dev.test_plan import (
    FORM_VARIABLE,
    Budget,
    Chosen,
    Durations,
    Finished,
    Form,
    Part,
    budget_of,
    closing,
    further_jobs,
    layer_of,
    left_out_by_time,
    number_of_jobs,
    parts_of,
    skips,
    slowest,
    span,
    time_left_s,
    usual_jobs,
    wholly_extended,
)
from cli.dev.test_scheduler import Running, Scheduler, Screen, ended_how
from cli.supervisor.cds import create_archive
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.system.kernel_cache import compile_in_background
from fleetpulse.paths import ROOT, cache_dir

_JOBS_VARIABLE: Final = "FLEET_TEST_JOBS"
_NO_BYTECODE: Final = "PYTHONDONTWRITEBYTECODE"
_PR_SET_CHILD_SUBREAPER: Final = 36
_ORPHANS_S: Final = 10.0  # timeout for the orphans of the last parts to end: a JVM ends after its driver
_STOPS: Final = re.compile(r"-[a-zA-Z]*x[a-zA-Z]*|--exitfirst|--maxfail(=.*)?")  # options that end a run at a failure
_FOLD_LAYERS: Final = ("unit", "property", "spark", "e2e")  # layers that need the compiled fold
_SPARK_LAYERS: Final = ("spark", "e2e")
_PEERS: Final = "from bench.peers.scala_jar import compiled; compiled()"
# One repetition of the calibration. Its work resembles the suite's: imports in a new process, and
# plain Python.
_UNIT_OF_ESTIMATES_S: Final = 0.42  # CPU unit of the machine on which the estimates of unmeasured files were made
_CALIBRATION: Final = """
import hashlib, json
import numpy, pyarrow
rows = [{"device_id": f"d{n}", "kind": "heartbeat", "at_ms": n * 1000, "seq": n} for n in range(20_000)]
for _ in range(3):
    text = [json.dumps(row) for row in rows]
    assert [json.loads(line)["seq"] for line in text][-1] == 19_999
    for line in text:
        hashlib.sha256(line.encode()).digest()
"""


def run_tests(chosen: Chosen) -> bool:
    """Run the selected tests, and print their results and costs.

    Returns:
        Whether all tests passed, within the budget of the suite.

    Raises:
        FleetError: Java or a JAR is required but not available.
    """
    screen = Screen(_write, is_terminal=sys.stdout.isatty())
    several = str(usual_jobs(os.cpu_count() or 1))
    usual = number_of_jobs(os.environ.get(_JOBS_VARIABLE) or several, _JOBS_VARIABLE)
    jobs = 1 if chosen.interactive else chosen.jobs or usual
    durations_path = cache_dir() / "durations.json"
    durations = _read_durations(durations_path)
    files, left_out = files_of(chosen)
    is_limited = chosen.within_s is not None
    optional = {path for paths in files.values() for path in paths if is_limited and _is_wholly_extended(path)}
    parts = parts_of(files, chosen, durations.estimate(chosen.form), jobs, optional)
    if not chosen.collects:
        _prepare(chosen.layers, screen)
    budget = _budget(chosen)
    unit_s = calibrate() if budget or is_limited else 0.0
    counts = durations.tests_of(chosen.form)
    began_s, before_s = time.monotonic(), _children_cpu_s()
    with (
        tempfile.TemporaryDirectory(prefix="fleet-tests-", ignore_cleanup_errors=True) as folder,
        reaping_orphans() as reaps,
        _warm_jvms(chosen, Path(folder)) as jvms,
    ):
        if not chosen.interactive:
            left = time_left_s([], [part.estimate_s for part in parts], jobs)
            several = f"{len(parts)} parts, {jobs} at a time" if len(parts) > 1 else "one part"
            screen.line(f"== {chosen.form}: {several}; about {span(left)}")
        scheduler = Scheduler(
            command=lambda part, events: _pytest(chosen, part, events),
            environment=environment_of_parts(chosen.form, os.environ, jvms),
            root=ROOT,
            folder=Path(folder),
            jobs=jobs,
            further=0 if chosen.interactive or chosen.jobs or _JOBS_VARIABLE in os.environ else further_jobs(chosen.form),
            screen=screen,
            has_terminal=chosen.interactive,
            collects=chosen.collects,
            stops=any(_STOPS.fullmatch(argument) for argument in chosen.rest),
            reaps=reaps,
            expected=lambda part: sum(counts[path] or _functions(path) for path in part.targets),
            within_s=chosen.within_s,
            pace=unit_s / _UNIT_OF_ESTIMATES_S,
        )
        with _signals_as_exit():
            ended = scheduler.run(parts)
        starts = sum(one.spark_starts() for one in ended)
    cpu_s = _children_cpu_s() - before_s
    finished = [test for one in ended for test in one.finished]
    _print_results(screen, finished, lambda test: durations.of_test(chosen.form, test))
    if left_out or any(one.left_out for one in ended):
        screen.line(f"== left out: {sum(one.left_out for one in ended)} tests, and {left_out} files that only --all runs")
    for line in left_out_by_time(chosen.form, scheduler.not_started, scheduler.stopped, chosen.within_s or 0.0):
        screen.line(line)
    cost = f"== {span(time.monotonic() - began_s)}, {starts} starts of Spark, {cpu_s:,.0f} CPU s"
    faults = [f"{one.part.label}: {_why(one)}" for one in ended if not one.passed]
    if not (finished or faults or chosen.collects):
        faults.append("no test ran; name existing tests, or an expression of -k that matches some")
    if budget:
        units = cpu_s / unit_s
        cost += f", {units:,.0f} CPU units of {unit_s:.2f} s; budget: {budget.spark_starts} starts, {budget.cpu_units:,.0f} units"
        faults += budget.faults(chosen.form, starts, units)
    screen.line(cost)
    if not chosen.interactive:
        _keep(durations_path, chosen, ended)
    for fault in faults:
        screen.line(f"== failed: {fault}")
    broken = sum(one.broken for one in ended)
    screen.line(f"{sum(one.collected or 0 for one in ended)} tests selected" if chosen.collects else closing(finished, broken))
    return not faults


def environment_of_parts(form: Form, own: Mapping[str, str], jvms: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of all parts, in which Python may store bytecode.

    Without stored bytecode, each of some thousand processes would compile the project's modules again.

    Args:
        form: extent of the run.
        own: environment of this process.
        jvms: variables of the pool of JVMs.
    """
    return {**{name: value for name, value in own.items() if name != _NO_BYTECODE}, FORM_VARIABLE: form, **jvms}


def _warm_jvms(chosen: Chosen, folder: Path) -> AbstractContextManager[dict[str, str]]:
    needed = "e2e" in chosen.layers and not chosen.collects
    return pool_of_jvms(folder) if needed else nullcontext({})


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _why(one: Running) -> str:
    failed = [test.test for test in one.finished if test.outcome == "failed"]
    return ", ".join(failed) if failed else ended_how(one) + (f" during {one.now}" if one.now else "")


def _print_results(screen: Screen, finished: Sequence[Finished], before: Callable[[str], float | None]) -> None:
    if len(finished) > 1:
        screen.line("== slowest tests")
        for line in slowest(finished, before):
            screen.line(line)
    if several := [one for one in finished if one.spark_starts > 1]:
        screen.line("== tests with several starts of Spark")
        for one in sorted(several, key=lambda one: -one.spark_starts):
            screen.line(f"   {one.spark_starts:3d}  {one.test}")
    if lines := skips(finished):
        screen.line("== skipped")
        for line in lines:
            screen.line(line)


def files_of(chosen: Chosen) -> tuple[dict[str, list[str]], int]:
    """Return the files of each layer, and the number of excluded files.

    The default suite excludes files whose tests are all extended.
    """
    files: dict[str, list[str]] = {}
    left_out = 0
    for layer in chosen.layers:
        if named := [path for path in chosen.targets if layer_of(path) == layer]:
            files[layer] = named
            continue
        paths = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests" / layer).glob("**/test_*.py"))]
        whole = chosen.form is not Form.DEFAULT or bool(chosen.targets)
        files[layer] = [path for path in paths if whole or not _is_wholly_extended(path)]
        left_out += len(paths) - len(files[layer])
    return files, left_out


def _is_wholly_extended(path: str) -> bool:
    path = path.partition("::")[0]
    return path.endswith(".py") and wholly_extended((ROOT / path).read_text())


def _functions(path: str) -> int:
    """Return the number of test functions of a file without a record."""
    try:
        return (ROOT / path.partition("::")[0]).read_text().count("\ndef test_")
    except OSError:
        return 0


def _pytest(chosen: Chosen, part: Part, events: Path) -> list[str]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-p",
        "tests.support.reporting",
        "--fleet-events",
        str(events),
        *part.targets,
    ]
    if expression := chosen.expression():
        command += ["-m", expression]
    return [*command, *chosen.rest]


def _prepare(layers: Sequence[str], screen: Screen) -> None:
    """Compile the fold and create shared files once, instead of in each part."""
    kernels = compile_in_background() if any(layer in _FOLD_LAYERS for layer in layers) else None
    if kernels is not None:
        screen.line("== compiling the fold")
    if any(layer in _SPARK_LAYERS for layer in layers):
        screen.line(f"== {create_archive()}")
    if "spark" in layers:
        subprocess.run(
            [sys.executable, "-P", "-c", _PEERS], cwd=ROOT, check=False
        )  # if this fails, the tests that need the peers report the reason
    if kernels is not None:
        kernels.wait()


def _budget(chosen: Chosen) -> Budget | None:
    """Return the budget of the run; None if the run is not a whole suite, or the suite has no budget."""
    return budget_of(tomllib.loads((ROOT / "pyproject.toml").read_text()), chosen.form) if chosen.whole else None


def calibrate(repetitions: int = 5) -> float:
    """Return the CPU unit: the minimum CPU seconds of a fixed piece of work."""
    durations_s: list[float] = []
    for _ in range(repetitions):
        before_s = _children_cpu_s()
        subprocess.run([sys.executable, "-P", "-c", _CALIBRATION], check=True)
        durations_s.append(_children_cpu_s() - before_s)
    return min(durations_s)


def _children_cpu_s() -> float:
    """Return the CPU seconds of all reaped child processes.

    Spark's Python daemon ignores SIGCHLD, so its workers are never reaped, and are missing here.
    """
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def _signals_as_exit() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP into `SystemExit`, so that the parts end too."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def reaping_orphans() -> Iterator[bool]:
    """Make this process the parent of its orphaned descendants, on Linux, and reap them, so that their CPU time counts.

    Yields:
        Whether it is their parent.
    """
    if sys.platform != "linux":
        yield False
        return
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    done = prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield done
    finally:
        while orphans := psutil.Process().children():  # further ones appear when their parents end
            _, alive = psutil.wait_procs(orphans, timeout=_ORPHANS_S)
            if alive:
                break
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _read_durations(path: Path) -> Durations:
    try:
        return Durations(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return Durations()


def _keep(path: Path, chosen: Chosen, ended: Sequence[Running]) -> None:
    """Record the durations of passed tests.

    The file is read again, because another run may have written it in the meantime. A narrowed run
    is not recorded: a file with few executed tests would seem short.
    """
    if chosen.narrowed:
        return
    fresh = _read_durations(path)
    for one in ended:
        if one.passed:
            for target in one.part.targets:
                fresh.forget(chosen.form, target, (test.test for test in one.finished))
        for test in one.finished:
            if test.outcome == "passed":
                fresh.add(chosen.form, test.test, test.wall_s, test.cpu_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{os.getpid()}-{path.name}")
        atomic_write(path, json.dumps(fresh.recorded(), separators=(",", ":")), sync=False, temporary=temporary)
    except OSError as error:
        _write(f"== durations were not recorded: {error}\n")
