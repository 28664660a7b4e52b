"""Data quality: suites over a home's tables, a snapshot, or a generation that is held; and the gate that follows from them.

Rule 1: a critical expectation that fails shuts the gate; a warning is reported; what cannot be told is skipped, and said so.
Rule 2: pandas evaluates what is small, Spark what is large: by how many rows there are, and nothing else.
Rule 3: what was found is written down before anybody is refused.
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

from batch.common.progress import Paced, Say, silent
from batch.quality import facts
from batch.quality.derived_tables import DAMAGED, DerivedTables, State, snapshot_state
from fleetpulse.core.errors import FleetError
from fleetpulse.core.quality.state_suites import OF_STATE
from fleetpulse.core.quality.suites import Severity, Suite
from fleetpulse.core.quality.table_suites import SUITES
from fleetpulse.core.tables import QUALITY_FAILURES, QUALITY_RESULTS
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.quality.great_expectations import Evaluated, Expectations
from fleetpulse.io.quality.suite_inputs import SparkRows, on_spark, opened
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables as delta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from fleetpulse.io.spark.session import SparkResources

SPARK_FROM_ROWS: Final = 200_000  # of a suite: below it pandas is done before Spark has started
PASSED, FAILED, SKIPPED, FAULT = "passed", "failed", "skipped", "fault"
_PANDAS, _SPARK = "pandas", "spark"
Session = Callable[[], "SparkSession"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one expectation.

    Attributes:
        suite: its suite.
        expectation: its name.
        severity: critical or warning.
        outcome: passed, failed, skipped or fault.
        rows: how many there are; None where it was skipped.
        failed: how many of them fail; likewise.
        why: why it was skipped, or could not be evaluated.
        examples: some of the rows that fail: their keys, and what they say.
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
    def shuts(self) -> bool:
        """Whether a gate stays shut for it: what could not be evaluated was not seen to hold."""
        return self.severity == Severity.CRITICAL and self.outcome in (FAILED, FAULT)

    def sentence(self) -> str:
        """Say what fails, and which row is the first."""
        if self.outcome == FAULT:
            return f'suite "{self.suite}": "{self.expectation}" could not be evaluated: {self.why}'
        first = " ".join(f"{name} {value}" for name, value in self.examples[0][0].items()) if self.examples else "unknown"
        rows = f"{self.failed:,} row{'s' if self.failed != 1 else ''}" if self.failed else "rows"
        return f'suite "{self.suite}": {rows} fail{"s" if self.failed == 1 else ""} "{self.expectation}", first: {first}'


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """What came of a suite.

    Attributes:
        suite: its name.
        engine: pandas or spark; empty where it was skipped.
        rows: how many there are.
        took_ms: time that it took.
        findings: one for each expectation.
    """

    suite: str
    engine: str
    rows: int
    took_ms: int
    findings: tuple[Finding, ...]


@dataclass(slots=True)
class Report:
    """What came of a look at the data.

    Attributes:
        run_id: names it.
        at_ms: when it began, epoch milliseconds.
        subject: what was looked at.
        looked: by suite.
        docs: the first page; None where none were made.
    """

    run_id: str
    at_ms: int
    subject: str
    looked: list[SuiteRun] = field(default_factory=list[SuiteRun])
    docs: Path | None = None

    def findings(self) -> Iterator[Finding]:
        """Yield what came of each expectation."""
        for one in self.looked:
            yield from one.findings

    def shut(self) -> list[Finding]:
        """Return why a gate stays shut, what most rows fail first; nothing where it opens."""
        return sorted((one for one in self.findings() if one.shuts), key=lambda one: -(one.failed or 0))

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        counted = {name: sum(one.outcome == name for one in self.findings()) for name in (PASSED, FAILED, SKIPPED, FAULT)}
        suites = [
            {**asdict(one), "findings": [_plain(each) for each in one.findings if each.outcome != PASSED]} for one in self.looked
        ]
        docs = None if self.docs is None else str(self.docs)
        shut = [one.sentence() for one in self.shut()]
        return {"run_id": self.run_id, "at_ms": self.at_ms, "subject": self.subject, "holds": not shut, "why": shut,
                "outcomes": counted, "docs": docs, "suites": suites}  # fmt: skip


def _plain(one: Finding) -> dict[str, Any]:
    examples = [{"key": key, "says": says} for key, says in one.examples[:5]]
    return {**{name: value for name, value in asdict(one).items() if name != "suite"}, "examples": examples}


def refuse(report: Report, what: str) -> None:
    """Let nothing follow from data that does not hold.

    Raises:
        FleetError: a critical expectation failed; the first line says which, and names the first row.
    """
    shut = report.shut()
    if shut:
        more = [f"  {one.sentence()}" for one in shut[1:]]
        ended = f"{what}; all of it is in quality_failures, run {report.run_id}"
        raise FleetError("\n".join([f"{shut[0].sentence()}; {ended}", *more]), code="quality-gate-shut")


def chosen_suites(names: Sequence[str]) -> tuple[Suite, ...]:
    """Return the suites of some names; all where none is given.

    Raises:
        FleetError: there is none of that name.
    """
    known = {one.name: one for one in SUITES}
    given = [name for name in names if name]  # a form that was left empty is none
    if unknown := [name for name in given if name not in known]:
        raise FleetError(f'"{unknown[0]}" is no suite; there are {", ".join(known)}', code="suite-unknown")
    return tuple(known[name] for name in given) or SUITES


def run(
    home: Home,
    names: Sequence[str] = (),
    session: Session | None = None,
    engine: str | None = None,
    keep: int = 20,
    say: Say = silent,
) -> Report:
    """Evaluate suites over a home's tables, and over its newest snapshot, and write down what came of it.

    Args:
        home: the home; its jobs may run.
        names: of suites; all where none is given.
        session: gives a Spark session where one is needed; None evaluates all by pandas.
        engine: pandas or spark for all of them; None chooses by how many rows there are.
        keep: of how many looks results and pages are kept.
        say: told of suites that take long, and how far they are.
    """
    suites = chosen_suites(names)
    return _look(home, suites, snapshot_state(home), "tables", _Evaluation(session, engine, keep, say))


def gate(
    home: Home,
    state: State,
    session: Session | None = None,
    engine: str | None = None,
    keep: int = 20,
    say: Say = silent,
) -> Report:
    """Evaluate what must hold of a state before anything is built on it, and write down what came of it."""
    return _look(home, OF_STATE, state, state.subject, _Evaluation(session, engine, keep, say))


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """How suites are evaluated, see `run`."""

    session: Session | None
    engine: str | None
    keep: int
    say: Say


def _look(home: Home, suites: Sequence[Suite], state: State | None, subject: str, how: _Evaluation) -> Report:
    at_ms = wall_clock_ms()
    report = Report(f"{format_instant(at_ms).replace(':', '').replace('.', '')}", at_ms, subject)
    judged = facts.stand_of(home)
    with opened(home) as tables, ExitStack() as stack:
        made = DerivedTables(home, tables, judged, state, how.say)
        expectations = Expectations(home.path / "quality", report.run_id)
        rows: list[SparkRows] = []  # one for all, where there is any

        def spark_rows() -> SparkRows:
            assert how.session is not None, "who has no session asks for pandas"
            if not rows:
                rows.append(stack.enter_context(on_spark(how.session(), tables)))
            return rows[0]

        far = Paced(how.say)
        for place, suite in enumerate(suites, 1):
            far(partial("looking: suite {} of {}, {}".format, place, len(suites), suite.name))
            why = made.why_not(suite)
            looked = _skipped(suite, why) if why else _evaluated(suite, made, expectations, how, spark_rows)
            report.looked.append(looked)
            _write(home, report, looked)  # who is broken off leaves what was found
        expectations.prune(how.keep)
        report.docs = expectations.build_docs()
    return report


def _skipped(suite: Suite, why: str) -> SuiteRun:
    findings = (Finding(suite.name, one.name, one.severity.value, SKIPPED, why=why) for one in suite.expectations)
    return SuiteRun(suite.name, "", 0, 0, tuple(findings))


def _evaluated(
    suite: Suite, made: DerivedTables, expectations: Expectations, how: _Evaluation, spark_rows: Callable[[], SparkRows]
) -> SuiteRun:
    began = time.monotonic()
    try:
        made.make(suite)
    except DAMAGED as error:  # what it is worked out from is damaged itself
        why = f"it cannot be worked out: {error!r}"[:400]
        findings = (Finding(suite.name, one.name, one.severity.value, FAULT, why=why) for one in suite.expectations)
        return SuiteRun(suite.name, "", 0, round((time.monotonic() - began) * 1000), tuple(findings))
    if why := made.why_no_more(suite):
        return _skipped(suite, why)
    count = made.tables.count(suite.rows)
    large = how.session is not None and (how.engine == _SPARK or (how.engine is None and count >= SPARK_FROM_ROWS))
    frame = spark_rows().frame(suite.rows, suite.reads) if large else made.tables.frame(suite.rows)
    answers = expectations.evaluate(suite, frame)
    took_ms = round((time.monotonic() - began) * 1000)
    return SuiteRun(suite.name, _SPARK if large else _PANDAS, count, took_ms, tuple(_found(suite, one) for one in answers))


def _found(suite: Suite, one: Evaluated) -> Finding:
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


def _write(home: Home, report: Report, looked: SuiteRun) -> None:
    """Append what came of a suite to the tables."""
    same = {"run_id": report.run_id, "began_at_ms": report.at_ms}
    results: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    for one in looked.findings:
        known = {**same, "suite": one.suite, "expectation": one.expectation, "severity": one.severity}
        counted = {"outcome": one.outcome, "rows": one.rows, "failed": one.failed, "why": one.why or None}
        more = {"subject": report.subject, "engine": looked.engine or None, "took_ms": looked.took_ms}
        results.append({**known, **counted, **more})
        for key, says in one.examples:
            failures.append({**known, "row_key": json.dumps(key, default=str), "detail": json.dumps(says, default=str)})
    for table, rows in ((QUALITY_RESULTS, results), (QUALITY_FAILURES, failures)):
        delta.create(home, table)
        if rows:
            delta.append_of(home, table, delta.to_table(table, rows), {})


@contextmanager
def lazy_session(home: Home, size: "SparkResources") -> Iterator[Session]:
    """Give what starts a Spark session when it is first asked for one, and stops it at the end."""
    from batch.common.spark_session import batch_session

    with ExitStack() as stack:
        started: list[SparkSession] = []

        def session() -> "SparkSession":
            if not started:
                started.append(stack.enter_context(batch_session(home, size)))
            return started[0]

        yield session
