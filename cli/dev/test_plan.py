"""Plan of a test run: selection, parts and their order, budgets, printed lines.

This module starts no process and reads no clock.

Rule 1: a part is one pytest process. It consists of whole files, and a file is in one part only.
Rule 2: the longest part starts first, by recorded durations. A file without a record gets an
estimate by its layer.
"""

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heapreplace
from pathlib import PurePosixPath
from statistics import median
from typing import Any, Final

from fleetpulse.core.errors import Misuse

LAYERS: Final = ("unit", "property", "dags", "spark", "e2e")
EXTENDED: Final = "extended"  # the marker of tests that only --all and --long run
FORM_VARIABLE: Final = "FLEET_TEST_FORM"
PART_S: Final = 75.0  # duration of a part of several short files: a longer part could run last, with the other core idle
KEPT_RUNS: Final = 5
APART: Final = (
    "tests/e2e/operations/test_airflow.py",
    "tests/e2e/deployment/test_image.py",
)  # each needs a core: a browser, an installation
SLOW_PACE: Final = 1.25  # pace from which optional parts start last, see `in_order`
_PACE_S: Final = 300.0  # estimated seconds of ended parts whose durations count as much as the speed of the machine
_SHORT_S: Final = 40.0  # an end-to-end file that takes longer is a part of its own
_START_S: Final = 4.0  # duration of imports and collection of a part
_COLLECTS: Final = ("--co", "--collect-only")
_INTERACTIVE: Final = ("-s", "--capture=no", "--pdb", "--trace", *_COLLECTS)
_TAKE_PATHS: Final = ("--ignore", "--ignore-glob", "--deselect", "--rootdir", "-c", "--confcutdir", "--basetemp")
_JOBS_OPTIONS: Final = ("-n", "--numprocesses")


class Form(StrEnum):
    """Extent of a test run; tests read it by `tests.support.form`."""

    DEFAULT = "default"  # without tests marked as extended, and with few examples of each law
    ALL = "all"
    LONG = "long"  # all tests, in their long forms: more histories, a real kill at every step


# Estimated seconds of a file that was never measured.
GUESSED_S: Final[Mapping[Form, Mapping[str, float]]] = {
    Form.DEFAULT: {"unit": 1.7, "property": 4.0, "dags": 11.0, "spark": 13.0, "e2e": 12.0},
    Form.ALL: {"unit": 2.5, "property": 6.0, "dags": 11.0, "spark": 10.0, "e2e": 30.0},
    Form.LONG: {"unit": 8.0, "property": 50.0, "dags": 8.0, "spark": 60.0, "e2e": 150.0},
}


# Estimated seconds of files that take far longer than others of their layer: they must not start
# last.
_LONG_S: Final[Mapping[str, float]] = {
    "tests/e2e/operations/test_airflow.py": 400.0,
    "tests/e2e/state/test_state.py": 350.0,
    "tests/e2e/operations/test_rollout.py": 340.0,
    "tests/spark/batch/state/test_crashes.py": 260.0,
    "tests/e2e/pipeline/test_chaos.py": 250.0,
    "tests/e2e/pipeline/test_replay.py": 230.0,
    "tests/e2e/ingest/test_reconnects.py": 210.0,
    "tests/e2e/operations/test_maintain.py": 210.0,
    "tests/e2e/web/test_page_of_a_running_fleet.py": 180.0,
    "tests/e2e/cluster/test_standalone.py": 165.0,
    "tests/e2e/operations/test_documents.py": 120.0,
    "tests/e2e/operations/test_drill.py": 105.0,
    "tests/e2e/deployment/test_image.py": 100.0,
    "tests/e2e/ingest/test_kafka.py": 100.0,
    "tests/e2e/state/test_killed.py": 100.0,
    "tests/e2e/cluster/test_kubernetes.py": 80.0,
    "tests/e2e/web/test_page_browser.py": 80.0,
    "tests/spark/batch/state/test_operations.py": 75.0,
    "tests/spark/batch/state/test_snapshot.py": 70.0,
    "tests/e2e/pipeline/test_jitter.py": 60.0,
    "tests/spark/batch/state/test_recover.py": 60.0,
    "tests/e2e/ingest/test_bridge.py": 55.0,
    "tests/e2e/operations/test_amend.py": 55.0,
    "tests/spark/batch/state/test_any_history.py": 55.0,
    "tests/spark/batch/quality/test_run.py": 50.0,
    "tests/spark/batch/maintenance/test_maintain.py": 40.0,
    "tests/spark/bench/lifecycle/test_compare.py": 40.0,
    "tests/spark/bench/test_soak.py": 35.0,
}
_LONG_DEFAULT_S: Final[Mapping[str, float]] = {
    "tests/e2e/operations/test_airflow.py": 100.0,
    "tests/e2e/pipeline/test_replay.py": 80.0,
    "tests/e2e/ingest/test_bridge.py": 55.0,
    "tests/e2e/web/test_page_browser.py": 36.0,
    "tests/e2e/state/test_killed.py": 30.0,
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """Selection of a run.

    Attributes:
        form: extent of the run.
        layers: names of the layers, in their order.
        targets: named files and tests, as paths from the root; empty for all files of the layers.
        marker: marker expression of the user; None if there is none.
        rest: further arguments for pytest.
        jobs: requested number of parts at a time; None if none was requested.
        within_s: time limit of the run, seconds; None if there is none.
    """

    form: Form
    layers: tuple[str, ...]
    targets: tuple[str, ...] = ()
    marker: str | None = None
    rest: tuple[str, ...] = ()
    jobs: int | None = None
    within_s: float | None = None

    @property
    def whole(self) -> bool:
        """Whether this is a whole suite, to which its budget applies."""
        return self.layers == LAYERS and not self.narrowed

    @property
    def narrowed(self) -> bool:
        """Whether arguments may exclude tests of a layer."""
        return bool(self.targets or self.marker or self.rest)

    @property
    def interactive(self) -> bool:
        """Whether pytest needs the terminal, so that one part runs at a time."""
        return any(argument in _INTERACTIVE or re.fullmatch(r"-[vxql]*s", argument) for argument in self.rest)

    @property
    def collects(self) -> bool:
        """Whether pytest lists the tests without running them."""
        return any(argument in _COLLECTS for argument in self.rest)

    def expression(self) -> str | None:
        """Return the marker expression for pytest's -m; a named file runs whole."""
        outside = None if self.targets or self.form is not Form.DEFAULT else f"not {EXTENDED}"
        return f"({self.marker}) and {outside}" if self.marker and outside else self.marker or outside


def choose(arguments: Sequence[str], form: Form, within_s: float | None = None) -> Chosen:
    """Parse arguments: layers or paths first, then options of pytest.

    Args:
        arguments: the arguments.
        form: extent of the run.
        within_s: time limit of the run, seconds; None if there is none.

    Raises:
        Misuse: a word before the first option is neither a layer nor a path below tests/, or an
            option has no valid value. Or a time limit is given for the default suite.
    """
    first = next((place for place, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    named, options = list(arguments[:first]), list(arguments[first:])
    paths = [argument.removeprefix("./") for argument in named if _is_path(argument)]
    if unknown := [argument for argument in named if argument not in LAYERS and not _is_path(argument)]:
        raise Misuse(
            f'"{unknown[0]}" is not a test layer; expected {", ".join(LAYERS)}, or only fuzz or mutants; select a test by '
            "-k NAME, or by its path: tests/unit/core/test_fold.py",
            code="test-layer-unknown",
        )
    marker, jobs, rest = None, None, list[str]()
    while options:
        argument = options.pop(0)
        if argument.startswith(("-n", "--numprocesses")):
            jobs = number_of_jobs(_value(argument, options), "-n")
        elif re.match(r"-m(?!axfail)", argument):
            marker = _value(argument, options)
        elif _is_path(argument) and not (rest and rest[-1] in _TAKE_PATHS):
            paths.append(argument.removeprefix("./"))
        else:
            rest.append(argument)
    folders = [path for path in paths if "." not in PurePosixPath(path.partition("::")[0]).name]
    chosen = {*named, *(PurePosixPath(path).parts[1] for path in folders if len(PurePosixPath(path).parts) == 2)}
    targets = tuple(path.rstrip("/") for path in paths if path.rstrip("/") not in {f"tests/{layer}" for layer in LAYERS})
    if within_s is not None and form is Form.DEFAULT:
        raise Misuse(
            "--within needs --all or --long; the default suite has no tests that it may leave out", code="option-conflict"
        )
    layers = tuple(layer for layer in LAYERS if layer in chosen or any(layer_of(path) == layer for path in targets))
    return Chosen(form, layers or LAYERS, targets, marker, tuple(rest), jobs, within_s)


def _is_path(argument: str) -> bool:
    return argument.removeprefix("./").startswith("tests/") and layer_of(argument) in LAYERS


def layer_of(path: str) -> str:
    """Return the layer of a file or a test, by its folder; empty for a path elsewhere."""
    parts = PurePosixPath(path.partition("::")[0]).parts
    return parts[1] if len(parts) > 1 and parts[0] == "tests" else ""


def _value(argument: str, options: list[str]) -> str:
    """Return the value of an option, which is joined to it or the next word."""
    name, _, value = argument.partition("=") if argument.startswith("--") else (argument[:2], "", argument[2:].removeprefix("="))
    if value:
        return value
    if not options:
        raise Misuse(f"the option {name} needs a value; got none", code="option-invalid")
    return options.pop(0)


def usual_jobs(cores: int) -> int:
    """Return the default number of parts at a time."""
    return min(2, cores)


def further_jobs(form: Form) -> int:
    """Return the number of parts that may start in addition while cores are idle.

    It is greater if end-to-end tests run, which wait half of the time. On a slow machine the cores
    are not idle: more parts at a time would only let timeouts expire.
    """
    return 1 if form is Form.DEFAULT else 2


def number_of_jobs(text: str, name: str) -> int:
    """Parse the number of parts at a time.

    Args:
        text: text of the number.
        name: name of the option or variable, for the error.

    Raises:
        Misuse: the text is not a number.
    """
    if not text.isdecimal():
        raise Misuse(
            f'{name} must be the number of parts at a time, 0 or 1 for one after another; got "{text}"', code="option-invalid"
        )
    return max(1, int(text))


def wholly_extended(source: str) -> bool:
    """Return whether a file marks all of its tests as extended.

    The default suite does not start pytest for such a file.
    """
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
        and any(isinstance(inner, ast.Attribute) and inner.attr == EXTENDED for inner in ast.walk(node.value))
        for node in ast.parse(source).body
    )


class Durations:
    """Recorded wall and CPU seconds of the last runs of each test, by form."""

    def __init__(self, recorded: Mapping[str, Mapping[str, Sequence[Sequence[float]]]] | None = None) -> None:
        self._runs: dict[str, dict[str, list[list[float]]]] = {
            form: {name: [list(map(float, run)) for run in runs] for name, runs in tests.items()}
            for form, tests in (recorded or {}).items()
        }

    def recorded(self) -> dict[str, dict[str, list[list[float]]]]:
        """Return all records, for storage; the newest run of a test is last."""
        return self._runs

    def add(self, form: Form, test: str, wall_s: float, cpu_s: float) -> None:
        """Record a run of a test; only the last five runs are kept."""
        runs = self._runs.setdefault(form, {}).setdefault(test, [])
        runs.append([round(wall_s, 3), round(cpu_s, 3)])
        del runs[:-KEPT_RUNS]

    def forget(self, form: Form, path: str, known: Iterable[str]) -> None:
        """Remove the records of tests that a file no longer has, after a run of it."""
        tests, remaining = self._runs.get(form, {}), set(known)
        for name in [name for name in tests if name.startswith(f"{path}::") and name not in remaining]:
            del tests[name]

    def of_test(self, form: Form, test: str) -> float | None:
        """Return the median of a test's recorded wall seconds; None without a record."""
        runs = self._runs.get(form, {}).get(test)
        return median(wall for wall, _ in runs) if runs else None

    def tests_of(self, form: Form) -> Counter[str]:
        """Return the number of recorded tests, by file."""
        return Counter(name.partition("::")[0] for name in self._runs.get(form, {}))

    def estimate(self, form: Form) -> Callable[[str], float]:
        """Return a function that estimates the seconds of a file."""
        known: dict[str, float] = {}
        for name, runs in self._runs.get(form, {}).items():
            path = name.partition("::")[0]
            known[path] = known.get(path, 0.0) + median(wall for wall, _ in runs)
        guessed, long_s = GUESSED_S[form], _LONG_DEFAULT_S if form is Form.DEFAULT else _LONG_S
        return lambda path: known.get(path, long_s.get(path, guessed.get(layer_of(path), guessed["unit"])))


@dataclass(frozen=True, slots=True)
class Part:
    """One pytest process.

    Attributes:
        label: name in the progress lines.
        targets: files, folders or tests, as arguments of pytest.
        estimate_s: expected wall seconds.
        apart: whether it must not run beside another part with this flag.
        optional: whether a time limit may leave it out, because all of its tests are extended.
    """

    label: str
    targets: tuple[str, ...]
    estimate_s: float
    apart: bool = False
    optional: bool = False


def split(files: Sequence[str], into: int, estimate: Callable[[str], float]) -> list[tuple[str, ...]]:
    """Split files into at most ``into`` nonempty groups of about the same duration."""
    groups: list[tuple[float, int, list[str]]] = [(0.0, number, []) for number in range(max(1, min(into, len(files))))]
    heapify(groups)
    for path in sorted(files, key=lambda path: (-estimate(path), path)):
        seconds, number, group = groups[0]
        heapreplace(groups, (seconds + estimate(path), number, [*group, path]))
    return [tuple(sorted(group)) for _, _, group in sorted(groups, key=lambda one: one[1]) if group]


def parts_of(
    files: Mapping[str, Sequence[str]],
    chosen: Chosen,
    estimate: Callable[[str], float],
    jobs: int,
    optional: Collection[str] = (),
) -> list[Part]:
    """Return the parts of a run, the longest first.

    Args:
        files: files of each layer.
        chosen: the selection.
        estimate: function that estimates the seconds of a file.
        jobs: number of parts at a time.
        optional: files that a time limit may leave out; they are in parts of their own.
    """
    parts: list[Part] = []
    for layer, paths in files.items():
        groups = [
            group
            for some in ([path for path in paths if path not in optional], [path for path in paths if path in optional])
            for group in _groups(layer, some, chosen, estimate, jobs)
        ]
        for number, group in enumerate(groups, 1):
            label = layer if len(groups) == 1 else f"{layer} {number} of {len(groups)}"
            if len(group) == 1:
                label = f"{layer}/{PurePosixPath(group[0].partition('::')[0]).name}"
            seconds = _START_S + sum(estimate(path.partition("::")[0]) for path in group)
            parts.append(
                Part(label, group, seconds, any(path in APART for path in group), all(path in optional for path in group))
            )
    return parts if chosen.interactive else sorted(parts, key=lambda part: (-part.estimate_s, part.label))


def _groups(
    layer: str, paths: Sequence[str], chosen: Chosen, estimate: Callable[[str], float], jobs: int
) -> list[tuple[str, ...]]:
    if not paths:
        return []
    if chosen.interactive or layer == "dags":  # all tests of DAGs share one Airflow in a process
        return [tuple(paths)]
    if chosen.narrowed:
        return split(paths, jobs, estimate)
    if layer == "e2e":
        is_alone = {path: estimate(path) > _SHORT_S or path in APART for path in paths}
        short = [path for path in paths if not is_alone[path]]
        return [*((path,) for path in paths if is_alone[path]), *_split_by_duration(short, estimate)]
    if layer == "spark":  # each part starts a Spark session
        return split(paths, min(jobs, 2), estimate)
    return _split_by_duration(paths, estimate)


def _split_by_duration(paths: Sequence[str], estimate: Callable[[str], float]) -> list[tuple[str, ...]]:
    return split(paths, math.ceil(sum(map(estimate, paths)) / PART_S), estimate)


def next_part(waiting: Sequence[Part], running: Iterable[Part], fits: Callable[[Part], bool] = lambda _: True) -> Part | None:
    """Return the first part that fits and may run beside the running ones, or None."""
    is_exclusive = any(part.apart for part in running)
    return next((part for part in waiting if not (part.apart and is_exclusive) and fits(part)), None)


def in_order(waiting: Sequence[Part], pace: float) -> list[Part]:
    """Return the order in which the parts of a run with a time limit start.

    On a slow machine, optional parts start last: by then, the time that is left for them is known.
    """
    return sorted(waiting, key=lambda part: part.optional) if pace > SLOW_PACE else list(waiting)


def fits_in(part: Part, waiting: Sequence[Part], running_s: Sequence[float], jobs: int, pace: float, left_s: float) -> bool:
    """Return whether a part and all required parts are expected to end within the time that is left.

    Args:
        part: the part; a required part always fits.
        waiting: parts that have not started.
        running_s: seconds left of each running part.
        jobs: number of parts at a time.
        pace: how many times longer than estimated the parts of this run take.
        left_s: seconds that are left.
    """
    if not part.optional:
        return True
    required_s = [one.estimate_s * pace for one in waiting if not one.optional]
    return time_left_s(running_s, [part.estimate_s * pace, *required_s], jobs) <= left_s


def pace_of(parts: Iterable[tuple[float, float]], at_first: float) -> float:
    """Return how many times longer than estimated the parts of a run take, at least once.

    Args:
        parts: estimated and actual seconds of each ended part, and of each running part that exceeds its estimate.
        at_first: pace until half of the known durations are of this run, from the speed of the machine.
    """
    estimated_s, took_s = _PACE_S, _PACE_S * at_first
    for estimate_s, actual_s in parts:
        estimated_s, took_s = estimated_s + estimate_s, took_s + actual_s
    return max(1.0, took_s / estimated_s)


def part_left_s(estimate_s: float, elapsed_s: float, ended: int, tests: int) -> float:
    """Estimate the seconds left of a part.

    If the part takes longer than expected, the estimate follows from the share of ended tests.
    """
    if elapsed_s > estimate_s and 0 < ended <= tests:
        return elapsed_s * (tests - ended) / ended
    return max(estimate_s - elapsed_s, 0.05 * estimate_s)


def time_left_s(running: Sequence[float], waiting: Sequence[float], jobs: int) -> float:
    """Estimate the seconds until all parts have ended.

    Args:
        running: seconds left of each running part.
        waiting: estimated seconds of each part that has not started, in the order of their start.
        jobs: number of parts at a time.
    """
    ends = [*running, *[0.0] * (max(1, jobs) - len(running))]
    heapify(ends)
    for seconds in waiting:
        heapreplace(ends, ends[0] + seconds)
    return max(ends)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on the cost of a suite.

    Attributes:
        spark_starts: number of Spark sessions started, in all processes.
        cpu_units: CPU time of the run, in units of the calibration.
    """

    spark_starts: int
    cpu_units: float

    def faults(self, form: Form, spark_starts: int, cpu_units: float) -> list[str]:
        """Return an error message for each limit that a run exceeds."""
        where = f"[tool.fleet.test-budget.{form}] of pyproject.toml"
        found: list[str] = []
        if spark_starts > self.spark_starts:
            found.append(
                f"the {form} suite started Spark {spark_starts} times; its budget is {self.spark_starts}; find the new cold "
                f"start (tests with their starts are above), or raise spark_starts in {where} with the reason in the same commit"
            )
        if cpu_units > self.cpu_units:
            found.append(
                f"the {form} suite took {cpu_units:,.0f} CPU units; its budget is {self.cpu_units:,.0f}; find what costs more "
                f"(the slowest tests are above), or raise cpu_units in {where} with the reason in the same commit"
            )
        return found


def budget_of(pyproject: Mapping[str, Any], form: Form) -> Budget | None:
    """Return the budget of a suite from pyproject.toml; None if it has none."""
    table = pyproject.get("tool", {}).get("fleet", {}).get("test-budget", {}).get(form)
    return None if table is None else Budget(int(table["spark_starts"]), float(table["cpu_units"]))


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of one test.

    Attributes:
        test: id of the test.
        outcome: passed, failed or skipped; an error of a fixture is a failure.
        wall_s: wall seconds, including fixtures.
        cpu_s: CPU seconds of the process and of its observed child processes.
        spark_starts: number of Spark sessions started during the test.
        reason: reason of a skip.
    """

    test: str
    outcome: str
    wall_s: float = 0.0
    cpu_s: float = 0.0
    spark_starts: int = 0
    reason: str = ""


def span(seconds: float) -> str:
    """Return a readable duration, such as 4 min 10 s."""
    whole = max(0, round(seconds))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"


def progress(ended: int, expected: int, elapsed_s: float, left_s: float, now: Iterable[tuple[str, float, float]]) -> str:
    """Return the progress line of a run.

    Args:
        ended: number of ended tests.
        expected: expected number of tests of the run.
        elapsed_s: seconds since the start of the run.
        left_s: estimated seconds left.
        now: label, seconds so far, and expected seconds of each running part.
    """
    left = f"about {round(left_s / 60)} min left" if left_s >= 90 else f"about {span(math.ceil(left_s / 10) * 10)} left"
    running = ", ".join(f"{label} ({span(so_far)} of about {span(whole)})" for label, so_far, whole in now)
    return f"== {ended:,} of {max(ended, expected):,} tests, {span(elapsed_s)} gone, {left}" + (
        f"; now: {running}" if running else ""
    )


def left_out_by_time(form: Form, not_started: Sequence[Part], stopped: Sequence[Part], within_s: float) -> list[str]:
    """Return a line for each part that a time limit left out or stopped, below a line with the reason."""
    if not (not_started or stopped):
        return []
    left_out = [*not_started, *stopped]
    parts = "1 part" if len(left_out) == 1 else f"{len(left_out)} parts"
    paths = " ".join(path for part in left_out for path in part.targets)
    return [
        f"== the time limit of {span(within_s)} leaves out {parts} with extended tests only; "
        f"to run them: ./fleet test --{form} {paths}",
        *(f"   not started: {part.label}" for part in not_started),
        *(f"   stopped: {part.label}" for part in stopped),
    ]


def slowest(finished: Iterable[Finished], before: Callable[[str], float | None], count: int = 10) -> list[str]:
    """Return a line for each of the slowest tests, with its usual time and its cost."""
    lines: list[str] = []
    for one in sorted(finished, key=lambda one: -one.wall_s)[:count]:
        usual = before(one.test)
        known = "new" if usual is None else f"usually {usual:.1f} s"
        starts = f", {one.spark_starts} starts of Spark" if one.spark_starts else ""
        lines.append(f"   {one.wall_s:7.1f} s ({known}), {one.cpu_s:.1f} CPU s{starts}  {one.test}")
    return lines


def skips(finished: Iterable[Finished]) -> list[str]:
    """Return a line for each reason of skips, the most frequent first."""
    counted = Counter(one.reason for one in finished if one.outcome == "skipped")
    return [f"   {count:,} skipped: {reason}" for reason, count in counted.most_common()]


def closing(finished: Iterable[Finished], broken: int = 0) -> str:
    """Return the last line of a run.

    Args:
        finished: results of the tests.
        broken: number of parts that ended without results; each counts as one failure.
    """
    counted = Counter(one.outcome for one in finished)
    return f"{counted['passed']} passed, {counted['failed'] + broken} failed, {counted['skipped']} skipped"
