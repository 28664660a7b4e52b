"""``fleet listen``: every message on the broker, and what becomes of it."""

import os
import time
from typing import Any

from rich.console import Console

from cli.jobs import load_mappings
from cli.looking import judged_ms
from cli.output import as_json
from fleetpulse.core.mapping import TopicMapping, decode_mapped
from fleetpulse.core.messages import Kind, Origin, Rejection, Row
from fleetpulse.core.replay import Deployment
from fleetpulse.core.times import format_duration, format_instant
from fleetpulse.io.broker import load_address
from fleetpulse.io.home import Home
from fleetpulse.io.mqtt import Arrived, Receiver
from fleetpulse.ops import reports


def fate(
    message: Arrived, now_ms: int, frontier_ms: int | None, deployment: Deployment, mappings: tuple[TopicMapping, ...]
) -> str:
    """Return what becomes of a message, in words.

    Args:
        message: as the broker delivered it.
        now_ms: when that was.
        frontier_ms: what has been judged.
        deployment: lateness and clock lead.
        mappings: for topics that are not ours.
    """
    ours = message.topic.startswith("fleet/") or any(mapping.match(message.topic) for mapping in mappings)
    if message.topic.startswith("replay/"):
        return "history: it is taken where the bridge was started for it"
    if not ours:
        return "not our topic: nobody takes it; ours begin with fleet/, others need a mapping (fleet map test)"
    if message.retained:
        return "a retained copy: not a signal"
    origin = Origin.BRIDGE if message.topic.endswith("/tick") else Origin.MQTT
    row = decode_mapped(mappings, message.topic, message.payload, now_ms, origin)
    if isinstance(row, Rejection):
        return f"quarantined because {row.reason}: {row.detail}"
    return _fate_of_row(row, now_ms, frontier_ms, deployment)


def _fate_of_row(row: Row, now_ms: int, frontier_ms: int | None, deployment: Deployment) -> str:
    if row.kind is Kind.TICK:
        return "our own canary: we are listening"
    if row.event_time_ms is None:
        return f"listed, not judged: {row.note}"
    lead_ms = row.event_time_ms - now_ms
    if lead_ms > deployment.max_clock_lead_ms:
        return f"listed, not judged: its clock is ahead by {format_duration(lead_ms)}"
    if frontier_ms is not None and row.event_time_ms <= frontier_ms:
        return f"late by {format_duration(frontier_ms - row.event_time_ms)}: its time has been judged"
    due_ms = row.event_time_ms + deployment.allowed_lateness_ms
    return f"waiting until about {format_instant(due_ms)}, when its time is judged"


def listen(home: Home, topic: str, for_s: float, *, json_lines: bool) -> None:
    """Show messages until the time is over or Ctrl-C.

    Raises:
        FleetError: no broker is known.
    """
    console = Console()
    deployment, mappings = home.deployment(), load_mappings(home)
    receiver = Receiver(load_address(home.run("broker")), f"fleet-listen-{os.getpid()}", persistent=False)
    receiver.subscribe({topic})
    frontier_ms, asked_at, told = None, 0.0, None
    limit = time.monotonic() + for_s
    try:
        while time.monotonic() < limit:
            if time.monotonic() - asked_at > 2:
                frontier_ms, asked_at = reports.frontier_ms(home, judged_ms(home)), time.monotonic()
            for message in receiver.poll(0.2):
                _print(console, message, fate(message, _now_ms(), frontier_ms, deployment, mappings), json_lines)
                receiver.ack([message.token])
            if receiver.problem and receiver.problem != told:
                told = receiver.problem
                console.print(f"[red]{told}[/]")
    except KeyboardInterrupt:
        return
    finally:
        receiver.close()


def _print(console: Console, message: Arrived, words: str, json_lines: bool) -> None:
    payload = message.payload[:200].decode(errors="backslashreplace")
    row: dict[str, Any] = {"received_at_ms": _now_ms(), "topic": message.topic, "payload": payload, "fate": words}
    if json_lines:
        as_json([row])
    else:
        console.print(
            f"{format_instant(row['received_at_ms'])[11:23]}  {message.topic}  {payload}", markup=False, highlight=False
        )
        console.print(f"              -> {words}", markup=False, style="cyan", highlight=False)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
