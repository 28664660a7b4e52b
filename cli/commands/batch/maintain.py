"""``fleet maintain``: compaction, retention and cleanup of a home while it runs."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console

from cli.common.options import DEFAULT_HOME, DryOption, HomeOption, RowsOption
from cli.common.output import as_json, as_table, console
from fleetpulse.core.monitoring.health import measure
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.home import Home


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("maintain")(maintain)


def maintain(
    home: HomeOption = DEFAULT_HOME,
    dry_run: DryOption = False,
    json_lines: RowsOption = False,
) -> None:
    """Compact small files, remove expired rows, and delete unused files.

    The fleet may keep running. The retention times are settings of the home (keep_messages and
    others).
    """
    opened = Home(home)
    opened.record()  # raises if there is no fleet
    rows: list[dict[str, Any]] = []
    shown = console()
    quiet = Console(stderr=True)
    with quiet.status("looking") as progress:
        for row in _steps(opened, quiet.print, dry_run=dry_run):
            progress.update(f"{row['table']}: {row['did']}")
            rows.append(row)
            if json_lines:
                as_json([row])
    if not json_lines:
        _show(shown, rows, dry_run=dry_run)


def _steps(home: Home, report: Callable[[str], None], *, dry_run: bool) -> Iterator[dict[str, Any]]:
    from batch.maintenance.maintain import maintain as run
    from batch.maintenance.plan import Keep
    from fleetpulse.settings import load_settings

    settings = load_settings(home.path)
    keep = Keep(
        messages_ms=settings.keep_messages,
        quarantine_ms=settings.keep_quarantine,
        stream_health_ms=settings.keep_stream_health,
        summaries_ms=settings.keep_summaries,
        late_ms=settings.keep_late,
        device_snapshots_ms=settings.keep_device_snapshots,
        quality_ms=settings.keep_quality,
        logs_ms=settings.keep_logs,
        replaced_ms=settings.keep_replaced,
        generations_ms=settings.keep_generations,
        audit_ms=settings.keep_audit,
        sessions_ms=settings.keep_sessions,
        vitals_ms=settings.keep_vitals,
        commands_ms=settings.keep_commands,
    )
    for step in run(home, keep, dry_run=dry_run, report=report):
        yield {**asdict(step), "dry_run": dry_run}
    yield from ({**row, "dry_run": dry_run} for row in _segments(home, dry_run=dry_run))


def _segments(home: Home, *, dry_run: bool) -> Iterator[dict[str, Any]]:
    """Delete landed segments that a killed landing left behind; yield one result row."""
    from streaming.landing.backlog import landed_segments
    from streaming.landing.landing import LANDED, landed_places

    if not all(holds_table(home.table(table.name)) for table in LANDED):
        return
    places = [landed_places(home, table) for table in LANDED]
    folders = {name: home.segments_of(name) for name in home.bridges()}
    files = landed_segments(folders, {name: min(one[name] for one in places) for name in folders})
    if files:
        size = sum(path.stat().st_size for path in files if path.exists())
        if not dry_run:
            for path in files:
                path.unlink(missing_ok=True)
        yield {"table": "segments", "did": "delete", "files": len(files), "size_bytes": size, "rows": 0, "note": "landed"}


def _show(shown: Console, rows: list[dict[str, Any]], *, dry_run: bool) -> None:
    done = [row for row in rows if row["did"] != "hold"]
    for row in rows:
        if row["did"] == "hold":
            shown.print(f"{row['table']}: {row['note']}")
    if not done:
        shown.print("nothing to do")
        return
    table = [{**row, "size": measure("size_bytes", row["size_bytes"]), "rows": f"{row['rows']:,}"} for row in done]
    title = "planned steps" if dry_run else "completed steps"
    shown.print(as_table(table, ("table", "did", "files", "size", "rows", "note"), title))
    deleted = sum(row["size_bytes"] for row in done if row["did"] == "delete")
    removed = sum(row["rows"] for row in done if row["did"] == "remove")
    verb = "would be" if dry_run else "were"
    shown.print(f"{measure('size_bytes', deleted)} {verb} deleted, {removed:,} rows {verb} removed")
