"""Bridge sequencer and recordings: lines are written once and in order, with coverage gaps."""

import pytest

from fleetpulse.core.messages.decode import Rejection, decode
from fleetpulse.core.messages.replay_envelope import Envelope, wrap
from fleetpulse.core.rows import Origin
from fleetpulse.io.ingest.segments import BridgePosition
from streaming.bridge.replay_sequencer import HELD_BYTES, RecordingSequencer
from tests.support.sequencers import NOW, TOPIC, Broker, bodies, closed, fly, make, rows, stamps

pytestmark = pytest.mark.unit


@pytest.fixture
def broker() -> Broker:
    return Broker()


def test_recorded_lines_are_written_once_and_in_order(broker: Broker) -> None:
    intake = make()
    for line in (2, 0, 2, 1, 0, 3):
        intake.arrived(broker.line(line), NOW)
    intake.arrived(broker.line(4, end=True), NOW)
    assert [row["line"] for row in rows(intake)] == [0, 1, 2, 3, 4]
    assert stamps(intake) == [NOW, NOW + 1, NOW + 2, NOW + 3, NOW + 3]
    assert rows(intake)[-1]["topic"] == "replay/r"
    assert rows(intake)[-1]["payload"] == b""
    assert intake.history.done
    assert intake.counts["repeated"] == 2
    assert len(intake.written()) == 7


def test_a_held_line_is_not_acknowledged(broker: Broker) -> None:
    intake = make()
    intake.arrived(broker.line(1), NOW)
    assert intake.written() == []
    intake.arrived(broker.line(0), NOW)
    assert sorted(intake.written()) == [(1, 1), (1, 2)]


def test_history_resumes_after_the_durable_line(broker: Broker) -> None:
    intake = make(BridgePosition(1, NOW + 5, "r", 5))
    intake.arrived(broker.line(5), NOW)
    intake.arrived(broker.line(6), NOW)
    assert [row["line"] for row in rows(intake)] == [6]


def test_lost_connection_resets_history_to_the_durable_line(broker: Broker) -> None:
    intake = make()
    intake.arrived(broker.line(0), NOW)
    intake.written()
    intake.arrived(broker.line(1), NOW)
    intake.arrived(broker.line(3), NOW)
    intake.lost(NOW)
    assert not intake.buffer
    for line in (1, 2, 3):
        intake.arrived(broker.line(line), NOW)
    assert [row["line"] for row in rows(intake)] == [1, 2, 3]


def test_second_recording_is_rejected_before_the_end_of_the_first(broker: Broker) -> None:
    intake = make()
    intake.arrived(broker.line(0), NOW)
    intake.arrived(broker.line(0, recording="other"), NOW)
    assert len(rows(intake)) == 1
    assert intake.counts["rejected"] == 1


def test_recording_older_than_received_rows_is_rejected_completely(broker: Broker) -> None:
    intake = make(BridgePosition(1, NOW + 1))
    for line in (1, 0, 2):
        intake.arrived(broker.line(line, NOW), NOW)
    intake.arrived(broker.line(3, end=True), NOW)
    assert not intake.buffer
    assert intake.counts["rejected"] == 4
    assert not intake.history.done
    assert len(intake.written()) == 4


def test_lines_of_a_recording_that_ended_are_dropped(broker: Broker) -> None:
    intake = make(BridgePosition(1, NOW, "r", 3, ended=True, played="r"))
    intake.arrived(broker.line(2), NOW)
    intake.arrived(broker.line(3, end=True), NOW)
    assert not intake.buffer
    assert len(intake.written()) == 2
    assert intake.history.done


def test_second_recording_starts_after_the_end_of_the_first(broker: Broker) -> None:
    intake = make(BridgePosition(1, NOW, "r", 3, ended=True, played="r"))
    intake.arrived(broker.line(0, recording="s"), NOW)
    assert [row["recording"] for row in rows(intake)] == ["s"]


def test_stray_message_in_history_is_kept_for_quarantine(broker: Broker) -> None:
    intake = make()
    intake.arrived(broker.line(0), NOW)
    intake.arrived(broker.deliver("replay/r", b"no envelope"), NOW + 99_999)
    intake.arrived(broker.line(1), NOW)
    assert [row["origin"] for row in rows(intake)] == ["replay", "mqtt", "replay"]
    assert stamps(intake) == [NOW, NOW, NOW + 1]


@pytest.mark.parametrize(("later_ms", "gaps"), [(60_000, 0), (60_001, 1)])
def test_recent_history_continues_live_without_a_gap(later_ms: int, gaps: int, broker: Broker) -> None:
    intake = make()
    intake.arrived(broker.line(0), NOW)
    intake.arrived(broker.line(1, end=True), NOW)
    intake.written()
    intake.go_live(NOW + later_ms)
    assert len(bodies(intake, "gap")) == gaps


@pytest.mark.parametrize("gap_open", [False, True])
def test_time_between_existing_rows_and_a_recording_is_a_gap(gap_open: bool, broker: Broker) -> None:
    intake = make(BridgePosition(1, NOW, last_canary_ms=NOW - 9, gap_open=gap_open))
    intake.arrived(broker.line(0, NOW + 100_000), NOW)
    intake.arrived(broker.line(1, NOW + 100_000), NOW)
    opened = [] if gap_open else [{"op": "open", "from": NOW - 9, "why": "start"}]
    assert bodies(intake, "gap") == [*opened, {"op": "close", "until": NOW + 100_000}]
    assert stamps(intake) == sorted(stamps(intake))
    assert [row["origin"] for row in rows(intake)][-2:] == ["replay", "replay"]
    assert len(set(stamps(intake)[:-1])) == len(stamps(intake)) - 1
    assert not intake.gap_open


def test_gap_before_a_recording_is_written_once_despite_redelivery(broker: Broker) -> None:
    intake = make(BridgePosition(1, NOW, last_canary_ms=NOW))
    for _ in range(2):
        intake.lost(NOW)
        intake.arrived(broker.line(0, NOW + 100_000), NOW)
    assert [gap["op"] for gap in bodies(intake, "gap")] == ["open", "close"]
    assert intake.last_canary_ms is None


@pytest.mark.parametrize("position", [None, BridgePosition(1, NOW, "r", -1)])
def test_a_recording_in_an_empty_home_has_no_gap(position: BridgePosition | None, broker: Broker) -> None:
    intake = make(position)
    intake.arrived(broker.line(0), NOW)
    assert bodies(intake, "gap") == []


def test_held_lines_are_bounded_in_bytes(broker: Broker) -> None:
    history, body = RecordingSequencer(), b"x" * 1_000_000
    for line in range(1, 100):
        payload = wrap(Envelope("r", line, NOW + line, TOPIC, body))
        assert list(history.take(payload, (1, line), None)) == []
    assert history.missing
    assert history.held * len(body) < HELD_BYTES + len(body)


def test_recorded_line_received_live_is_a_message_with_an_invalid_topic(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    line = broker.line(0)
    intake.arrived(line, NOW)
    [row] = rows(intake)
    assert (row["topic"], row["payload"], row["recording"]) == ("replay/r", line.payload, None)
    rejection = decode(row["topic"], row["payload"], NOW, Origin.MQTT)
    assert isinstance(rejection, Rejection) and rejection.reason == "topic"


def test_gap_left_open_by_a_recording_is_closed_before_its_end_line(broker: Broker) -> None:
    intake = make()
    for line in (
        broker.line(0),
        broker.gap(1, "other", op="open", **{"from": NOW}),
        broker.gap(2, "back", op="open", **{"from": NOW}),
        broker.gap(3, "back", op="close", until=NOW + 3),
        broker.gap(4, "b", op="open", **{"from": NOW}),
        broker.gap(5, "refused", op="open", **{"from": "then"}),
        broker.gap(6, "b", op="close", until="then"),
        broker.line(7, end=True),
    ):
        intake.arrived(line, NOW + 99_999)
    assert closed(intake) == ["b", "other"]
    assert [row["line"] for row in rows(intake)] == [0, 1, 2, 3, 4, 5, 6, None, None, 7]
    assert stamps(intake) == [NOW + line for line in (0, 1, 2, 3, 4, 5, 6, 7, 8, 8)]
    intake.written()
    intake.go_live(NOW + 10)
    assert closed(intake) == []


def test_gap_left_open_is_closed_after_a_restart_and_despite_redelivery(broker: Broker) -> None:
    intake = make(BridgePosition(1, NOW, "r", 0, left_open=frozenset({"other"})))
    for _ in range(2):
        intake.lost(NOW)
        intake.arrived(broker.line(1, end=True), NOW)
    assert closed(intake) == ["other"]
    intake.lost(NOW)
    intake.arrived(broker.line(1, end=True), NOW)
    intake.written()
    assert intake.history.left_open == frozenset()


def test_going_live_closes_the_open_gaps_of_an_unfinished_recording(broker: Broker) -> None:
    intake = make()
    for message in (
        broker.line(0),
        broker.gap(1, "b", op="open", **{"from": NOW}),
        broker.gap(2, "other", op="open", **{"from": NOW}),
    ):
        intake.arrived(message, NOW)
    intake.written()
    intake.go_live(NOW + 10_000)
    assert [gap["op"] for gap in bodies(intake, "gap")] == ["open"]
    assert closed(intake) == ["other"]
    fly(intake, broker, NOW + 10_001, NOW + 10_002)
    assert closed(intake) == ["other", "b"]


def test_second_recorded_gap_row_of_a_bridge_at_one_instant_is_refused(broker: Broker) -> None:
    intake = make()
    for line, bridge in enumerate(("a", "b", "a", "b")):
        envelope = Envelope("r", line, NOW, f"fleet/_/{bridge}/gap", b'{"op":"open","from":1}')
        intake.arrived(broker.deliver("replay/r", wrap(envelope)), NOW)
    intake.arrived(broker.gap(4, "a", op="close", until=NOW + 9), NOW)
    assert [row["refused"] for row in rows(intake)] == [None, None, "field", "field", None]


def test_number_of_remembered_bridges_is_bounded_and_their_gaps_are_closed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streaming.bridge.replay_sequencer.MAX_RECORDED", 2)
    intake = make()
    opens, closes = {"op": "open", "from": NOW}, {"op": "close", "until": NOW + 9}
    changes = [("a", opens), ("b", opens), ("c", opens), ("a", opens), ("c", closes), ("a", closes), ("c", opens)]
    for line, (bridge, content) in enumerate(changes):
        intake.arrived(broker.gap(line, bridge, **content), NOW)
    for line, bridge in enumerate("xyz", len(changes)):  # at one instant, and none of them was open
        envelope = Envelope("r", line, NOW + 10, f"fleet/_/{bridge}/gap", b'{"op":"close","until":1}')
        intake.arrived(broker.deliver("replay/r", wrap(envelope)), NOW)
    assert [row["refused"] for row in rows(intake)] == [None, None, "size", None, None, None, None, None, None, "size"]
    assert intake.history.left_open == {"b", "c"} and intake.history.gap_rows_at(NOW + 10) == {"x", "y"}
    intake.arrived(broker.line(10, end=True), NOW)
    assert closed(intake) == ["b", "c"]


def test_restarted_bridge_refuses_the_second_gap_row_of_one_instant(broker: Broker) -> None:
    position = BridgePosition(1, NOW, "r", 1, gap_rows=frozenset({"a", "b"}))
    for at_ms, refused in ((NOW, "field"), (NOW + 1, None)):
        intake = make(position)
        envelope = Envelope("r", 2, at_ms, "fleet/_/a/gap", b'{"op":"open","from":1}')
        intake.arrived(broker.deliver("replay/r", wrap(envelope)), NOW)
        assert [row["refused"] for row in rows(intake)] == [refused]
        assert intake.history.gap_rows_at(NOW) == (position.gap_rows if refused else frozenset())
