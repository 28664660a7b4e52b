"""Histories for tests: rows as the pipeline would decode them, and what to compare."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from fleetpulse.core.judgements import Judgement, Verdict
from fleetpulse.core.messages import Origin, Row, decode

START = 1_700_000_000_000


def row(received_s: float, topic: str, **payload: Any) -> Row:
    """Decode one message; ``ts_s`` and other instants are seconds after START."""
    for name in ("ts", "until", "from", "after", "effective_from"):
        if f"{name}_s" in payload:
            payload[name] = START + int(payload.pop(f"{name}_s") * 1000)
    site_topic = topic if topic.startswith("fleet/") else f"fleet/site/{topic}"
    decoded = decode(site_topic, json.dumps(payload).encode(), START + int(received_s * 1000), Origin.REPLAY)
    assert isinstance(decoded, Row), decoded
    return decoded


def signal(at_s: float, device: str = "d", kind: str = "heartbeat", received_s: float | None = None, **more: Any) -> Row:
    """Return a signal that happened at ``at_s``, received then if nothing else is said."""
    return row(at_s if received_s is None else received_s, f"{device}/{kind}", ts_s=at_s, **more)


def tick(received_s: float) -> Row:
    """Return a tick: it moves the frontier."""
    return row(received_s, "fleet/_/bridge-1/tick")


COMPARED = ("kind", "device_id", "event_time_ms", "life_ms", "transition_no", "from_mode", "to_mode", "trigger", "runtime_ms",
            "last_seen_ms", "last_errors", "policy_version", "device_class", "site", "gateway", "received_at_ms", "message_kind",
            "boot", "seq", "reason", "late_by_ms")  # fmt: skip


def recorded_progress(name: str) -> dict[str, Any]:
    """Return a batch's progress as Spark 4.2 reported it: ``first``, ``timers`` (no input) or ``compaction``."""
    return json.loads((Path(__file__).parent / "golden" / f"progress-{name}.json").read_text())


def comparable(judgement: Judgement) -> tuple[Any, ...]:
    """Return all that a comparison counts."""
    return tuple(getattr(judgement, name) for name in COMPARED)


def compared(judgements: Iterable[Judgement]) -> Counter[tuple[Any, ...]]:
    """Return judgements as a bag; summaries say nothing about a device."""
    return Counter(comparable(judgement) for judgement in judgements if judgement.kind is not Verdict.SUMMARY)


def compared_columns(batch: pa.RecordBatch) -> Counter[tuple[Any, ...]]:
    """Return judgements in columns as the same bag."""
    columns = {name: batch[name].to_pylist() for name in COMPARED}
    columns["last_errors"] = [tuple(json.loads(codes or "[]")) for codes in columns["last_errors"]]
    return Counter(one for one in zip(*columns.values(), strict=True) if one[0] != Verdict.SUMMARY)


def changes(judgements: Iterable[Judgement]) -> list[tuple[float, str, str, str]]:
    """Return transitions as (seconds after START, from, to, trigger), in order."""
    found = [
        ((one.event_time_ms or 0) - START, one.transition_no or 0, one.from_mode, one.to_mode, one.trigger)
        for one in judgements
        if one.kind is Verdict.TRANSITION
    ]
    return [(at / 1000, str(old), str(new), str(why)) for at, _, old, new, why in sorted(found, key=lambda item: item[:2])]
