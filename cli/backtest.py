"""``fleet backtest``: what would have been said under another policy."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cli.options import DEFAULT_HOME, HomeOption
from cli.output import as_json, as_table, console
from fleetpulse.core.errors import FleetError
from fleetpulse.core.times import format_duration, format_instant, parse_instant_ms
from fleetpulse.io.home import Home
from fleetpulse.io.process import do_without

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
) -> None:
    """Judge what was received under another policy, and show which verdicts that adds, takes away and moves."""
    do_without("pandas")  # most of a second, of the two or three that a short history takes; Spark gets it back
    from batch.backtest import backtest as run
    from cli.main import policy_of

    opened = Home(home)
    opened.record()
    asked = policy_of(policy, None)
    bounds = [None if text is None else parse_instant_ms(text) for text in (from_, to)]
    with console().status("judging") if not (json_lines or verdicts) else _nothing():
        answer = run(opened, asked, bounds[0], bounds[1], spark=spark)
    if html is not None:
        from fleetpulse.ops.backtest_page import page

        _write(html, page(answer.figures))
    if verdicts:
        from fleetpulse.ops.backtest import verdicts as differing

        as_json(differing(answer.found))
    elif json_lines:
        as_json([answer.figures.plain()])
    else:
        _show(answer.figures, html)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FleetError(f'"{path}" cannot be written ({error.strerror}); name another file with --html') from None


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
