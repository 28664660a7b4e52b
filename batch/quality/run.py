"""Evaluation of quality suites over tables or a state, and the quality gate.

Rule 1: the gate fails if a critical expectation fails. A warning is only reported. An expectation
is skipped, with a reason, if the remaining rows do not allow its evaluation.
Rule 2: pandas evaluates small inputs, Spark large ones; only the number of rows decides.
Rule 3: results are written to the tables before the gate refuses anything.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from batch.common.progress import Paced, ReportProgress, silent
from batch.quality import facts
from batch.quality.derived_tables import DAMAGED, DerivedTables, State, snapshot_state
from fleetpulse.core.errors import FleetError
from fleetpulse.core.quality.state_suites import OF_STATE
from fleetpulse.core.quality.suites import Severity, Suite
from fleetpulse.core.quality.table_suites import SUITES
from fleetpulse.core.tables import QUALITY_FAILURES, QUALITY_RESULTS
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.quality.great_expectations import ExpectationResult, Expectations
from fleetpulse.io.quality.suite_inputs import SparkRows, on_spark, opened
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from fleetpulse.io.spark.session import SparkResources

SPARK_FROM_ROWS: Final = 200_000  # rows of a suite; with fewer rows, pandas finishes before Spark has started
PASSED, FAILED, SKIPPED, FAULT = "passed", "failed", "skipped", "fault"
_PANDAS, _SPARK = "pandas", "spark"
Session = Callable[[], "SparkSession"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one expectation.

    Attributes:
        suite: name of the suite.
        expectation: name of the expectation.
        severity: critical or warning.
        outcome: passed, failed, skipped or fault.
        rows: number of rows evaluated; None if skipped or a fault.
        failed: number of rows that fail; None if skipped or a fault.
        why: reason for outcome skipped or fault; empty otherwise.
        examples: some of the rows that fail, each as its key and the columns shown.
    """

    suite: str
    expectation: str
    severity: str
    outcome: str
    rows: int | None = None
    failed: int | None = None
    why: str = ""
    examples: tuple[tuple[Mapping[str, Any], Mapping[str, Any]], ...] = ()

    @property
    def fails_gate(self) -> bool:
        """Whether the result fails the gate; a fault counts as a failure."""
        return self.severity == Severity.CRITICAL and self.outcome in (FAILED, FAULT)

    def sentence(self) -> str:
        """Describe the failure, with its first row."""
        if self.outcome == FAULT:
            return f'suite "{self.suite}": "{self.expectation}" could not be evaluated: {self.why}'
        first = " ".join(f"{name} {value}" for name, value in self.examples[0][0].items()) if self.examples else "unknown"
        rows = f"{self.failed:,} row{'s' if self.failed != 1 else ''}" if self.failed else "rows"
        return f'suite "{self.suite}": {rows} fail{"s" if self.failed == 1 else ""} "{self.expectation}", first: {first}'


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """Result of a suite.

    Attributes:
        suite: name of the suite.
        engine: pandas or spark; empty if no rows were evaluated.
        rows: number of rows evaluated.
        took_ms: duration, milliseconds.
        findings: result of each expectation.
    """

    suite: str
    engine: str
    rows: int
    took_ms: int
    findings: tuple[Finding, ...]


@dataclass(slots=True)
class Report:
    """Result of a quality run.

    Attributes:
        run_id: id of the run.
        at_ms: start of the run, epoch milliseconds.
        subject: display name of the data under test.
        suite_runs: results by suite.
        docs: first page of the reports; None if none were made.
    """

    run_id: str
    at_ms: int
    subject: str
    suite_runs: list[SuiteRun] = field(default_factory=list[SuiteRun])
    docs: Path | None = None

    def findings(self) -> Iterator[Finding]:
        """Yield the result of each expectation."""
        for one in self.suite_runs:
            yield from one.findings

    def gate_failures(self) -> list[Finding]:
        """Return the results that fail the gate, those with most failed rows first."""
        return sorted((one for one in self.findings() if one.fails_gate), key=lambda one: -(one.failed or 0))

    def plain(self) -> dict[str, Any]:
        """Return the report, ready for JSON."""
        counted = {name: sum(one.outcome == name for one in self.findings()) for name in (PASSED, FAILED, SKIPPED, FAULT)}
        suites = [
            {**asdict(one), "findings": [_plain(each) for each in one.findings if each.outcome != PASSED]}
            for one in self.suite_runs
        ]
        docs = None if self.docs is None else str(self.docs)
        failures = [one.sentence() for one in self.gate_failures()]
        return {"run_id": self.run_id, "at_ms": self.at_ms, "subject": self.subject, "holds": not failures, "why": failures,
                "outcomes": counted, "docs": docs, "suites": suites}  # fmt: skip


def _plain(one: Finding) -> dict[str, Any]:
    examples = [{"key": key, "values": values} for key, values in one.examples[:5]]
    return {**{name: value for name, value in asdict(one).items() if name != "suite"}, "examples": examples}


def refuse(report: Report, consequence: str) -> None:
    """Raise an error if the gate fails.

    Args:
        report: result of the quality run.
        consequence: consequence of the failure, part of the error.

    Raises:
        FleetError: a critical expectation failed; the first line names it, with its first row.
    """
    failures = report.gate_failures()
    if failures:
        more = [f"  {one.sentence()}" for one in failures[1:]]
        ended = f"{consequence}; all failures are in quality_failures, run {report.run_id}"
        raise FleetError("\n".join([f"{failures[0].sentence()}; {ended}", *more]), code="quality-gate-shut")


def chosen_suites(names: Sequence[str]) -> tuple[Suite, ...]:
    """Return suites by name; all suites if no name is given.

    Raises:
        FleetError: there is no suite of a given name.
    """
    known = {one.name: one for one in SUITES}
    chosen = [name for name in names if name]  # an empty field of a web form is no name
    if unknown := [name for name in chosen if name not in known]:
        raise FleetError(f'"{unknown[0]}" is no suite; name one of {", ".join(known)}', code="suite-unknown")
    return tuple(known[name] for name in chosen) or SUITES


def run(
    home: Home,
    names: Sequence[str] = (),
    session: Session | None = None,
    engine: str | None = None,
    keep: int = 20,
    report: ReportProgress = silent,
) -> Report:
    """Evaluate suites over tables and the newest snapshot, and write the results.

    Args:
        home: the home; its jobs may run.
        names: names of the suites; all if empty.
        session: function that returns a Spark session; None evaluates all suites by pandas.
        engine: pandas or spark for all suites; None chooses by the number of rows.
        keep: number of quality runs whose pages and Great Expectations results are kept.
        report: callback for progress lines of long suites.
    """
    suites = chosen_suites(names)
    return _evaluate_all(home, suites, snapshot_state(home), "tables", _Evaluation(session, engine, keep, report))


def gate(
    home: Home,
    state: State,
    session: Session | None = None,
    engine: str | None = None,
    keep: int = 20,
    report: ReportProgress = silent,
) -> Report:
    """Evaluate the suites that a state must pass before use, and write the results.

    Args:
        home: the home; its jobs may run.
        state: state under test.
        session: function that returns a Spark session; None evaluates all suites by pandas.
        engine: pandas or spark for all suites; None chooses by the number of rows.
        keep: number of quality runs whose pages and Great Expectations results are kept.
        report: callback for progress lines of long suites.
    """
    return _evaluate_all(home, OF_STATE, state, state.subject, _Evaluation(session, engine, keep, report))


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """Options of the evaluation, see `run`."""

    session: Session | None
    engine: str | None
    keep: int
    report: ReportProgress


def _evaluate_all(home: Home, suites: Sequence[Suite], state: State | None, subject: str, evaluation: _Evaluation) -> Report:
    at_ms = wall_clock_ms()
    report = Report(f"{format_instant(at_ms).replace(':', '').replace('.', '')}", at_ms, subject)
    judged = facts.job_position(home)
    with opened(home) as tables, ExitStack() as stack:
        derived = DerivedTables(home, tables, judged, state, evaluation.report)
        expectations = Expectations(home.path / "quality", report.run_id)
        rows: list[SparkRows] = []  # at most one, shared by all suites

        def spark_rows() -> SparkRows:
            assert evaluation.session is not None, "without a session all suites use pandas"
            if not rows:
                rows.append(stack.enter_context(on_spark(evaluation.session(), tables)))
            return rows[0]

        progress = Paced(evaluation.report)
        for place, suite in enumerate(suites, 1):
            progress(partial("evaluating suite {} of {}, {}".format, place, len(suites), suite.name))
            why = derived.skip_reason(suite)
            suite_run = _skipped(suite, why) if why else _evaluated(suite, derived, expectations, evaluation, spark_rows)
            report.suite_runs.append(suite_run)
            _write(home, report, suite_run)  # after each suite: an interrupted run keeps its results
        expectations.prune(evaluation.keep)
        report.docs = expectations.build_docs()
    return report


def _skipped(suite: Suite, why: str) -> SuiteRun:
    findings = (Finding(suite.name, one.name, one.severity.value, SKIPPED, why=why) for one in suite.expectations)
    return SuiteRun(suite.name, "", 0, 0, tuple(findings))


def _evaluated(
    suite: Suite, derived: DerivedTables, expectations: Expectations, evaluation: _Evaluation, spark_rows: Callable[[], SparkRows]
) -> SuiteRun:
    began = time.monotonic()
    try:
        derived.make(suite)
    except DAMAGED as error:  # an input of the derived tables is damaged
        why = f"its input cannot be derived: {error!r}"[:400]
        findings = (Finding(suite.name, one.name, one.severity.value, FAULT, why=why) for one in suite.expectations)
        return SuiteRun(suite.name, "", 0, round((time.monotonic() - began) * 1000), tuple(findings))
    if why := derived.skip_reason_after(suite):
        return _skipped(suite, why)
    count = derived.tables.count(suite.rows)
    large = evaluation.session is not None and (
        evaluation.engine == _SPARK or (evaluation.engine is None and count >= SPARK_FROM_ROWS)
    )
    frame = spark_rows().frame(suite.rows, suite.reads) if large else derived.tables.frame(suite.rows)
    answers = expectations.evaluate(suite, frame)
    took_ms = round((time.monotonic() - began) * 1000)
    return SuiteRun(suite.name, _SPARK if large else _PANDAS, count, took_ms, tuple(_found(suite, one) for one in answers))


def _found(suite: Suite, one: ExpectationResult) -> Finding:
    named = (suite.name, one.expectation.name, one.expectation.severity.value)
    if one.fault:
        return Finding(*named, FAULT, why=one.fault)
    examples = [
        ({name: _shown(row.get(name)) for name in suite.key}, {name: _shown(row.get(name)) for name in suite.shown})
        for row in one.shown
    ]
    return Finding(*named, FAILED if one.failed else PASSED, one.rows, one.failed, examples=tuple(examples))


def _shown(value: Any) -> Any:
    return format_instant(round(value.timestamp() * 1000)) if isinstance(value, datetime) else value


def _write(home: Home, report: Report, suite_run: SuiteRun) -> None:
    """Append the results of a suite to the tables."""
    same = {"run_id": report.run_id, "began_at_ms": report.at_ms}
    results: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for one in suite_run.findings:
        known = {**same, "suite": one.suite, "expectation": one.expectation, "severity": one.severity}
        counted = {"outcome": one.outcome, "rows": one.rows, "failed": one.failed, "why": one.why or None}
        more = {"subject": report.subject, "engine": suite_run.engine or None, "took_ms": suite_run.took_ms}
        results.append({**known, **counted, **more})
        for key, values in one.examples:
            failures.append({**known, "row_key": json.dumps(key, default=str), "detail": json.dumps(values, default=str)})
    for table, rows in ((QUALITY_RESULTS, results), (QUALITY_FAILURES, failures)):
        delta.create(home, table)
        if rows:
            delta.append_of(home, table, delta.to_table(table, rows), {})


@contextmanager
def lazy_session(home: Home, size: "SparkResources") -> Iterator[Session]:
    """Provide a function that starts a Spark session on first use; stop it at exit."""
    from batch.common.spark_session import batch_session

    with ExitStack() as stack:
        started: list[SparkSession] = []

        def session() -> "SparkSession":
            if not started:
                started.append(stack.enter_context(batch_session(home, size)))
            return started[0]

        yield session
