"""``fleet availability``: share of covered time that devices spent in each mode."""

from datetime import UTC, date, datetime
from typing import Annotated, Any, Final

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, RowsOption
from cli.common.output import as_json, as_table, console
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.times import DAY_MS, format_duration, format_instant
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import Home

_SHOWN: Final = 50  # rows of the printed table; --json prints all
_GROUPS: Final = {"site": ("site", "device_class"), "device": ("device_id", "site", "device_class")}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("availability")(availability)


def availability(
    day: Annotated[str, typer.Option("--day", help="Day in UTC, such as 2026-01-31.")],
    home: HomeOption = DEFAULT_HOME,
    by: Annotated[str, typer.Option("--by", help="One row per 'site' and class, or per 'device'.")] = "site",
    json_lines: RowsOption = False,
) -> None:
    """Show the share of a day that devices spent in each mode.

    Coverage gaps, in which no bridge was listening, are excluded.
    """
    from fleetpulse.reports import frontiers
    from fleetpulse.reports.history.availability import COUNTED, CoveredSpans, Span
    from fleetpulse.reports.history.availability import availability as shares

    if by not in _GROUPS:
        raise Misuse(f'--by must be one of {", ".join(_GROUPS)}; got "{by}"', code="option-invalid")
    opened = Home(home)
    opened.record()
    start_ms = _start_ms(day)
    judged = judged_ms(opened.checkpoint)
    known = frontiers.shards(opened, judged)
    frontier_ms = known.frontier_ms if known is not None and judged is not None else frontiers.frontier_ms(opened, judged)
    deployment = opened.deployment()
    judged_to_ms = None if frontier_ms is None else deployment.emitted_through_ms(frontier_ms)  # later verdicts may be delayed
    if known is None or judged_to_ms is None or judged_to_ms <= start_ms:
        reached = "nothing" if judged_to_ms is None else f"only the time up to {format_instant(judged_to_ms)}"
        raise FleetError(
            f'cannot show --day {day}: {reached} is judged in "{home}"; name an earlier day, or try again later',
            code="day-not-judged",
        )
    span = Span(start_ms, min(start_ms + DAY_MS, judged_to_ms))
    when = CoveredSpans.within(known, span, deployment.verdict_jitter_ms)
    rows = [{"day": day, **row} for row in shares(opened, when, _GROUPS[by])]
    if json_lines:
        as_json([{"judged_to_ms": judged_to_ms, **row} for row in rows])
        return
    covered_ms = max(sum(part.to_ms - part.from_ms for part in parts) for parts in when.parts)
    console().print(f"{day}: covered time {format_duration(covered_ms // 1000 * 1000)}, judged up to "
                    f"{format_instant(judged_to_ms)}", highlight=False)  # fmt: skip
    modes = [name for name in (*(mode.value for mode in COUNTED), "never_seen") if any(row[name] for row in rows)]
    if rows:
        columns = (*_GROUPS[by], "devices", "available", *modes)
        console().print(as_table([_shown(row) for row in rows[:_SHOWN]], columns, "share of covered time"))
    if len(rows) > _SHOWN:
        console().print(f"first {_SHOWN} of {len(rows):,} rows; print all with --json")


def _start_ms(day: str) -> int:
    try:
        found = date.fromisoformat(day)
    except ValueError:
        raise Misuse(f'--day must be a date; got "{day}"; write it like 2026-01-31', code="date-invalid") from None
    return int(datetime(found.year, found.month, found.day, tzinfo=UTC).timestamp()) * 1000


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {name: f"{100 * value:.2f} %" if isinstance(value, float) else value for name, value in row.items()}
