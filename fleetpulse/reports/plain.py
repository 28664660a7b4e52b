"""Conversion of the rows of reports to values of JSON, for the command line and the HTTP API.

Rule: an instant becomes ISO 8601 in UTC, under its name without ``_ms``; a duration stays a number.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from fleetpulse.core.catalog import TABLES
from fleetpulse.core.times import format_instant

DURATIONS: Final = frozenset(
    {
        "covered_ms",
        "runtime_ms",
        "late_by_ms",
        "lasted_ms",
        "span_ms",
        "moved_by_ms",
        "clock_offset_ms",
        "timeout_ms",
        "death_grace_ms",
        "duration_ms",
        "latency_ms",
        "median_ms",
        "shortest_ms",
        "longest_ms",
        "for_ms",
    }
)  # the other *_ms are instants
_INSTANTS: Final = frozenset(column.name for table in TABLES for column in table.columns if column.type == "timestamp")


def instant_ms(moment: datetime) -> int:
    """Return epoch milliseconds of an aware moment."""
    return round(moment.timestamp() * 1000)


def plain(value: Any, name: str = "") -> Any:
    """Return a value for JSON: an instant becomes ISO 8601 in UTC."""
    if isinstance(value, datetime):
        return format_instant(instant_ms(value))
    if name == "last_errors":
        return json.loads(value) if value else []
    return value


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for JSON; an instant ``<name>_ms`` becomes ``<name>``."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name.endswith("_ms") and name not in DURATIONS:
            found[name.removesuffix("_ms")] = None if value is None else format_instant(value)
        else:
            found[name] = plain(value, name)
    return found


def plain_levels(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with rows in its values for JSON, such as an explanation of `why`; see `plain_row`."""
    shown = plain_row(found)
    for name, value in found.items():
        if isinstance(value, dict):
            shown[name] = plain_row(value)
        elif isinstance(value, list):
            shown[name] = [plain_row(one) for one in value]
    return shown


def numbered_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for JSON whose instants are numbers: ``<name>`` becomes ``<name>_ms``, epoch milliseconds."""
    return {f"{name}_ms" if name in _INSTANTS else name: _number(value) for name, value in row.items()}


def _number(value: Any) -> Any:
    return instant_ms(value) if isinstance(value, datetime) else value
