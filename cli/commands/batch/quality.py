"""``fleet quality``: data-quality suites over tables and state, and their gate."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common.extras import require_installed
from cli.common.options import DEFAULT_HOME, HomeOption, JsonOption
from cli.common.output import as_json, as_table, console, report_progress
from cli.common.session_size import session_resources_of
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.quality.table_suites import SUITES
from fleetpulse.io.home.home import Home

if TYPE_CHECKING:
    from batch.quality.derived_tables import State
    from batch.quality.run import Report, Session

EngineOption = Annotated[str | None, typer.Option("--engine", help="pandas or spark, for all suites; by default by row count.")]
quality = typer.Typer(no_args_is_help=True, help="Run data-quality suites over tables and state, and show results.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(quality, name="quality")


@quality.command("run")
def run(
    home: HomeOption = DEFAULT_HOME,
    suite: Annotated[list[str] | None, typer.Option("--suite", help="Run only this suite; repeatable.")] = None,
    engine: EngineOption = None,
    json_object: JsonOption = False,
) -> None:
    """Run the suites over the tables and the newest snapshot.

    The exit code is 1 if a critical expectation fails.
    """
    from batch.quality.run import refuse
    from batch.quality.run import run as look
    from fleetpulse.settings import load_settings

    opened = _opened(home)
    with _sessions(opened, engine) as session:
        report = look(opened, suite or (), session, engine, load_settings(home).keep_quality_runs, report_progress)
    _show(report, json_object=json_object)
    refuse(report, "a critical expectation failed")


@quality.command("gate")
def gate(
    home: HomeOption = DEFAULT_HOME,
    generation: Annotated[int | None, typer.Option("--generation", help="Check this generation, held or current.")] = None,
    snapshot: Annotated[int | None, typer.Option("--snapshot", help="Check the snapshot of this version.")] = None,
    engine: EngineOption = None,
    json_object: JsonOption = False,
) -> None:
    """Check the quality of a generation or a snapshot before it is used.

    The exit code is 1 if a critical expectation fails.
    """
    from batch.quality.run import gate as look
    from batch.quality.run import refuse
    from fleetpulse.settings import load_settings

    if (generation is None) == (snapshot is None):
        raise Misuse(
            "the gate checks either a generation or a snapshot; name one, such as --generation 2 or --snapshot 5",
            code="option-conflict",
        )
    opened = _opened(home)
    with _sessions(opened, engine) as session, _state(opened, session, generation, snapshot) as state:
        report = look(opened, state, session, engine, load_settings(home).keep_quality_runs, report_progress)
    _show(report, json_object=json_object)
    refuse(report, f"{state.subject} must not be used")


@contextmanager
def _state(home: Home, session: "Session", generation: int | None, snapshot: int | None) -> "Iterator[State]":
    from batch.quality.derived_tables import snapshot_state

    if generation is not None:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        from batch.common.spark_session import cause_of, plainly_named
        from batch.quality.gate import generation_state

        try:
            with plainly_named(home) as named, generation_state(session(), named, generation) as state:
                yield state
        except (PySparkException, Py4JError) as error:
            raise FleetError(
                f"generation {generation} cannot be read ({cause_of(error)}); it must not be used; see "
                f'"{home.logs / "batch.log"}"',
                code="generation-unreadable",
            ) from None
        return
    from fleetpulse.io.tables.snapshots import find_snapshot

    found = snapshot_state(home, find_snapshot(home, snapshot).version)
    assert found is not None, "find_snapshot raises if there is none"
    yield found


@quality.command("docs")
def docs(
    home: HomeOption = DEFAULT_HOME,
    anew: Annotated[bool, typer.Option("--anew", help="Build all pages, not only missing ones.")] = False,
) -> None:
    """Build missing HTML pages of the results, and print the path of the index page."""
    from fleetpulse.io.quality.great_expectations import Expectations

    typer.echo(str(Expectations(_opened(home).path / "quality", "").build_docs(rebuild_all=anew)))


@quality.command("results")
def results(
    home: HomeOption = DEFAULT_HOME,
    last: Annotated[int, typer.Option("--last", min=1, help="Number of runs, newest first.")] = 10,
    failures: Annotated[bool, typer.Option("--failures", help="Show failed rows instead.")] = False,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each expectation.")] = False,
) -> None:
    """Show the results of the newest quality runs."""
    from fleetpulse.reports.operations.quality import failed_rows, quality_runs, results_of

    opened = _opened(home, installs=False)
    if failures:
        rows, columns, title = (
            failed_rows(opened, last),
            ("began_at", "suite", "expectation", "row_key", "detail"),
            "rows that failed",
        )
    elif json_lines:
        rows, columns, title = results_of(opened, last), (), ""
    else:
        columns, title = ("began_at", "subject", "suites", "passed", "failed", "skipped", "fault", "first"), "data-quality runs"
        rows = quality_runs(opened, last)
    if json_lines:
        as_json(rows)
    elif rows:
        console().print(as_table(rows, columns, title))
    else:
        console().print(f"{title}: none; start one with: ./fleet quality run --home {home}")


@quality.command("suites")
def suites(json_lines: JsonOption = False) -> None:
    """List the suites and their expectations."""
    rows: list[dict[str, Any]] = [
        {"suite": one.name, "expectation": each.name, "severity": each.severity.value, "meaning": each.meaning}
        for one in SUITES
        for each in one.expectations
    ]
    if json_lines:
        as_json(rows)
        return
    console().print(as_table(rows, tuple(rows[0]), "suites"))


def _opened(path: Path, *, installs: bool = True) -> Home:
    """Open a home, and check that Great Expectations is installed.

    Raises:
        FleetError: the home does not exist, or Great Expectations is not installed.
    """
    home = Home(path.absolute())  # executors have other working directories
    home.record()
    if installs:
        require_installed()
    return home


@contextmanager
def _sessions(home: Home, engine: str | None) -> "Iterator[Session]":
    from batch.quality.run import lazy_session

    if engine not in (None, "pandas", "spark"):
        raise Misuse(f'--engine is pandas or spark; got "{engine}"', code="option-invalid")
    with lazy_session(home, session_resources_of(home)) as session:
        yield session


def _show(report: "Report", *, json_object: bool) -> None:
    if json_object:
        as_json([report.plain()])
        return
    rows = [
        {
            "suite": one.suite,
            "engine": one.engine,
            "rows": f"{one.rows:,}",
            "outcome": _outcome(one),
            "took": f"{one.took_ms / 1000:.2g} s",
        }
        for one in report.suite_runs
    ]
    shown = console()
    shown.print(as_table(rows, ("suite", "engine", "rows", "outcome", "took"), f"data quality of {report.subject}"))
    for one in report.findings():
        if one.outcome in ("failed", "fault") and not one.fails_gate:
            shown.print(f"warning: {one.sentence()}", highlight=False, markup=False)
    if report.docs is not None:
        shown.print(f"pages: {report.docs}", highlight=False, soft_wrap=True)


def _outcome(suite_run: Any) -> str:
    failed = [f"{one.expectation} ({one.failed:,})" for one in suite_run.findings if one.outcome == "failed"]
    faults = [f"{one.expectation} (not evaluated)" for one in suite_run.findings if one.outcome == "fault"]
    if failed or faults:
        return ", ".join([*failed, *faults])
    first = suite_run.findings[0] if suite_run.findings else None
    return f"skipped: {first.why}" if first is not None and first.outcome == "skipped" else "passed"
