"""``fleet backtest``: what would have been said under another policy."""

import errno
import os
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cli.common.dry_run import DryRun, Read, print_dry_run
from cli.common.options import DEFAULT_HOME, DryOption, HomeOption
from cli.common.output import as_json, as_table, console, say
from fleetpulse.core.errors import FleetError
from fleetpulse.core.times import format_duration, format_instant, parse_instant_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.process import block_imports

if TYPE_CHECKING:
    from batch.backtest import Planned

_SHOWN = 20  # rows of a table; --json and --html have all
_DAYS = 14


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("backtest")(backtest)


def backtest(
    policy: Annotated[Path, typer.Option("--policy", help="The policy to try (TOML).")],
    home: HomeOption = DEFAULT_HOME,
    from_: Annotated[
        str | None,
        typer.Option("--from", help="It acts and is compared from this instant on; else from the start of what is kept."),
    ] = None,
    to: Annotated[str | None, typer.Option("--to", help="Compare up to this instant; else all that can be judged.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="The figures as one JSON object.")] = False,
    verdicts: Annotated[bool, typer.Option("--verdicts", help="Each verdict that differs, one JSON object a line.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page with charts there; it stands alone.")] = None,
    spark: Annotated[
        bool | None, typer.Option("--spark/--no-spark", help="On Spark or in this process; else by how long the history is.")
    ] = None,
    dry_run: DryOption = False,
) -> None:
    """Judge what was received under another policy, and show which verdicts that adds, takes away and moves."""
    block_imports("pandas")  # most of a second, of the two or three that a short history takes; Spark gets it back
    from batch.backtest import backtest as run
    from batch.backtest import planned
    from cli.common.policy_files import policy_of

    opened = Home(home)
    opened.record()
    asked = policy_of(policy, None)
    bounds = [None if text is None else parse_instant_ms(text) for text in (from_, to)]
    if html is not None:
        _require_writable(html)
    if dry_run:
        plan = planned(opened, asked, bounds[0], bounds[1], spark=spark)
        does, more = _foreseen(opened, plan), (Read(f'the policy in "{policy}", version {asked.version}'),)
        print_dry_run(DryRun(does, (*_read_by(plan), *more), _written(plan, html)), json_lines=json_lines or verdicts)
        return
    with Console(stderr=True).status("judging"):
        answer = run(opened, asked, bounds[0], bounds[1], spark=spark, say=say)
    if html is not None:
        from fleetpulse.reports.backtest_html import page

        _write(html, page(answer.figures))
    if verdicts:
        from fleetpulse.reports.backtest import verdicts as differing

        as_json(differing(answer.found))
    elif json_lines:
        as_json([answer.figures.plain()])
    else:
        _show(answer.figures, html)


def _foreseen(home: Home, plan: "Planned") -> str:
    """Say what would be compared.

    Raises:
        FleetError: nothing of the range can be judged yet.
    """
    from fleetpulse.reports.judgements import shards

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
    return (*page, f'a folder of Spark\'s in "{gettempdir()}", removed at the end') if plan.on_spark else page


def _require_writable(path: Path) -> None:
    """See that a page can be written, before all is judged for it.

    Raises:
        FleetError: it cannot.
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


def _show(told: Any, html: Path | None) -> None:
    shown = console()
    shown.print(
        f"policy {told.policy_version} beside the policies in force, {told.rows:,} rows, "
        f"{format_instant(told.from_ms)} to {format_instant(told.to_ms)}",
        highlight=False,
    )
    changes = ", ".join(f"{count:,} {change}" for change, count in told.changes.items())
    if told.moved_by_ms is not None:
        way = "later" if told.moved_by_ms >= 0 else "earlier"
        changes += f" (by {format_duration(abs(round(told.moved_by_ms)))} {way}, the median)"
    shown.print(f"verdicts: {changes}", highlight=False)
    shown.print(f"alerts: {told.alerts('before'):,} before, {told.alerts('after'):,} after", highlight=False)
    for rows, name, title in (
        (told.by_mode, "to_mode", "transitions by mode"),
        (told.others, "kind", "not judged"),
    ):
        if rows:
            shown.print(as_table(rows, (name, "before", "after"), title))
    for rows, name in ((told.by_class, "device_class"), (told.by_site, "site")):
        if rows:
            more = f", the {_SHOWN} with most" if len(rows) > _SHOWN else ""
            title = f"verdicts that differ by {name.replace('_', ' ')}{more}"
            shown.print(as_table(rows[:_SHOWN], (name, "added", "gone", "moved"), title))
    differing = [day for day in told.by_day if day["before"] != day["after"]]
    if differing:
        differing.sort(key=lambda day: (-abs(day["after"] - day["before"]), day["day"]))
        title = f"alerts a day, the {min(_DAYS, len(differing))} days of {len(told.by_day)} that differ most"
        shown.print(as_table(sorted(differing[:_DAYS], key=lambda day: day["day"]), ("day", "before", "after"), title))
    if html is not None:
        shown.print(f'with charts in "{html}"', highlight=False)
