"""Late messages and copies of hostile devices, as judgements and as rows of the job."""

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fleetpulse.columnar.fold.judgement_batches import judgements_to_batch, sum_repeats
from fleetpulse.core.judgements import COMPARED, SUMMED, Judgement, JudgementKind, message_judgement
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.rows import FROM_DEVICES, Row
from fleetpulse.core.times import MINUTE_MS

FIRST_MS = 1_700_000_000_000 // MINUTE_MS * MINUTE_MS
UNTIL_MS = FIRST_MS + 10 * MINUTE_MS  # after all messages of `flood`
_OTHERS = [kind for kind in SUMMED if kind is not JudgementKind.LATE]
_ENUMS: dict[str, Any] = {"from_mode": Mode, "to_mode": Mode, "trigger": Trigger}


def flood(chance: random.Random, count: int, spread_ms: int = 2 * MINUTE_MS, devices: str = "a") -> list[Judgement]:
    """Return judgements about late messages and copies, in the order in which a job emits them."""
    listed: list[Judgement] = []
    for number in range(count):
        at_ms = FIRST_MS + chance.randrange(spread_ms)
        event_ms = None if chance.random() < 0.05 else at_ms - chance.randrange(10**9)
        kind = JudgementKind.LATE if event_ms is not None and chance.random() < 0.5 else chance.choice(_OTHERS)
        row = Row(at_ms, chance.choice(sorted(FROM_DEVICES)), chance.choice(devices), "s", event_ms, boot="b", seq=number)
        listed.append(message_judgement(row, kind, "why", chance.randrange(10**6) if kind is JudgementKind.LATE else None))
    return sorted(listed, key=_emitted_at)


def _emitted_at(one: Judgement) -> tuple[int, int]:
    received_ms = one.received_at_ms or 0
    if one.kind in (JudgementKind.LATE, JudgementKind.CLOCK) or one.event_time_ms is None:
        return received_ms, received_ms
    return min(one.event_time_ms, received_ms), received_ms


def summed(judgements: Sequence[Judgement], until_ms: int = UNTIL_MS) -> list[Judgement]:
    """Return the judgements of one call as the job writes them."""
    found: list[Judgement] = []
    for one in sum_repeats(judgements_to_batch(judgements), until_ms).to_pylist():
        enums = {name: enum(one[name]) if one[name] else None for name, enum in _ENUMS.items()}
        errors = tuple(json.loads(one["last_errors"] or "[]"))
        found.append(Judgement(**{**one, **enums, "kind": JudgementKind(one["kind"]), "last_errors": errors}))
    return found


def bag(rows: Iterable[Mapping[str, Any]]) -> Counter[Any]:
    """Return judgement rows as a multiset, in the form of `agreement.emitted`."""
    found = Counter[Any]()
    for row in rows:
        values = {**row, "last_errors": tuple(json.loads(row["last_errors"] or "[]"))}
        if row["messages"] is not None:
            values = {name: row[name] for name in ("kind", "device_id", "message_kind")}
            values["received_at_ms"] = row["received_at_ms"] // MINUTE_MS * MINUTE_MS
        found[tuple(values.get(name) for name in COMPARED)] += row["messages"] or 1
    return found
