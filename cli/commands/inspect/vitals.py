"""``fleet vitals``: metrics of a device over windows."""

from typing import Annotated, Any, Final

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, RowsOption
from cli.common.output import as_json, as_table, console
from fleetpulse.core.times import format_duration, parse_instant_ms
from fleetpulse.io.home.home import Home
from fleetpulse.reports.plain import plain_row

_SHOWN: Final = 50  # rows of the printed table; --json prints all


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("vitals")(vitals)


def vitals(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Id of the device.")],
    metric: Annotated[str | None, typer.Option("--metric", help="Show this metric only.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="Show windows that end after this instant (2026-01-31T12:00:00Z).")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    json_lines: RowsOption = False,
) -> None:
    """Show metrics of a device over closed windows, newest first: count, min, max, mean and last value.

    The policy names the metrics and their windows. The setting streams must name vitals.
    """
    from fleetpulse.reports.streams.vitals import FIGURES, windows

    opened = Home(home)
    opened.record()  # raises if there is no fleet
    since_ms = None if since is None else parse_instant_ms(since)
    found = windows(opened, device, metric, since_ms, None if json_lines else _SHOWN + 1)
    if json_lines:
        as_json([plain_row(row) for row in found])
        return
    if not found:
        console().print(
            f'"{device}" has no closed window; expected "vitals" in the setting streams, and [vitals.METRIC] in the policy '
            f"in force"
        )
        return
    columns = ("metric", "window_start", "width", *FIGURES, "site", "late")
    console().print(as_table([_shown(row) for row in found[:_SHOWN]], columns, f"windows of {device}, newest first"))
    if len(found) > _SHOWN:
        console().print(f"first {_SHOWN} rows; print all with --json")


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    width = format_duration(row["window_end_ms"] - row["window_start_ms"])
    figures = {name: f"{value:.6g}" for name, value in row.items() if isinstance(value, float)}
    return plain_row(row) | figures | {"width": width, "late": "late" if row["late"] else ""}
