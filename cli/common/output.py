"""Output of rows: tables for people, NDJSON for programs."""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import typer

from fleetpulse.core.times import format_duration, format_instant
from fleetpulse.reports.plain import DURATIONS, instant_ms, plain_row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MODE_COLOURS: Final = {
    "online": "green",
    "degraded": "yellow",
    "offline": "red",
    "unreachable": "bright_magenta",
    "flagged": "magenta",
    "updating": "cyan",
    "maintenance": "cyan",
    "provisioned": "blue",
    "unjudged": "bright_black",
    "decommissioned": "bright_black",
    "forgotten": "bright_black",
}

TRANSITION_COLUMNS: Final = (
    "event_time",
    "device_id",
    "transition_no",
    "from_mode",
    "to_mode",
    "trigger",
    "site",
    "runtime_ms",
)
_WHOLE: Final = frozenset({"event_time", "since", "last_seen", "received_at", "from_mode", "to_mode", "mode", "trigger"})
_WIDTH_OF_FILES: Final = 160
_BRACKET: Final = re.compile(r"(\\*)\[(?=(?P<tag>[a-z#/@][^[]*?\])?)")  # Rich reads a tag, unless a backslash escapes it


def console() -> "Console":
    """Return a console, wide enough for one line per row if there is no terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_WIDTH_OF_FILES)


def report_progress(line: str) -> None:
    """Print a progress message to standard error; standard output is for results."""
    typer.echo(line, err=True)


def as_json(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print one JSON object a line."""
    for row in rows:
        sys.stdout.write(json.dumps(plain_row(row), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def cell(name: str, value: Any) -> str:
    """Return a value formatted for a cell of a table."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return format_instant(instant_ms(value)).replace("T", " ").removesuffix("Z")
    if name in DURATIONS:
        return ("-" if value < 0 else "") + format_duration(abs(int(value)))
    if name in ("mode", "from_mode", "to_mode"):
        return f"[{MODE_COLOURS.get(str(value), 'white')}]{value}[/]"
    return as_markup(str(value))


def as_shown(text: str) -> str:
    """Return a text with unprintable characters escaped, for output to a terminal."""
    return text if text.isprintable() else "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def as_markup(text: str) -> str:
    """Return a text for Rich that shows it unchanged: it has no tags, and its unprintable characters are escaped."""
    return _BRACKET.sub(lambda found: found[1] * (2 if found["tag"] else 1) + "\\[", as_shown(text))


def as_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    title: str,
    colours: Mapping[str, Mapping[str, str]] | None = None,
) -> "Table":
    """Return rows as a table for people.

    Args:
        rows: values of each row, by column name.
        columns: names of the shown columns, in order.
        title: title above the table.
        colours: colours of cell texts, by column name.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=as_markup(title), title_justify="left", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        heading = "no" if name == "transition_no" else name.removesuffix("_ms").replace("_", " ")
        table.add_column(heading, overflow="fold", no_wrap=name in _WHOLE)
    for row in rows:
        table.add_row(*(_coloured(cell(name, row.get(name)), (colours or {}).get(name, {})) for name in columns))
    return table


def _coloured(text: str, colours: Mapping[str, str]) -> str:
    return f"[{colours[text]}]{text}[/]" if text in colours else text


def show(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], title: str, *, json_lines: bool, left_out: str = "") -> None:
    """Print rows, as a table or as JSON lines.

    Args:
        rows: values of each row, by column name.
        columns: names of the shown columns, in order.
        title: title of the table.
        json_lines: whether to print JSON lines.
        left_out: note on omitted rows, printed below a table; empty if none are omitted.
    """
    if json_lines:
        as_json(rows)
        return
    shown = console()
    if not rows:
        shown.print(as_markup(f"{title}: none"))
        return
    shown.print(as_table(rows, columns, title))
    if left_out:
        shown.print(f"{left_out}; more with --last N, all with --json", highlight=False)
