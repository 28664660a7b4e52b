"""``fleet backtest``: verdicts under another policy, compared with those in force."""

import errno
import os
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cli.common.dry_run import DryRun, Read, print_dry_run
from cli.common.options import DEFAULT_HOME, DryOption, HomeOption
from cli.common.output import as_json, as_table, console, report_progress
from fleetpulse.core.errors import FleetError
from fleetpulse.core.times import format_duration, format_instant, parse_instant_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.process import block_imports

if TYPE_CHECKING:
    from batch.backtest import Planned

_SHOWN = 20  # rows per printed table; --json and --html have all
_DAYS = 14


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("backtest")(backtest)


def backtest(
    policy: Annotated[Path, typer.Option("--policy", help="Policy file to test (TOML).")],
    home: HomeOption = DEFAULT_HOME,
    from_: Annotated[
        str | None,
        typer.Option("--from", help="Start of the policy and of the comparison; by default that of the retained rows."),
    ] = None,
    to: Annotated[str | None, typer.Option("--to", help="End of the comparison; by default the frontier.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
    verdicts: Annotated[bool, typer.Option("--verdicts", help="Print each difference, one JSON object a line.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a self-contained page with charts to this file.")] = None,
    spark: Annotated[
        bool | None, typer.Option("--spark/--no-spark", help="Run on Spark, or in this process; by default by history length.")
    ] = None,
    dry_run: DryOption = False,
) -> None:
    """Replay the received messages under another policy, and compare the verdicts.

    The output shows which verdicts the policy would add, remove and move.
    """
    block_imports("pandas")  # importing it takes nearly a second; it is unblocked for Spark
    from batch.backtest import backtest as run
    from batch.backtest import planned
    from cli.common.policy_files import policy_of

    opened = Home(home)
    opened.record()
    chosen_policy = policy_of(policy, None)
    bounds = [None if text is None else parse_instant_ms(text) for text in (from_, to)]
    if html is not None:
        _require_writable(html)
    if dry_run:
        plan = planned(opened, chosen_policy, bounds[0], bounds[1], spark=spark)
        does, more = _describe_comparison(opened, plan), (Read(f'the policy file "{policy}", version {chosen_policy.version}'),)
        print_dry_run(DryRun(does, (*_read_by(plan), *more), _written(plan, html)), json_lines=json_lines or verdicts)
        return
    with Console(stderr=True).status("judging"):
        result = run(opened, chosen_policy, bounds[0], bounds[1], spark=spark, report=report_progress)
    if html is not None:
        from fleetpulse.reports.backtests.backtest_html import page

        _write(html, page(result.figures))
    if verdicts:
        from fleetpulse.reports.backtests.backtest import verdicts as differing

        as_json(differing(result.found))
    elif json_lines:
        as_json([result.figures.plain()])
    else:
        _show(result.figures, html)


def _describe_comparison(home: Home, plan: "Planned") -> str:
    """Describe the comparison, for a dry run.

    Raises:
        FleetError: the frontier has not reached the range yet.
    """
    from fleetpulse.reports.frontiers import shards

    landed = shards(home, None)
    bounds = (plan.begin_ms, plan.end_ms(home, landed.frontier_ms if landed else None))
    span = " to ".join(map(format_instant, bounds))
    where = "on Spark" if plan.on_spark else "in this process"
    return f"judge {plan.rows:,} messages twice, {where}, and compare the verdicts of {span}"


def _read_by(plan: "Planned") -> tuple[Read, ...]:
    files = {piece.path for piece in plan.pieces}
    return (Read("messages", len(files), plan.rows, None, plan.question.started_ms, plan.question.newest_ms),)


def _written(plan: "Planned", html: Path | None) -> tuple[str, ...]:
    page = () if html is None else (f'the page "{html}"',)
    return (*page, f'Spark\'s temporary folder in "{gettempdir()}"') if plan.on_spark else page


def _require_writable(path: Path) -> None:
    """Check that a page can be written, before the messages are replayed for it.

    Raises:
        FleetError: the page cannot be written.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise _cannot_be_written(path, os.strerror(errno.EISDIR))
    if not folder.is_dir():
        raise _cannot_be_written(path, os.strerror(errno.ENOTDIR if folder.exists() else errno.ENOENT))
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise _cannot_be_written(path, os.strerror(errno.EACCES))


def _cannot_be_written(path: Path, why: str | None) -> FleetError:
    return FleetError(f'"{path}" cannot be written ({why}); name another file with --html', code="page-unwritable")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _cannot_be_written(path, error.strerror) from None


def _show(result: Any, html: Path | None) -> None:
    shown = console()
    shown.print(
        f"policy {result.policy_version} compared with the policies in force: {result.rows:,} rows, "
        f"{format_instant(result.from_ms)} to {format_instant(result.to_ms)}",
        highlight=False,
    )
    changes = ", ".join(f"{count:,} {change}" for change, count in result.changes.items())
    if result.moved_by_ms is not None:
        way = "later" if result.moved_by_ms >= 0 else "earlier"
        changes += f" (median: {format_duration(abs(round(result.moved_by_ms)))} {way})"
    shown.print(f"verdicts: {changes}", highlight=False)
    shown.print(f"alerts: {result.alerts('before'):,} before, {result.alerts('after'):,} after", highlight=False)
    for rows, name, title in (
        (result.by_mode, "to_mode", "transitions by mode"),
        (result.others, "kind", "not judged"),
    ):
        if rows:
            shown.print(as_table(rows, (name, "before", "after"), title))
    for rows, name in ((result.by_class, "device_class"), (result.by_site, "site")):
        if rows:
            more = f", top {_SHOWN}" if len(rows) > _SHOWN else ""
            title = f"different verdicts by {name.replace('_', ' ')}{more}"
            shown.print(as_table(rows[:_SHOWN], (name, "added", "gone", "moved"), title))
    differing = [day for day in result.by_day if day["before"] != day["after"]]
    if differing:
        differing.sort(key=lambda day: (-abs(day["after"] - day["before"]), day["day"]))
        title = f"alerts per day: {min(_DAYS, len(differing))} of {len(result.by_day)} days, those with the largest difference"
        shown.print(as_table(sorted(differing[:_DAYS], key=lambda day: day["day"]), ("day", "before", "after"), title))
    if html is not None:
        shown.print(f'charts: "{html}"', highlight=False)
