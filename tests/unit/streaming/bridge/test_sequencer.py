"""Bridge sequencer: stamps, commands, acknowledgements, canaries and coverage gaps."""

import pytest

from fleetpulse.core.rows import FLUSH
from fleetpulse.io.ingest.segments import BridgePosition
from fleetpulse.io.mqtt.subscriber import Arrived
from streaming.bridge.rate_limit import BURST_S, RateLimiter
from streaming.bridge.sequencer import MAX_TOPIC, BridgeSequencer
from tests.support.sequencers import NOW, TOPIC, Broker, bodies, fly, make, rows, stamps

pytestmark = pytest.mark.unit


@pytest.fixture
def broker() -> Broker:
    return Broker()


def test_received_at_never_runs_backwards(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    for now_ms in (NOW, NOW - 60_000, NOW + 1, NOW):
        intake.arrived(broker.deliver(TOPIC), now_ms)
    assert stamps(intake) == [NOW, NOW, NOW + 1, NOW + 1]


@pytest.mark.parametrize("others", [frozenset[str](), frozenset({"c"})])
def test_batch_of_messages_has_the_effect_of_single_messages(others: frozenset[str]) -> None:
    sequencers: list[BridgeSequencer] = []
    for as_batch in (True, False):
        broker, intake = Broker(), BridgeSequencer("b", BridgePosition(3, NOW), secret=b"s", floods=RateLimiter(1), others=others)
        intake.shared = frozenset({"oslo"})
        intake.go_live(NOW - 1_000)
        canary = broker.deliver(intake.canary_topic, intake.canary(NOW))
        messages = [broker.deliver(TOPIC) for _ in range(BURST_S + 2)]
        messages[5:5] = [broker.deliver(TOPIC, retained=True), broker.deliver("replay/r"), canary, broker.deliver("foreign/t")]
        messages[30:30] = [
            broker.deliver("fleet/oslo/d/heartbeat"),
            broker.deliver("fleet/_/c/tick"),
            broker.deliver("spBv1.0/g/NCMD/n"),
            broker.deliver("foreign/" + "t" * MAX_TOPIC),
            broker.deliver(intake.canary_topic, b"{}"),
        ]
        for now_ms in (NOW - 5, NOW + 7):
            if as_batch:
                intake.arrived_together(messages, now_ms)
            else:
                for message in messages:
                    intake.arrived(message, now_ms)
        sequencers.append(intake)
    batched, single = sequencers
    assert [*batched.buffer.rows()] == [*single.buffer.rows()]
    assert batched.buffer.tokens == single.buffer.tokens
    assert batched.buffer.passed == single.buffer.passed
    assert batched.buffer.size_bytes == single.buffer.size_bytes
    assert (batched.counts, batched.last_ms, batched.last_canary_ms) == (single.counts, single.last_ms, single.last_canary_ms)
    assert batched.counts["flooded"] > 0


def test_received_at_never_runs_backwards_across_restarts(broker: Broker) -> None:
    intake = make(BridgePosition(3, NOW))
    intake.go_live(NOW - 1_000)
    intake.arrived(broker.deliver(TOPIC), NOW - 1_000)
    assert stamps(intake) == [NOW + 1, NOW + 2]


def test_rows_of_the_bridge_share_their_instant_with_no_other_row(broker: Broker) -> None:
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


def test_flush_command_of_an_empty_home_shares_its_instant_with_no_command(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    intake.command("a.json", intake.canary_topic, {"op": FLUSH}, NOW)
    intake.command("b.json", "fleet/s/a/registry", {"op": "add"}, NOW)
    assert stamps(intake) == [NOW, NOW + 1]


def test_command_after_a_promise_shares_no_instant_with_an_earlier_command(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    intake.command("a.json", "fleet/s/a/registry", {"op": "add"}, NOW)
    intake.written()
    assert intake.promise(NOW) == NOW
    intake.command("b.json", "fleet/s/b/registry", {"op": "add"}, NOW)
    assert stamps(intake) == [NOW + 1]


# ---- acknowledgements


def test_tokens_are_released_only_when_written(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    intake.arrived(broker.deliver(TOPIC), NOW)
    fly(intake, broker, NOW, NOW)
    intake.arrived(broker.deliver(TOPIC, retained=True), NOW)
    assert sorted(intake.written()) == [(1, 1), (1, 2), (1, 3)]
    assert intake.written() == []
    assert not intake.buffer


def test_lost_connection_drops_only_messages_that_are_redelivered(broker: Broker) -> None:
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
    assert not intake.buffer
    assert intake.counts["retained"] == 1


# ---- canaries and gaps


def test_returned_canary_is_a_tick_and_a_forged_one_is_a_message(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    fly(intake, broker, NOW, NOW + 7)
    intake.arrived(broker.deliver(intake.canary_topic, b'{"bridge":"b","nonce":"1-1-forged"}'), NOW + 8)
    assert [row["origin"] for row in rows(intake)] == ["bridge", "mqtt"]
    assert bodies(intake, "tick")[0] == {"bridge": "b"}
    assert intake.last_canary_ms == NOW + 7


def test_canary_of_an_earlier_process_is_dropped(broker: Broker) -> None:
    payload = make().canary(NOW)
    intake = make()
    intake.go_live(NOW)
    intake.arrived(broker.deliver(intake.canary_topic, payload), NOW)
    assert not intake.buffer
    assert intake.counts["stale_canaries"] == 1


def test_an_empty_home_has_no_gap(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    fly(intake, broker, NOW, NOW)
    assert bodies(intake, "gap") == []


@pytest.mark.parametrize(("canary_ms", "since_ms"), [(NOW - 9, NOW - 9), (None, NOW)])
def test_start_with_a_position_opens_a_gap(canary_ms: int | None, since_ms: int, broker: Broker) -> None:
    intake = make(BridgePosition(1, NOW, last_canary_ms=canary_ms))
    intake.go_live(NOW + 5_000)
    assert bodies(intake, "gap") == [{"op": "open", "from": since_ms, "why": "start"}]


def test_gap_is_closed_by_a_canary_sent_after_the_connection_is_back(broker: Broker) -> None:
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


def test_a_canary_that_was_sent_before_the_gap_was_opened_does_not_close_it(broker: Broker) -> None:
    intake = make()
    intake.go_live(NOW)
    fly(intake, broker, NOW, NOW)
    before = broker.deliver(intake.canary_topic, intake.canary(NOW + 1))
    intake.open_gap(NOW + 100, "canary")  # the canary is overdue, and the connection is up
    intake.arrived(before, NOW + 200)
    assert [gap["op"] for gap in bodies(intake, "gap")] == ["open"]
    assert intake.gap_open
    assert intake.last_canary_ms == NOW + 200, "it is still a tick"
    fly(intake, broker, NOW + 201, NOW + 300)
    assert [gap["op"] for gap in bodies(intake, "gap")] == ["open", "close"]


def test_open_gap_is_not_opened_again_after_a_restart(broker: Broker) -> None:
    intake = make(BridgePosition(1, NOW, last_canary_ms=NOW, gap_open=True))
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
