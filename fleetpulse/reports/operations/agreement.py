"""Comparison of the job's judgements with those of the definition, `core.replay`.

Rule 1: all columns are compared, except the time of writing and the generation.
Rule 2: a row for several messages equals as many judgements of its group, see `_group_of`.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Final

from fleetpulse.core.judgements import COMPARED, SUMMED, compared
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Row
from fleetpulse.core.times import MINUTE_MS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query

Bag = Counter[tuple[Any, ...]]
AS_COMPARED: Final = ", ".join(  # SQL select list over judgements: the columns of `COMPARED`
    f"epoch_ms({name.removesuffix('_ms')}) AS {name}"
    if name.endswith("_ms") and name not in ("runtime_ms", "late_by_ms")
    else f'"{name}"'
    for name in COMPARED
)


_KIND, _DEVICE, _RECEIVED, _MESSAGE_KIND, _REASON = (
    COMPARED.index(name) for name in ("kind", "device_id", "received_at_ms", "message_kind", "reason")
)


def emitted(home: Home) -> Bag:
    """Return the judgements that the job emitted, as a bag of `COMPARED` values.

    A row for several messages is in the bag as the value of its group, once for each message, see
    `expanded`.
    """
    rows = query(home, f"SELECT {AS_COMPARED}, messages FROM judgements WHERE kind NOT IN ('summary', 'retract', 'add')")
    bag = Bag()
    for row in rows:
        messages = row.pop("messages")
        value = tuple({**row, "last_errors": tuple(json.loads(row["last_errors"] or "[]"))}.values())
        bag[value if messages is None else _group_of(value)] += messages or 1
    return bag


def _group_of(value: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the value of a group of judgements: kind, device, kind of message, and minute of ``received_at``."""
    known = {_KIND: value[_KIND], _DEVICE: value[_DEVICE], _MESSAGE_KIND: value[_MESSAGE_KIND]}
    known[_RECEIVED] = value[_RECEIVED] // MINUTE_MS * MINUTE_MS
    return tuple(known.get(place) for place in range(len(COMPARED)))


def _is_group(value: tuple[Any, ...]) -> bool:
    return value[_KIND] in SUMMED and value[_REASON] is None


def expanded(bag: Bag, other: Bag) -> Bag:
    """Return a bag with values of groups replaced by judgements that another bag has.

    Args:
        bag: bag of `COMPARED` values, see `emitted`.
        other: bag with the judgements that may be in these groups.

    Returns:
        The bag. The value of a group remains as often as the other bag has no judgement for it.
    """
    found, missing = bag.copy(), defaultdict[tuple[Any, ...], list[tuple[Any, ...]]](list)
    groups = {value for value in bag if _is_group(value)}
    for value in (other - bag).elements() if groups else ():
        if not _is_group(value) and value[_KIND] in SUMMED and (group := _group_of(value)) in groups:
            missing[group].append(value)
    for group, values in missing.items():
        taken = values[: bag[group]]
        found.update(taken)
        found[group] -= len(taken)
    return +found


def defined(rows: Iterable[Row], deployment: Deployment) -> Bag:
    """Return the judgements of the definition for rows, as a bag of `COMPARED` values."""
    return compared(replay(rows, deployment))


def differences(emitted: Bag, defined: Bag) -> list[dict[str, Any]]:
    """Return the judgements that only one of two bags has.

    Args:
        emitted: judgements that the job emitted.
        defined: judgements of the definition, or of another run.

    Returns:
        One row for each: the columns of `COMPARED`, and ``side``: ``emitted`` (emitted only) or
        ``defined``.
    """
    emitted, defined = expanded(emitted, defined), expanded(defined, emitted)
    sides = {"emitted": emitted - defined, "defined": defined - emitted}
    return [{"side": side, **dict(zip(COMPARED, one, strict=True))} for side, bag in sides.items() for one in bag.elements()]
