"""Histories for tests: rows as the pipeline decodes them, and comparable results."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from fleetpulse.core.judgements import COMPARED, Judgement, JudgementKind
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.presence.gateways import Gateways
from fleetpulse.core.rows import SET_WHEN_READ, Clock, GatewayEvent, Kind, Origin, Row, for_everyone

START = 1_700_000_000_000
GRID_S = 5  # a coarse grid, so that deadlines and windows often coincide
Choose = Callable[[Sequence[Any]], Any]  # choice of an element, by a Hypothesis strategy or a seeded Random
CODES = ("reconnaissance", "auth_failed", "escalation", "escalation", "x", None)
SEQUENCES = (["reconnaissance", "auth_failed", "escalation"], ["x", "escalation"], ["x", "x"], ["escalation"])
GATEWAYS = ("g", "h")
KINDS = ("heartbeat", "heartbeat", "telemetry", "error", "error", "birth", "death")
KINDS_AND_ANSWERS = (*KINDS, "ack")
OWN = ("gap", "gap", "policy", "add", "add", "decommission", "maintain", "update", "release", "tick")
OWN_AND_REVIEWS = (*OWN[:-1], "confirm", "command", "alarm", OWN[-1])  # policies may have the velocity rule, too
DELAYS = (0, 0, 0, 5, 10, 25, 70, -10, -30, -35)


def row(received_s: float, topic: str, **payload: Any) -> Row:
    """Decode one message of any kind, with origin ``command``.

    Args:
        received_s: instant of receipt, seconds after START.
        topic: topic, or its part after ``fleet/site/``.
        payload: fields of the payload. ``ts_s`` and other names in ``_s`` are seconds after START.
    """
    for name in ("ts", "until", "from", "after", "effective_from"):
        if f"{name}_s" in payload:
            payload[name] = START + int(payload.pop(f"{name}_s") * 1000)
    site_topic = topic if topic.startswith("fleet/") else f"fleet/site/{topic}"
    decoded = decode(site_topic, json.dumps(payload).encode(), START + int(received_s * 1000), Origin.COMMAND)
    assert isinstance(decoded, Row), decoded
    return decoded


def signal(at_s: float, device: str = "d", kind: str = "heartbeat", received_s: float | None = None, **more: Any) -> Row:
    """Return a signal with event time ``at_s``, by default received at that instant."""
    return row(at_s if received_s is None else received_s, f"{device}/{kind}", ts_s=at_s, **more)


def tick(received_s: float) -> Row:
    """Return a tick, which advances the frontier."""
    return row(received_s, "fleet/_/bridge-1/tick")


_STORED = {"kind": Kind, "clock": Clock, "gateway_event": lambda word: word and GatewayEvent(word)}


def stored_rows(table: pa.Table) -> Iterator[Row]:
    """Yield the rows of a table of messages."""
    for stored in table.to_pylist():
        values: dict[str, Any] = {}
        for name in (field.name for field in fields(Row) if field.name not in SET_WHEN_READ):
            value = stored.get(name.removesuffix("_ms"))
            if name.endswith("_ms") and value:
                value = round(value.timestamp() * 1000)
            values[name] = _STORED[name](value) if name in _STORED else value
        values["position"] = values["position"] or 0
        yield Row(**values)


def judgement_entry(one: Judgement, judged_ms: int) -> dict[str, Any]:
    """Return a judgement as a row of its table, with the instant of its judgement."""
    values = {name: getattr(one, name) for name in Judgement.__slots__}
    values |= {name: str(values[name]) for name in ("kind", "from_mode", "to_mode", "trigger") if values[name] is not None}
    return {**values, "last_errors": json.dumps(one.last_errors), "judged_at_ms": judged_ms, "generation": 1}


def registry_entries(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows of the table ``devices`` for registry rows."""
    return [
        {
            "received_at_ms": one.received_at_ms,
            "effective_from_ms": one.event_time_ms,
            "device_id": one.device_id,
            "site": one.site,
            "op": one.contents()["op"],
            "device_class": one.contents().get("class"),
            "gateway": one.contents().get("gateway"),
            "timeout_ms": one.contents().get("timeout_ms"),
            "death_grace_ms": one.contents().get("death_grace_ms"),
        }
        for one in rows
        if one.kind is Kind.REGISTRY
    ]


def choosing(draw: st.DrawFn) -> Choose:
    """Return a function that chooses an element by Hypothesis."""
    return lambda several: draw(st.sampled_from(several))


def any_policy(choose: Choose, *, reviews: bool = False) -> dict[str, Any]:
    """Return a random policy, normalised, with separate rules for the class ``quick``.

    Args:
        choose: source of random choices.
        reviews: whether a class can have the velocity rule.
    """
    unknown = choose(["admit", "admit", "admit", "quarantine"])
    rules, quick = _any_rules(choose, reviews=reviews), _any_rules(choose, reviews=reviews)
    return parse_policy({"rules": rules, "classes": {"quick": quick}, "unknown_devices": unknown}).normalised()


def _any_rules(choose: Choose, *, reviews: bool) -> dict[str, Any]:
    timeout = choose([10, 20, 30, 60])
    return {
        "timeout": f"{timeout}s",
        "death_grace": f"{choose([0, 5, 15, 90])}s",
        "forget_after": f"{timeout + choose([5, 40, 60, 100])}s",
        "degraded": {"errors": choose([1, 2, 3]), "window": f"{choose([10, 25, 60])}s"},
        "flagged": {"window": f"{choose([10, 25, 60])}s", "hold": f"{choose([15, 60])}s", "codes": choose(SEQUENCES)},
        "longest_hold": "100s",
        "gateway_outage_limit": choose(["10s", "40s", "90s", "1d"]),
        "last_errors": choose([5, 5, 0, 1, 16]),
        **choose([{}, {}, {"late_proves_alive": True}, {"late_proves_alive": False}]),
        **(choose([{}, {}, any_velocity(choose)]) if reviews else {}),
    }


def any_velocity(choose: Choose) -> dict[str, Any]:
    """Return random rules about events within a session."""
    kind = choose(["error", "error", "birth", "heartbeat", "telemetry"])
    code = choose([{}, {}, {"code": choose(["x", "unknown", "escalation"])}]) if kind == "error" else {}
    velocity = {"events": choose([1, 2, 2, 3]), "kind": kind, "hold": f"{choose([15, 60, 90])}s", **code}
    return {"session": {"idle": f"{choose([5, 15, 40])}s"}, "velocity": velocity}


def positioned(rows: Iterable[Row], lateness_s: float = 60) -> list[Row]:
    """Return rows as landing writes them: sorted, with positions and gateway events.

    Rows of one instant are numbered in their given order.
    """
    placed: list[Row] = []
    gateways = Gateways(int(lateness_s * 1000))
    for one in sorted(rows, key=lambda each: each.received_at_ms):
        after = placed and placed[-1].received_at_ms == one.received_at_ms
        one = replace(one, position=placed[-1].position + 1 if after else 0)
        placed.append(replace(one, gateway_event=gateways.read(one)))
    return placed


def any_signal(
    choose: Choose, devices: Sequence[str], steps: int, kinds: Sequence[str] = KINDS, delays: Sequence[int] = DELAYS
) -> Row:
    """Return a random message of a random device, received on the grid.

    Args:
        choose: source of random choices.
        devices: ids of the devices.
        steps: number of steps of the grid.
        kinds: kinds of messages.
        delays: seconds from event time to receipt.
    """
    received, device, kind = choose(range(steps + 1)) * GRID_S, choose(devices), choose(kinds)
    through = choose([None, None, *devices[:2], *GATEWAYS])  # devices may be gateways, and gateways devices
    if kind == "death":
        device = choose([device, device, *GATEWAYS])
        through = choose([None, device, through])
    payload = {
        "seq": choose([None, None, 0, 1, 2, 3]),
        "boot": choose([None, None, "p", "q"]),
        "session": choose([None, None, "s", "t"]),
        "code": choose(CODES),
        "firmware": choose([None, None, None, "1.0", "1.1"]),
        "gateway": through,
    }
    payload = {name: value for name, value in payload.items() if value is not None}
    clock = choose(["device"] * 16 + ["none", "none", "odd", "ahead", "behind"])
    if clock == "device":
        payload["ts_s"] = received - choose(delays)
    elif clock == "odd":
        payload["ts"] = choose([5, "noon"])
    elif clock != "none":
        payload["ts_s"] = received + choose([200, 300]) * (1 if clock == "ahead" else -3_000_000)
    return row(received, f"fleet/{choose(['north', 'north', 'north', 'south'])}/{device}/{kind}", **payload)


def any_internal_row(choose: Choose, devices: Sequence[str], steps: int, own: Sequence[str] = OWN) -> Row:
    """Return a random row that no device sent, such as a command or a gap.

    It is received off the grid, so that it shares its instant with no other row. It may take effect
    on the grid.
    """
    received = choose(range(steps + 1)) * GRID_S + choose([1, 2, 3, 4]) + choose(range(1, 1000)) / 1000
    coming = int(received) // GRID_S * GRID_S + 2 * GRID_S
    effective = choose([None, None, coming, coming, received - 40, received + 30])
    more: dict[str, Any] = {} if effective is None else {"effective_from_s": effective}
    which, device = choose(own), choose(devices)
    match which:
        case "gap":
            back = choose([0, 5, 20, 80])
            gap = choose([{"op": "open", "from_s": received - back}, {"op": "close", "until_s": received + back}])
            scope = choose([{}, {}, {"sites": ["north"]}, {"sites": ["south", "site"]}, {"except": ["north"]}])
            return row(received, f"fleet/_/{choose(['b', 'b', 'c'])}/gap", **gap, **scope)
        case "tick":
            return row(received, "fleet/_/b/tick")
        case "policy":
            return row(received, "fleet/_/_/policy", policy=any_policy(choose, reviews="confirm" in own), **more)
        case "add":
            more |= choose([{}, {"gateway": choose(GATEWAYS)}])
            more |= choose([{}, {}, {"timeout_ms": choose([8_000, 45_000])}, {"death_grace_ms": choose([2_000, 50_000])}])
            return row(received, f"{device}/registry", op="add", **{"class": choose(["default", "quick"])}, **more)
        case "decommission":
            return row(received, f"{device}/registry", op="decommission", **more)
        case "release" | "confirm":
            return row(received, f"{device}/control", op=which, **more)
        case "alarm":
            return row(received, f"{device}/control", op="error", code=choose(CODES), **more)
        case "command":
            return row(received, f"{device}/control", op="command", id=choose(["c1", "c2"]), name="set", **more)
    until = choose([received, coming, coming]) + choose([5, 40, 90, 100, 110])
    return row(received, f"{device}/control", op=which, until_s=until, **more)


def with_broadcasts(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of a batch, with a broadcast event for each gateway event."""
    kept = list(rows)
    return kept + [event for one in kept if (event := for_everyone(one))]


def stamped_by_bridge(rows: Iterable[Row], lateness_s: float = 60) -> list[Row]:
    """Return rows in the order of ``received_at``, as a bridge stamps them.

    Each gap row names the position of its bridge: the ``received_at`` of the previous row.
    """
    stamped: list[Row] = []
    for one in positioned(rows, lateness_s):
        if one.kind is Kind.GAP and stamped:
            one = replace(one, body=json.dumps({**one.contents(), "after": stamped[-1].received_at_ms}))
        stamped.append(one)
    return stamped


def recorded_progress(name: str) -> dict[str, Any]:
    """Return a recorded batch progress of Spark 4.2.

    Args:
        name: ``first``, ``timers`` (a batch without input) or ``compaction``.
    """
    return json.loads((Path(__file__).parents[2] / "golden" / f"progress-{name}.json").read_text())


def compared_columns(batch: pa.RecordBatch) -> Counter[tuple[Any, ...]]:
    """Return columnar judgements as a multiset of the compared columns."""
    columns = {name: batch[name].to_pylist() for name in COMPARED}
    columns["last_errors"] = [tuple(json.loads(codes or "[]")) for codes in columns["last_errors"]]
    return Counter(one for one in zip(*columns.values(), strict=True) if one[0] != JudgementKind.SUMMARY)


def changes(judgements: Iterable[Judgement]) -> list[tuple[float, str, str, str]]:
    """Return transitions as (seconds after START, from, to, trigger), in order."""
    found = [
        ((one.event_time_ms or 0) - START, one.transition_no or 0, one.from_mode, one.to_mode, one.trigger)
        for one in judgements
        if one.kind is JudgementKind.TRANSITION
    ]
    return [(at / 1000, str(old), str(new), str(why)) for at, _, old, new, why in sorted(found, key=lambda item: item[:2])]
