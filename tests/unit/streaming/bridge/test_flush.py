"""Verdicts that a jitter holds back are asked for where rows come to an end, and nowhere else."""

import json

import pytest

from fleetpulse.core.messages.decode import decode
from fleetpulse.core.messages.replay_envelope import Envelope, wrap
from fleetpulse.core.rows import FLUSH, Kind, Origin, Row
from fleetpulse.io.ingest.segments import BridgePosition
from fleetpulse.io.mqtt.subscriber import Arrived
from streaming.bridge.sequencer import BridgeSequencer

NOW = 1_700_000_000_000
TOPIC = "fleet/s/d/heartbeat"


def _make(position: BridgePosition | None = None, *, holds_back: bool = True) -> BridgeSequencer:
    return BridgeSequencer("b", position, holds_back=holds_back)


def _told(intake: BridgeSequencer) -> list[tuple[int, str]]:
    """Return ``received_at`` after NOW and the topic of each row; of a flush "flush"."""
    flush = json.dumps({"bridge": "b", "op": FLUSH}, separators=(",", ":")).encode()
    rows = [*intake.buffer.rows()]
    return [(row.received_at_ms - NOW, FLUSH if row.payload == flush else row.topic) for row in rows]


def _play(intake: BridgeSequencer, *, end: bool) -> None:
    for line in range(3 if end else 2):
        last = line == 2
        envelope = Envelope("r", line, None if last else NOW + line, None if last else TOPIC, b"" if last else b"{}", last)
        intake.arrived(Arrived("replay/r", wrap(envelope), False, (1, line)), NOW + 10_000_000)


def test_who_stops_listening_asks_at_the_instant_after_the_newest_row() -> None:
    intake = _make()
    intake.go_live(NOW)
    intake.arrived(Arrived(TOPIC, b"{}", False, (1, 1)), NOW)
    intake.stopping()
    assert _told(intake) == [(0, TOPIC), (1, FLUSH)]


def test_what_is_asked_for_is_a_tick_that_flushes() -> None:
    intake = _make(BridgePosition(1, NOW))
    intake.go_live(NOW)
    intake.stopping()
    *_, asked = intake.buffer.rows()
    row = decode(asked.topic, asked.payload, asked.received_at_ms, Origin(asked.origin))
    assert isinstance(row, Row)
    assert (row.kind, row.contents()["op"]) == (Kind.TICK, FLUSH)


def test_the_end_of_a_recording_asks_before_its_last_line() -> None:
    intake = _make()
    _play(intake, end=True)
    intake.stopping()
    assert _told(intake) == [(0, TOPIC), (1, TOPIC), (2, FLUSH), (2, "replay/r")]


def test_a_recording_under_way_goes_on_as_if_nobody_had_stopped() -> None:
    intake = _make()
    _play(intake, end=False)
    intake.stopping()
    assert _told(intake) == [(0, TOPIC), (1, TOPIC)]


@pytest.mark.parametrize("live", [True, False])
def test_where_nothing_is_held_back_nothing_is_asked_for(live: bool) -> None:
    intake = _make(holds_back=False)
    if live:
        intake.go_live(NOW)
        intake.arrived(Arrived(TOPIC, b"{}", False, (1, 1)), NOW)
    else:
        _play(intake, end=True)
    intake.stopping()
    assert FLUSH not in dict(_told(intake)).values()


def test_an_empty_home_has_nothing_to_ask_for() -> None:
    intake = _make()
    intake.go_live(NOW)
    intake.stopping()
    assert _told(intake) == []


def test_who_is_commanded_to_flush_asks_at_the_instant_after_the_newest_row_too() -> None:
    intake = _make(BridgePosition(1, NOW))
    intake.go_live(NOW)
    intake.command("1-a.json", "fleet/_/b/tick", {"op": FLUSH}, NOW + 60_000)
    *_, before, asked = intake.buffer.rows()
    wanted = (before.received_at_ms + 1, "1-a.json")
    assert (asked.received_at_ms, asked.command) == wanted, "it is no sign that we listened for a minute"
    row = decode(asked.topic, asked.payload, asked.received_at_ms, Origin(asked.origin))
    assert isinstance(row, Row)
    assert (row.kind, row.contents()["op"]) == (Kind.TICK, FLUSH)
