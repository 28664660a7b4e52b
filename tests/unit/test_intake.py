"""The laws of the bridge's intake, without a network, a file or a clock."""

import json
from typing import Any

import pytest

from fleetpulse.core.decoding import Rejection, decode
from fleetpulse.core.envelope import Envelope, wrap
from fleetpulse.core.messages import Origin
from fleetpulse.io.receiver import Arrived
from fleetpulse.io.segments import Position
from streaming.flood import BURST_S, Floods
from streaming.history import HELD_BYTES, History
from streaming.intake import Intake

NOW = 1_700_000_000_000
TOPIC = "fleet/s/d/heartbeat"


class Broker:
    """Numbers messages as a broker does."""

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


@pytest.fixture
def broker() -> Broker:
    return Broker()


def make(position: Position | None = None) -> Intake:
    return Intake("b", position, grace_ms=120_000, interval_ms=5_000, secret=b"s")


def rows(intake: Intake) -> list[dict[str, Any]]:
    return [row._asdict() for row in intake.waiting.rows()]


def stamps(intake: Intake) -> list[int]:
    return [row["received_at_ms"] for row in rows(intake)]


def bodies(intake: Intake, kind: str) -> list[dict[str, Any]]:
    told = [json.loads(row["payload"]) for row in rows(intake) if row["topic"] == f"fleet/_/b/{kind}"]
    return [{key: value for key, value in body.items() if key != "after"} for body in told]


def closed(intake: Intake) -> list[str]:
    """Return the bridges of which the intake itself says that they listen again."""
    ours = [row for row in rows(intake) if row["recording"] is None and row["topic"].endswith("/gap")]
    return [row["topic"].split("/")[2] for row in ours if json.loads(row["payload"])["op"] == "close"]


def fly(intake: Intake, broker: Broker, sent_ms: int, back_ms: int) -> None:
    intake.arrived(broker.deliver(intake.canary_topic, intake.canary(sent_ms)), back_ms)


# ---- stamps


def test_received_at_never_runs_backwards(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    for now_ms in (NOW, NOW - 60_000, NOW + 1, NOW):
        intake.arrived(broker.deliver(TOPIC), now_ms)
    assert stamps(intake) == [NOW, NOW, NOW + 1, NOW + 1]


@pytest.mark.parametrize("others", [frozenset[str](), frozenset({"c"})])
def test_messages_taken_in_together_are_taken_in_as_one_by_one(others: frozenset[str]) -> None:
    taken: list[Intake] = []
    for together in (True, False):
        broker, intake = Broker(), Intake("b", Position(3, NOW), secret=b"s", floods=Floods(1), others=others)
        intake.shared = frozenset({"oslo"})
        intake.go_live(NOW - 1_000)
        canary = broker.deliver(intake.canary_topic, intake.canary(NOW))
        several = [broker.deliver(TOPIC) for _ in range(BURST_S + 2)]
        several[5:5] = [broker.deliver(TOPIC, retained=True), broker.deliver("replay/r"), canary, broker.deliver("foreign/t")]
        several[30:30] = [
            broker.deliver("fleet/oslo/d/heartbeat"),
            broker.deliver("fleet/_/c/tick"),
            broker.deliver(intake.canary_topic, b"{}"),
        ]
        for now_ms in (NOW - 5, NOW + 7):
            if together:
                intake.arrived_together(several, now_ms)
            else:
                for message in several:
                    intake.arrived(message, now_ms)
        taken.append(intake)
    one, other = taken
    assert [*one.waiting.rows()] == [*other.waiting.rows()]
    assert one.waiting.tokens == other.waiting.tokens
    assert one.waiting.passed == other.waiting.passed
    assert one.waiting.size_bytes == other.waiting.size_bytes
    assert (one.counts, one.last_ms, one.last_canary_ms) == (other.counts, other.last_ms, other.last_canary_ms)
    assert one.counts["flooded"] > 0


def test_received_at_never_runs_backwards_across_restarts(broker: Broker) -> None:
    intake = make(Position(3, NOW))
    intake.go_live(NOW - 1_000)
    intake.arrived(broker.deliver(TOPIC), NOW - 1_000)
    assert stamps(intake) == [NOW + 1, NOW + 2]


def test_rows_of_ours_share_their_instant_with_nobody(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    intake.arrived(broker.deliver(TOPIC), NOW)
    intake.command("a.json", "fleet/s/d/control", {"op": "release"}, NOW)
    fly(intake, broker, NOW, NOW)
    intake.arrived(broker.deliver(TOPIC), NOW)
    intake.arrived(broker.deliver(TOPIC), NOW)
    assert stamps(intake) == [NOW, NOW + 1, NOW + 2, NOW + 3, NOW + 3]


def test_commands_about_different_devices_do_not_run_ahead_of_the_clock(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    intake.arrived(broker.deliver(TOPIC), NOW)
    for number in range(1_000):
        intake.command("a.json", f"fleet/s/d{number}/registry", {"op": "add"}, NOW)
    assert set(stamps(intake)[1:]) == {NOW + 1}
    intake.command("a.json", "fleet/s/d7/control", {"op": "release"}, NOW)
    intake.command("a.json", "fleet/s/d8/registry", {"op": "add"}, NOW)
    intake.command("a.json", "fleet/_/_/policy", {"policy": {}}, NOW)
    intake.command("a.json", "fleet/s/d9/registry", {"op": "add"}, NOW)
    assert stamps(intake)[-4:] == [NOW + 2, NOW + 2, NOW + 3, NOW + 4]
    intake.arrived(broker.deliver(TOPIC), NOW)
    intake.command("a.json", "fleet/s/d10/registry", {"op": "add"}, NOW)
    assert stamps(intake)[-2:] == [NOW + 5, NOW + 6]
    intake.command("a.json", "fleet/s/d11/registry", {"op": "add"}, NOW + 99)
    assert stamps(intake)[-1] == NOW + 99


def test_a_command_after_a_promise_shares_no_instant_from_before_it(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    intake.command("a.json", "fleet/s/a/registry", {"op": "add"}, NOW)
    intake.written()
    assert intake.promise(NOW) == NOW
    intake.command("b.json", "fleet/s/b/registry", {"op": "add"}, NOW)
    assert stamps(intake) == [NOW + 1]


# ---- acknowledgements


def test_tokens_are_given_back_only_when_written(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    intake.arrived(broker.deliver(TOPIC), NOW)
    fly(intake, broker, NOW, NOW)
    intake.arrived(broker.deliver(TOPIC, retained=True), NOW)
    assert sorted(intake.written()) == [(1, 1), (1, 2), (1, 3)]
    assert intake.written() == []
    assert not intake.waiting


def test_a_lost_connection_drops_what_comes_again_and_keeps_what_does_not(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    intake.arrived(broker.deliver(TOPIC), NOW)
    intake.arrived(Arrived(TOPIC, b"qos 0", False, None), NOW)
    intake.command("a.json", "fleet/s/d/control", {"op": "release"}, NOW)
    intake.lost(NOW + 10, "network")
    assert [row["origin"] for row in rows(intake)] == ["mqtt", "command", "bridge"]
    assert [gap["why"] for gap in bodies(intake, "gap")] == ["network"]
    assert intake.written() == []


def test_retained_copies_are_not_landed(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    intake.arrived(broker.deliver(TOPIC, retained=True), NOW)
    assert not intake.waiting
    assert intake.counts["retained"] == 1


# ---- canaries and gaps


def test_a_canary_that_comes_back_is_a_tick_and_a_foreign_one_is_a_message(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    fly(intake, broker, NOW, NOW + 7)
    intake.arrived(broker.deliver(intake.canary_topic, b'{"bridge":"b","nonce":"1-1-forged"}'), NOW + 8)
    assert [row["origin"] for row in rows(intake)] == ["bridge", "mqtt"]
    assert bodies(intake, "tick")[0] == {"bridge": "b"}
    assert intake.last_canary_ms == NOW + 7


def test_a_canary_of_an_earlier_life_is_neither(broker: Broker) -> None:
    payload = make().canary(NOW)
    intake = make()
    intake.go_live(NOW)
    intake.arrived(broker.deliver(intake.canary_topic, payload), NOW)
    assert not intake.waiting
    assert intake.counts["stale_canaries"] == 1


def test_an_empty_home_has_no_gap(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    fly(intake, broker, NOW, NOW)
    assert bodies(intake, "gap") == []


@pytest.mark.parametrize(("canary_ms", "since_ms"), [(NOW - 9, NOW - 9), (None, NOW)])
def test_a_start_with_a_position_begins_with_a_gap(canary_ms: int | None, since_ms: int, broker: Broker) -> None:
    intake = make(Position(1, NOW, last_canary_ms=canary_ms))
    intake.go_live(NOW + 5_000)
    assert bodies(intake, "gap") == [{"op": "open", "from": since_ms, "why": "start"}]


def test_the_gap_is_closed_by_a_canary_sent_after_the_return(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    fly(intake, broker, NOW, NOW)
    before = intake.canary(NOW + 1)
    intake.lost(NOW + 100)
    intake.arrived(broker.deliver(intake.canary_topic, before), NOW + 200)
    assert intake.gap_open
    intake.arrived(broker.deliver(TOPIC), NOW + 250)
    fly(intake, broker, NOW + 260, NOW + 300)
    opened, closed = bodies(intake, "gap")
    assert opened == {"op": "open", "from": NOW, "why": "broker"}
    assert closed["op"] == "close"
    assert closed["until"] == rows(intake)[-1]["received_at_ms"] + 120_000
    assert stamps(intake) == sorted(stamps(intake))


def test_an_open_gap_is_not_opened_again_not_even_after_a_restart(broker: Broker) -> None:
    intake = make(Position(1, NOW, last_canary_ms=NOW, gap_open=True))
    intake.go_live(NOW + 1)
    intake.lost(NOW + 2)
    assert bodies(intake, "gap") == []
    fly(intake, broker, NOW + 3, NOW + 4)
    assert [gap["op"] for gap in bodies(intake, "gap")] == ["close"]


def test_a_canary_is_overdue_after_two_intervals_and_five_seconds(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    fly(intake, broker, NOW, NOW)
    assert not intake.overdue(NOW + 15_000)
    assert intake.overdue(NOW + 15_001)


# ---- history


def test_history_is_taken_line_by_line_whatever_the_order(broker: Broker) -> None:
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


def test_history_goes_on_after_the_line_that_is_durable(broker: Broker) -> None:
    intake = make(Position(1, NOW + 5, "r", 5))
    intake.arrived(broker.line(5), NOW)
    intake.arrived(broker.line(6), NOW)
    assert [row["line"] for row in rows(intake)] == [6]


def test_a_lost_connection_takes_history_back_to_what_is_durable(broker: Broker) -> None:
    intake = make()
    intake.arrived(broker.line(0), NOW)
    intake.written()
    intake.arrived(broker.line(1), NOW)
    intake.arrived(broker.line(3), NOW)
    intake.lost(NOW)
    assert not intake.waiting
    for line in (1, 2, 3):
        intake.arrived(broker.line(line), NOW)
    assert [row["line"] for row in rows(intake)] == [1, 2, 3]


def test_another_recording_waits_for_the_end_of_the_first(broker: Broker) -> None:
    intake = make()
    intake.arrived(broker.line(0), NOW)
    intake.arrived(broker.line(0, recording="other"), NOW)
    assert len(rows(intake)) == 1
    assert intake.counts["rejected"] == 1


def test_a_recording_older_than_what_was_received_is_rejected_whole(broker: Broker) -> None:
    intake = make(Position(1, NOW + 1))
    for line in (1, 0, 2):
        intake.arrived(broker.line(line, NOW), NOW)
    intake.arrived(broker.line(3, end=True), NOW)
    assert not intake.waiting
    assert intake.counts["rejected"] == 4
    assert not intake.history.done
    assert len(intake.written()) == 4


def test_lines_of_a_recording_that_ended_are_dropped(broker: Broker) -> None:
    intake = make(Position(1, NOW, "r", 3, ended=True, played="r"))
    intake.arrived(broker.line(2), NOW)
    intake.arrived(broker.line(3, end=True), NOW)
    assert not intake.waiting
    assert len(intake.written()) == 2
    assert intake.history.done


def test_a_second_recording_begins_after_the_first(broker: Broker) -> None:
    intake = make(Position(1, NOW, "r", 3, ended=True, played="r"))
    intake.arrived(broker.line(0, recording="s"), NOW)
    assert [row["recording"] for row in rows(intake)] == ["s"]


def test_a_stray_among_history_is_kept_for_the_quarantine_and_disturbs_nothing(broker: Broker) -> None:
    intake = make()
    intake.arrived(broker.line(0), NOW)
    intake.arrived(broker.deliver("replay/r", b"no envelope"), NOW + 99_999)
    intake.arrived(broker.line(1), NOW)
    assert [row["origin"] for row in rows(intake)] == ["replay", "mqtt", "replay"]
    assert stamps(intake) == [NOW, NOW, NOW + 1]


@pytest.mark.parametrize(("later_ms", "gaps"), [(60_000, 0), (60_001, 1)])
def test_history_up_to_now_goes_on_live_without_a_gap(later_ms: int, gaps: int, broker: Broker) -> None:
    intake = make()
    intake.arrived(broker.line(0), NOW)
    intake.arrived(broker.line(1, end=True), NOW)
    intake.written()
    intake.go_live(NOW + later_ms)
    assert len(bodies(intake, "gap")) == gaps


@pytest.mark.parametrize("gap_open", [False, True])
def test_nobody_listened_between_what_a_home_has_and_the_first_line_of_a_recording(gap_open: bool, broker: Broker) -> None:
    intake = make(Position(1, NOW, last_canary_ms=NOW - 9, gap_open=gap_open))
    intake.arrived(broker.line(0, NOW + 100_000), NOW)
    intake.arrived(broker.line(1, NOW + 100_000), NOW)
    opened = [] if gap_open else [{"op": "open", "from": NOW - 9, "why": "start"}]
    assert bodies(intake, "gap") == [*opened, {"op": "close", "until": NOW + 100_000}]
    assert stamps(intake) == sorted(stamps(intake))
    assert [row["origin"] for row in rows(intake)][-2:] == ["replay", "replay"]
    assert len(set(stamps(intake)[:-1])) == len(stamps(intake)) - 1
    assert not intake.gap_open


def test_that_gap_is_said_once_though_the_first_line_comes_again(broker: Broker) -> None:
    intake = make(Position(1, NOW, last_canary_ms=NOW))
    for _ in range(2):
        intake.lost(NOW)
        intake.arrived(broker.line(0, NOW + 100_000), NOW)
    assert [gap["op"] for gap in bodies(intake, "gap")] == ["open", "close"]
    assert intake.last_canary_ms is None


@pytest.mark.parametrize("position", [None, Position(1, NOW, "r", -1)])
def test_a_recording_in_an_empty_home_has_no_gap(position: Position | None, broker: Broker) -> None:
    intake = make(position)
    intake.arrived(broker.line(0), NOW)
    assert bodies(intake, "gap") == []


def test_lines_that_wait_for_one_before_them_are_bounded_in_bytes(broker: Broker) -> None:
    history, body = History(), b"x" * 1_000_000
    for line in range(1, 100):
        payload = wrap(Envelope("r", line, NOW + line, TOPIC, body))
        assert list(history.take(payload, (1, line), None)) == []
    assert history.missing
    assert history.held * len(body) < HELD_BYTES + len(body)


def test_a_line_of_history_that_comes_while_live_is_a_message_that_nobody_can_read(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    line = broker.line(0)
    intake.arrived(line, NOW)
    [row] = rows(intake)
    assert (row["topic"], row["payload"], row["recording"]) == ("replay/r", line.payload, None)
    refused = decode(row["topic"], row["payload"], NOW, Origin.MQTT)
    assert isinstance(refused, Rejection) and refused.reason == "topic"


def test_a_gap_that_a_recording_leaves_open_is_closed_before_its_end(broker: Broker) -> None:
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


def test_it_is_closed_also_by_who_began_after_it_was_opened_and_when_lines_come_again(broker: Broker) -> None:
    intake = make(Position(1, NOW, "r", 0, left_open=frozenset({"other"})))
    for _ in range(2):
        intake.lost(NOW)
        intake.arrived(broker.line(1, end=True), NOW)
    assert closed(intake) == ["other"]
    intake.lost(NOW)
    intake.arrived(broker.line(1, end=True), NOW)
    intake.written()
    assert intake.history.left_open == frozenset()


def test_who_goes_live_without_the_end_of_a_recording_closes_what_it_left_open(broker: Broker) -> None:
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


def test_a_recorded_gap_row_at_the_instant_of_another_of_its_bridge_is_kept_and_not_judged(broker: Broker) -> None:
    intake = make()
    for line, bridge in enumerate(("a", "b", "a", "b")):
        envelope = Envelope("r", line, NOW, f"fleet/_/{bridge}/gap", b'{"op":"open","from":1}')
        intake.arrived(broker.deliver("replay/r", wrap(envelope)), NOW)
    intake.arrived(broker.gap(4, "a", op="close", until=NOW + 9), NOW)
    assert [row["refused"] for row in rows(intake)] == [None, None, "field", "field", None]


def test_one_that_begins_anew_between_two_such_lines_refuses_the_second_as_well(broker: Broker) -> None:
    stood = Position(1, NOW, "r", 1, gap_rows=frozenset({"a", "b"}))
    for at_ms, refused in ((NOW, "field"), (NOW + 1, None)):
        intake = make(stood)
        envelope = Envelope("r", 2, at_ms, "fleet/_/a/gap", b'{"op":"open","from":1}')
        intake.arrived(broker.deliver("replay/r", wrap(envelope)), NOW)
        assert [row["refused"] for row in rows(intake)] == [refused]
        assert intake.history.gap_rows_at(NOW) == (stood.gap_rows if refused else frozenset())
