"""Flush of delayed verdicts: the bridge requests it at its stop, at the end of a recording, and on command."""

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


def _rows(intake: BridgeSequencer) -> list[tuple[int, str]]:
    """Return ``received_at`` (since NOW) and topic of each row; "flush" for a flush."""
    flush = json.dumps({"bridge": "b", "op": FLUSH}, separators=(",", ":")).encode()
    rows = [*intake.buffer.rows()]
    return [(row.received_at_ms - NOW, FLUSH if row.payload == flush else row.topic) for row in rows]


def _play(intake: BridgeSequencer, *, end: bool) -> None:
    for line in range(3 if end else 2):
        last = line == 2
        envelope = Envelope("r", line, None if last else NOW + line, None if last else TOPIC, b"" if last else b"{}", last)
        intake.arrived(Arrived("replay/r", wrap(envelope), False, (1, line)), NOW + 10_000_000)


def test_stopping_bridge_flushes_right_after_the_newest_row() -> None:
    intake = _make()
    intake.go_live(NOW)
    intake.arrived(Arrived(TOPIC, b"{}", False, (1, 1)), NOW)
    intake.stopping()
    assert _rows(intake) == [(0, TOPIC), (1, FLUSH)]


def test_flush_is_a_tick_with_the_flush_operation() -> None:
    intake = _make(BridgePosition(1, NOW))
    intake.go_live(NOW)
    intake.stopping()
    *_, flush = intake.buffer.rows()
    row = decode(flush.topic, flush.payload, flush.received_at_ms, Origin(flush.origin))
    assert isinstance(row, Row)
    assert (row.kind, row.contents()["op"]) == (Kind.TICK, FLUSH)


def test_end_of_a_recording_flushes_before_its_last_line() -> None:
    intake = _make()
    _play(intake, end=True)
    intake.stopping()
    assert _rows(intake) == [(0, TOPIC), (1, TOPIC), (2, FLUSH), (2, "replay/r")]


def test_stop_during_a_recording_writes_no_flush() -> None:
    intake = _make()
    _play(intake, end=False)
    intake.stopping()
    assert _rows(intake) == [(0, TOPIC), (1, TOPIC)]


@pytest.mark.parametrize("live", [True, False])
def test_bridge_without_delayed_verdicts_writes_no_flush(live: bool) -> None:
    intake = _make(holds_back=False)
    if live:
        intake.go_live(NOW)
        intake.arrived(Arrived(TOPIC, b"{}", False, (1, 1)), NOW)
    else:
        _play(intake, end=True)
    intake.stopping()
    assert FLUSH not in dict(_rows(intake)).values()


def test_bridge_of_an_empty_home_writes_no_flush() -> None:
    intake = _make()
    intake.go_live(NOW)
    intake.stopping()
    assert _rows(intake) == []


def test_flush_command_is_stamped_right_after_the_newest_row() -> None:
    intake = _make(BridgePosition(1, NOW))
    intake.go_live(NOW)
    intake.command("1-a.json", "fleet/_/b/tick", {"op": FLUSH}, NOW + 60_000)
    *_, before, flush = intake.buffer.rows()
    expected = (before.received_at_ms + 1, "1-a.json")
    assert (flush.received_at_ms, flush.command) == expected, "a flush does not prove that the bridge listened for a minute"
    row = decode(flush.topic, flush.payload, flush.received_at_ms, Origin(flush.origin))
    assert isinstance(row, Row)
    assert (row.kind, row.contents()["op"]) == (Kind.TICK, FLUSH)
