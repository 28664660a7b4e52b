"""Transitions and amendments of devices as `core` judgements, read from the table."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from fleetpulse.core.judgements import CHANGES, Judgement, JudgementKind
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.tables import DEVICES, JUDGEMENTS, literals
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch, open_views_in, reading

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_CHANGES: Final = f"kind IN ({literals(CHANGES)})"
_INSTANTS: Final = {f"{column.name}_ms" for column in JUDGEMENTS.columns if column.type == "timestamp"}
_COLUMNS: Final = ", ".join(
    f"epoch_ms({name.removesuffix('_ms')}) AS {name}" if name in _INSTANTS else f'"{name}"'
    for name in (field.name for field in fields(Judgement))
)


def judgements_by_device(home: Home, device_ids: Sequence[str]) -> dict[str, list[Judgement]]:
    """Return the transitions, retractions and additions of each device, unordered."""
    with reading(home) as tables:
        return judgements_of(tables, device_ids)


def judgements_of(tables: "DuckDBPyConnection", device_ids: Sequence[str]) -> dict[str, list[Judgement]]:
    """Like `judgements_by_device`, but read judgements through an open connection."""
    sql = f"SELECT {_COLUMNS} FROM judgements WHERE {_CHANGES} AND list_contains(?, device_id)"
    by_device: dict[str, list[Judgement]] = {device_id: [] for device_id in device_ids}
    for row in fetch(tables, sql, [list(device_ids)]):
        by_device[row["device_id"]].append(_judgement(row))
    return by_device


@contextmanager
def reading_device(home: Home, device_id: str) -> "Iterator[DuckDBPyConnection]":
    """Open the history of one device: its rows in ``judgements``, with the views, and in ``devices``.

    Of the judgements about messages, only refusals are included. The files are read once, however many
    queries follow.
    """
    with reading(home, (JUDGEMENTS.name, DEVICES.name), device_id=device_id, views=False) as tables:
        tables.execute(f"CREATE TEMP TABLE own AS SELECT * FROM judgements WHERE {_CHANGES} OR kind = 'refused'")
        tables.execute("CREATE OR REPLACE VIEW judgements AS FROM own")
        open_views_in(tables)
        yield tables


def _judgement(row: dict[str, Any]) -> Judgement:
    enums = {"from_mode": Mode, "to_mode": Mode, "trigger": Trigger}
    read = {name: enum(row[name]) if row[name] else None for name, enum in enums.items()}
    errors = tuple(json.loads(row["last_errors"] or "[]"))
    return Judgement(**{**row, **read, "kind": JudgementKind(row["kind"]), "last_errors": errors})
