"""Transitions and amendments of devices as `core` judgements, read from the table."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from fleetpulse.core.judgements import Judgement, JudgementKind
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query

_INSTANTS: Final = {f"{column.name}_ms" for column in JUDGEMENTS.columns if column.type == "timestamp"}
_COLUMNS: Final = ", ".join(
    f"epoch_ms({name.removesuffix('_ms')}) AS {name}" if name in _INSTANTS else f'"{name}"'
    for name in (field.name for field in fields(Judgement))
)


def judgements_by_device(home: Home, device_ids: Sequence[str]) -> dict[str, list[Judgement]]:
    """Return the transitions, retractions and additions of each device, unordered."""
    found = query(
        home,
        f"SELECT {_COLUMNS} FROM judgements WHERE kind IN ('transition', 'retract', 'add') AND list_contains(?, device_id)",
        [list(device_ids)],
    )
    by_device: dict[str, list[Judgement]] = {device_id: [] for device_id in device_ids}
    for row in found:
        by_device[row["device_id"]].append(_judgement(row))
    return by_device


def _judgement(row: dict[str, Any]) -> Judgement:
    enums = {"from_mode": Mode, "to_mode": Mode, "trigger": Trigger}
    read = {name: enum(row[name]) if row[name] else None for name, enum in enums.items()}
    errors = tuple(json.loads(row["last_errors"] or "[]"))
    return Judgement(**{**row, **read, "kind": JudgementKind(row["kind"]), "last_errors": errors})
