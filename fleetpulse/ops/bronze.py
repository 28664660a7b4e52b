"""Bronze as the core has it: rows of messages, of all devices or of some.

Rule: what concerns everybody comes with the rows of any device; ticks, of which there are many, are stood for by two.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from fleetpulse.core.messages import EVERYONE, Clock, Kind, Row
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.delta import files_of, query
from fleetpulse.io.home import Home

ROW: Final = ", ".join(
    f"epoch_ms({name.removesuffix('_ms')}) AS {name}" if name in ("received_at_ms", "event_time_ms") else name
    for name in (field.name for field in fields(Row))
)


def as_row(found: dict[str, Any]) -> Row:
    """Return a row that was selected by `ROW`."""
    return Row(**{**found, "kind": Kind(found["kind"]), "clock": Clock(found["clock"])})


def rows(home: Home, device_ids: Sequence[str] | None = None) -> list[Row]:
    """Return the rows of bronze: all, or those of some devices and those that may concern everybody, but for ticks."""
    where, parameters = "", []
    if device_ids is not None:
        everybody = "kind IN ('gap', 'policy') OR (kind = 'death' AND gateway = device_id)"
        where, parameters = f"WHERE list_contains(?, device_id) OR {everybody}", [list(device_ids)]
    return [as_row(one) for one in query(home, f"SELECT {ROW} FROM messages {where}", parameters, tables=["messages"])]


def rows_through(home: Home, device_ids: Sequence[str], through_ms: int | None) -> list[Row]:
    """Return the rows of some devices and those for everybody, up to an instant of ``received_at``; all where it is None."""
    listened = span(home)
    return [] if listened is None else through(rows(home, device_ids), listened, through_ms)


def through(rows_: list[Row], listened: tuple[int, int], through_ms: int | None) -> list[Row]:
    """Return rows up to an instant; two ticks stand for how far we have listened."""
    first_ms, last_ms = listened
    through_ms = last_ms if through_ms is None else min(through_ms, last_ms)
    ticks = [Row(at, Kind.TICK, EVERYONE, EVERYONE, at, Clock.RECEIVED) for at in (first_ms, through_ms)]
    return [row for row in rows_ if row.received_at_ms <= through_ms] + ticks


def span(home: Home) -> tuple[int, int] | None:
    """Return ``received_at`` of the first and of the newest row of bronze, from its log; None without rows."""
    files = [file for file in files_of(home, MESSAGES, "received_at") if file.rows != 0]
    if not files:
        return None
    if any(file.least is None or file.greatest is None for file in files):
        found = query(home, "SELECT min(received_at) AS a, max(received_at) AS z FROM messages", tables=["messages"])
        least, greatest = found[0]["a"], found[0]["z"]
    else:
        least, greatest = min(file.least for file in files), max(file.greatest for file in files)
    return round(least.timestamp() * 1000), round(greatest.timestamp() * 1000)
