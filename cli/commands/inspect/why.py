"""``fleet why``: why a device is in its mode."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.common.options import DEFAULT_HOME, HomeOption, RowsOption
from cli.common.output import as_json, as_table, console
from fleetpulse.core.lifecycle import Trigger
from fleetpulse.core.times import DAY_MS, format_duration, format_instant, parse_instant_ms
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import Home
from fleetpulse.reports.plain import plain_levels, plain_row

if TYPE_CHECKING:
    from rich.console import Console

_ROWS = ("role", "received_at", "event_time", "kind", "device_id", "site", "seq", "boot", "code", "firmware", "gateway", "body")
_AMENDED = ("kind", "event_time", "from_mode", "to_mode", "trigger", "reason")
_NEXT = {  # deadlines that lead to a mode which depends on the facts about the device
    Trigger.UNTIL: "end of maintenance or update",
    Trigger.RECOVERED: "end of the count of errors",
    Trigger.HOLD_OVER: "end of the flag",
    Trigger.SESSION_OVER: "end of the session that is held for review",
}
_LATE = ("received_at", "event_time", "message_kind", "seq", "late_by_ms")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("why")(why)


def why(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Id of the device.")],
    at: Annotated[str | None, typer.Option("--at", help="Explain the mode at this instant (2026-01-31T12:00:00Z).")] = None,
    home: HomeOption = DEFAULT_HOME,
    json_lines: RowsOption = False,
) -> None:
    """Explain the mode of a device: reason, arithmetic, messages, rule, and what would have prevented it."""
    from fleetpulse.reports.why import why as run

    opened = Home(home)
    opened.record()  # raises if there is no fleet
    at_ms = None if at is None else parse_instant_ms(at)
    found = run(opened, device, judged_ms(opened.checkpoint), at_ms)
    if json_lines:
        as_json([plain_levels(found)])
        return
    _show(console(), found)


def _show(shown: "Console", found: Mapping[str, Any]) -> None:
    since_ms: int | None = found["since_ms"]
    since = "" if since_ms is None else f" since {format_instant(since_ms)}"
    _print(shown, f"{found['device_id']} is {found['mode']}{since}: {found['sentence']}")
    if found["terms"]:
        shown.print()
        for place, term in enumerate(found["terms"]):
            _print(shown, _term(term, is_first=place == 0))
    if found["evidence"]:
        rows = [plain_row(row) for row in found["evidence"]]
        columns = [name for name in _ROWS if any(row.get(name) is not None for row in rows)]
        shown.print(as_table(rows, columns, "messages and other rows"))
    if rule := found["rule"]:
        from_ms = rule["in_force_since_ms"]
        in_force = "in force from the start" if from_ms is None else f"in force since {format_instant(from_ms)}"
        text = f"rule: {rule['key']}: {rule['value']} ({rule['of']}), {in_force}, policy {rule['policy_version']}"
        _print(shown, text)
    if since_ms is not None and (judged := found["judged"]):
        _print(shown, _judged(judged, since_ms))
    for rows, columns, title in (
        (found["late"], _LATE, "late messages that the amendment counts, newest first"),
        (found["amendments"], _AMENDED, "amendments of this life"),
    ):
        if rows:
            shown.print(as_table([plain_row(row) for row in rows], columns, title))
    if found["otherwise"]:
        _print(shown, f"{found['otherwise']}.")
    if coming := found["next"]:
        what = coming["mode"] or _NEXT[coming["trigger"]]
        _print(shown, f"next: {what} at {format_instant(coming['at_ms'])}, unless a message changes it")
    if found["note"]:
        _print(shown, f"note: {found['note']}")


def _print(shown: "Console", text: str) -> None:
    shown.print(text, markup=False, highlight=False, soft_wrap=True)


def _term(term: Mapping[str, Any], *, is_first: bool) -> str:
    if "at_ms" in term:
        return f"  {' ' if is_first else '='} {format_instant(term['at_ms']):<24}  {term['meaning']}"
    return f"  + {format_duration(term['span_ms']):<24}  {term['meaning']}"


def _judged(judged: Mapping[str, Any], since_ms: int) -> str:
    delay_ms = judged["judged_at_ms"] - since_ms
    later = f" ({format_duration(delay_ms // 1000 * 1000)} later)" if 0 <= delay_ms < DAY_MS else ""  # more of a recording
    parts = [f"{name} {judged[name]:,}" for name in ("generation", "batch") if judged[name] is not None]
    return ", ".join([f"judged: {format_instant(judged['judged_at_ms'])}{later}", *parts])
