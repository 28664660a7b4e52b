"""Histories for tests: rows as the pipeline would decode them, and what to compare."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def recorded_progress(name: str) -> dict[str, Any]:
    """Return a batch's progress as Spark 4.2 reported it: ``first``, ``timers`` (no input) or ``compaction``."""
    return json.loads((Path(__file__).parent / "golden" / f"progress-{name}.json").read_text())


def comparable(judgement: Judgement) -> tuple[Any, ...]:
    """Return all that a comparison counts."""
    return (
        judgement.kind.value,
        judgement.device_id,
        judgement.event_time_ms,
        judgement.life_ms,
        judgement.transition_no,
        judgement.from_mode,
        judgement.to_mode,
        judgement.trigger,
        judgement.runtime_ms,
        judgement.last_seen_ms,
        judgement.last_errors,
        judgement.policy_version,
        judgement.device_class,
        judgement.received_at_ms,
        judgement.message_kind,
        judgement.seq,
        judgement.reason,
        judgement.late_by_ms,
    )


def compared(judgements: Iterable[Judgement]) -> Counter[tuple[Any, ...]]:
    """Return judgements as a bag; summaries say nothing about a device."""
    return Counter(comparable(judgement) for judgement in judgements if judgement.kind is not Verdict.SUMMARY)


def changes(judgements: Iterable[Judgement]) -> list[tuple[float, str, str, str]]:
    """Return transitions as (seconds after START, from, to, trigger), in order."""
    found = [
        ((one.event_time_ms or 0) - START, one.transition_no or 0, one.from_mode, one.to_mode, one.trigger)
        for one in judgements
        if one.kind is Verdict.TRANSITION
    ]
    return [(at / 1000, str(old), str(new), str(why)) for at, _, old, new, why in sorted(found, key=lambda item: item[:2])]
