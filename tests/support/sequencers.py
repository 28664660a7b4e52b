"""Sequencer of a bridge and a broker for tests, without network, files and clocks."""

import json
from typing import Any

from fleetpulse.core.messages.replay_envelope import Envelope, wrap
from fleetpulse.io.ingest.segments import BridgePosition
from fleetpulse.io.mqtt.subscriber import Arrived
from streaming.bridge.sequencer import BridgeSequencer

NOW = 1_700_000_000_000
TOPIC = "fleet/s/d/heartbeat"


class Broker:
    """Broker stub, which numbers messages."""

    def __init__(self) -> None:
        self.mid = 0

    def deliver(self, topic: str, payload: bytes = b"{}", retained: bool = False) -> Arrived:
        self.mid += 1
        return Arrived(topic, payload, retained, (1, self.mid))

    def gap(self, line: int, bridge: str, **content: object) -> Arrived:
        envelope = Envelope("r", line, NOW + line, f"fleet/_/{bridge}/gap", json.dumps(content).encode())
        return self.deliver("replay/r", wrap(envelope))

    def line(self, line: int, received_at_ms: int | None = None, recording: str = "r", end: bool = False) -> Arrived:
        at_ms = None if end else NOW + line if received_at_ms is None else received_at_ms
        envelope = Envelope(recording, line, at_ms, None if end else TOPIC, b"" if end else b"{}", end)
        return self.deliver(f"replay/{recording}", wrap(envelope))


def make(position: BridgePosition | None = None) -> BridgeSequencer:
    return BridgeSequencer("b", position, grace_ms=120_000, interval_ms=5_000, secret=b"s")


def rows(intake: BridgeSequencer) -> list[dict[str, Any]]:
    return [row._asdict() for row in intake.buffer.rows()]


def stamps(intake: BridgeSequencer) -> list[int]:
    return [row["received_at_ms"] for row in rows(intake)]


def bodies(intake: BridgeSequencer, kind: str) -> list[dict[str, Any]]:
    bodies = [json.loads(row["payload"]) for row in rows(intake) if row["topic"] == f"fleet/_/b/{kind}"]
    return [{key: value for key, value in body.items() if key != "after"} for body in bodies]


def closed(intake: BridgeSequencer) -> list[str]:
    """Return the bridges whose gaps the sequencer itself closed."""
    ours = [row for row in rows(intake) if row["recording"] is None and row["topic"].endswith("/gap")]
    return [row["topic"].split("/")[2] for row in ours if json.loads(row["payload"])["op"] == "close"]


def fly(intake: BridgeSequencer, broker: Broker, sent_ms: int, back_ms: int) -> None:
    intake.arrived(broker.deliver(intake.canary_topic, intake.canary(sent_ms)), back_ms)
