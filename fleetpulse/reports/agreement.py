"""Comparison of the job's judgements with those of the definition, `core.replay`.

Rule: all columns are compared, except the time of writing and the generation.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from fleetpulse.core.judgements import COMPARED, compared
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Row
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query

Bag = Counter[tuple[Any, ...]]
AS_COMPARED: Final = ", ".join(  # SQL select list over judgements: the columns of `COMPARED`
    f"epoch_ms({name.removesuffix('_ms')}) AS {name}"
    if name.endswith("_ms") and name not in ("runtime_ms", "late_by_ms")
    else f'"{name}"'
    for name in COMPARED
)


def emitted(home: Home) -> Bag:
    """Return the judgements that the job emitted, as a bag of `COMPARED` values."""
    rows = query(home, f"SELECT {AS_COMPARED} FROM judgements WHERE kind NOT IN ('summary', 'retract', 'add')")
    return Counter(tuple({**row, "last_errors": tuple(json.loads(row["last_errors"] or "[]"))}.values()) for row in rows)


def defined(rows: Iterable[Row], deployment: Deployment) -> Bag:
    """Return the judgements of the definition for rows, as a bag of `COMPARED` values."""
    return compared(replay(rows, deployment))


def differences(emitted: Bag, defined: Bag) -> list[dict[str, Any]]:
    """Return the judgements that only one of two bags has.

    Args:
        emitted: judgements that the job emitted.
        defined: judgements of the definition.

    Returns:
        One row for each: the columns of `COMPARED`, and ``side``: ``emitted`` (emitted only) or
        ``defined``.
    """
    sides = {"emitted": emitted - defined, "defined": defined - emitted}
    return [{"side": side, **dict(zip(COMPARED, one, strict=True))} for side, bag in sides.items() for one in bag.elements()]
