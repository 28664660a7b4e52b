"""Commands of programs over MQTT: spooled, acknowledged when durable, delivered, or quarantined with a reason."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.messages.decode import decode
from fleetpulse.core.rows import KAFKA, Origin
from fleetpulse.io.ingest.segments import list_segments, read_segment
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import AckToken, Arrived
from streaming.bridge.bridge import Bridge, BridgeSettings
from streaming.bridge.token_buckets import BURST_S
from tests.support.fake_source import Records

pytestmark = pytest.mark.unit
TOPIC = "fleet/oslo/pump-1/control"


def message(token: AckToken | None = (1, 7), topic: str = TOPIC, *, retained: bool = False, **changes: Any) -> Arrived:
    content = {"op": "command", "id": "c1", "name": "set", "payload": {"n": 1}, **changes}
    return Arrived(topic, json.dumps(content).encode(), retained, token)


def bridge(folder: Path, source: Records, **more: Any) -> Bridge:
    paths = folder / "segments", folder / "commands", folder / "run" / "status.json"
    return Bridge(BridgeSettings(*paths, BrokerAddress("h", 1), "", canary_key=b"k", source_factory=lambda: source, **more))


@pytest.fixture
def source() -> Records:
    """Return a source of messages in place of the broker."""
    return Records()


def rows(folder: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Return origin, topic and payload of the rows about devices in the segments."""
    found = [one for _, path in list_segments(folder / "segments") for one in read_segment(path).to_pylist()]
    return [(one["origin"], one["topic"], json.loads(one["payload"])) for one in found if "/_/" not in one["topic"]]


def test_a_command_of_a_program_takes_the_way_of_the_command_line_and_is_acknowledged_when_durable(
    tmp_path: Path, source: Records
) -> None:
    running = bridge(tmp_path, source)
    source.coming = [message(timeout_ms=5_000, effective_from=0, extra=1)]
    running.intake.arrived_together(source.poll(0), 1_700_000_000_000)
    assert source.acknowledged == [] and rows(tmp_path) == []
    assert running.flush()
    sent = {"op": "command", "id": "c1", "name": "set", "payload": {"n": 1}, "timeout_ms": 5_000}
    assert rows(tmp_path) == [(Origin.COMMAND.value, TOPIC, sent)] and (1, 7) in source.acknowledged
    running.step()
    [(topic, payload)] = source.sent
    assert topic == "fleet/oslo/pump-1/command" and json.loads(payload)["id"] == "c1"


@pytest.mark.parametrize("place", range(6))
def test_a_command_is_lost_at_no_crash_and_acknowledged_at_none_before_it_is_durable(
    tmp_path: Path, source: Records, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """The bridge dies at each sync of the disk; the broker delivers the message again, unless it was acknowledged."""
    sync, left = os.fsync, [place]

    def fail(descriptor: int) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        sync(descriptor)

    running = bridge(tmp_path, source)
    running.intake.arrived_together([message()], 1_700_000_000_000)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        try:
            running.flush()
        except KeyboardInterrupt:
            assert (1, 7) not in source.acknowledged
    again = bridge(tmp_path, source)
    if (1, 7) not in source.acknowledged:
        again.intake.arrived_together([message((2, 1))], 1_700_000_001_000)
    for _ in range(3):
        assert again.flush()
        again.step()
    found = rows(tmp_path)
    assert found and {one[2]["id"] for one in found} == {"c1"} and {one[0] for one in found} == {Origin.COMMAND.value}
    assert {json.loads(payload)["id"] for _, payload in source.sent} == {"c1"}


def test_a_full_disk_and_a_lost_connection_leave_the_command_to_the_broker(
    tmp_path: Path, source: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    running = bridge(tmp_path, source)
    running.intake.arrived_together([message(), message(None, id="kept")], 1_700_000_000_000)
    with monkeypatch.context() as patched:
        patched.setattr("streaming.bridge.program_commands.atomic_write", full)
        assert not running.flush() and (1, 7) not in source.acknowledged
    assert running.intake.program_commands.size_bytes > 0
    running.intake.lost(1_700_000_001_000)
    assert running.flush()
    assert [one[2]["id"] for one in rows(tmp_path)] == ["kept"], "a message without a token is not delivered again"


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"op": "release"}, "reserved", 'op must be "command"'),
        ({"op": None}, "reserved", "got null"),
        ({"id": None}, "field", "id of a command is missing"),
        ({"id": 7}, "field", "id must be a printable text"),
        ({"name": ""}, "field", "name must be a printable text"),
        ({"payload": [1]}, "field", "payload must be a JSON object; got an array"),
        ({"timeout_ms": 999}, "field", "timeout_ms of a command must be a whole number from 1,000 to 86,400,000; got 999"),
        ({"timeout_ms": "5s"}, "field", "timeout_ms of a command"),
        ({"device_id": "pump-2"}, "disagreement", 'device_id must be "pump-1"'),
        ({"topic": "fleet/_/pump-1/control"}, "topic", "name the site"),
    ],
)
def test_an_invalid_command_is_a_row_that_landing_quarantines_with_the_reason(
    tmp_path: Path, source: Records, changes: dict[str, Any], reason: str, detail: str
) -> None:
    refused = message(**changes)
    running = bridge(tmp_path, source)
    running.intake.arrived_together([refused], 1_700_000_000_000)
    assert running.flush() and (1, 7) in source.acknowledged
    [one] = [one for _, path in list_segments(tmp_path / "segments") for one in read_segment(path).to_pylist()]
    assert (one["origin"], one["topic"], one["refused"]) == (Origin.MQTT.value, refused.topic, None)
    rejection: Any = decode(one["topic"], one["payload"], one["received_at_ms"], Origin.MQTT)
    assert rejection.reason == reason and detail in rejection.detail
    assert source.sent == []


def test_a_retained_command_is_passed_over(tmp_path: Path, source: Records) -> None:
    running = bridge(tmp_path, source)
    running.intake.arrived_together([message(retained=True)], 1_700_000_000_000)
    assert running.flush() and rows(tmp_path) == [] and running.intake.counts["retained"] == 1


def test_commands_beyond_the_limit_of_a_device_are_refused(tmp_path: Path, source: Records) -> None:
    running = bridge(tmp_path, source, flood_limit=1)
    running.intake.arrived_together([message((1, number), id=f"c{number}") for number in range(200)], 1_700_000_000_000)
    assert running.flush()
    taken = [one for one in rows(tmp_path) if one[0] == Origin.COMMAND.value]
    assert 0 < len(taken) < 200 and running.intake.counts["flooded"] == 200 - len(taken)


@pytest.mark.parametrize("changes", [{}, {"op": "release"}], ids=["valid", "invalid"])
def test_a_command_takes_one_token_of_its_device_also_if_it_is_refused(
    tmp_path: Path, source: Records, changes: dict[str, Any]
) -> None:
    running = bridge(tmp_path, source, flood_limit=1)
    running.intake.arrived_together([message((1, number), **changes) for number in range(BURST_S)], 1_700_000_000_000)
    assert running.intake.counts["flooded"] == 0
    running.intake.arrived_together([message((1, BURST_S), **changes)], 1_700_000_000_000)
    assert running.intake.counts["flooded"] == 1


def test_a_lost_connection_returns_the_tokens_of_commands_that_are_delivered_again(tmp_path: Path, source: Records) -> None:
    running = bridge(tmp_path, source, flood_limit=1)
    commands = [message((1, number), id=f"c{number}") for number in range(BURST_S)]
    for _ in range(3):
        running.intake.arrived_together(commands, 1_700_000_000_000)
        assert running.intake.counts["flooded"] == 0 and len(running.intake.program_commands) == BURST_S
        running.intake.lost(1_700_000_000_000)
        assert running.intake.program_commands.size_bytes == 0


def test_a_bridge_receives_nothing_while_too_many_commands_wait_for_the_disk(
    tmp_path: Path, source: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("streaming.bridge.bridge.ROWS_IN_MEMORY", 3)
    monkeypatch.setattr("streaming.bridge.program_commands.atomic_write", full)
    running = bridge(tmp_path, source)
    for number in range(9):
        source.coming += [message((1, number), id=f"c{number}")]
        running.step()
    assert len(running.intake.program_commands) == 4 and len(source.coming) == 5


def test_the_first_bridge_takes_the_commands_at_the_sites_of_other_bridges(tmp_path: Path, source: Records) -> None:
    others = {"second": tmp_path / "second"}
    running = bridge(tmp_path, source, others=others)
    running.intake.shared = frozenset({"oslo"})
    running.intake.arrived_together([message()], 1_700_000_000_000)
    assert running.flush() and [one[0] for one in rows(tmp_path)] == [Origin.COMMAND.value]
    paths = tmp_path / "second", None, tmp_path / "run" / "second.json"
    options: dict[str, Any] = {"bridge": "second", "sites": ("oslo",), "source_factory": lambda: source}
    second = Bridge(BridgeSettings(*paths, BrokerAddress("h", 1), "", **options))
    second.intake.arrived_together([message((3, 3))], 1_700_000_000_000)
    assert second.flush() and second.intake.counts["elsewhere"] == 1 and (3, 3) in source.acknowledged


def test_a_command_in_a_record_of_kafka_is_quarantined(tmp_path: Path, source: Records) -> None:
    paths = tmp_path / "segments", None, tmp_path / "run" / "status.json"
    running = Bridge(BridgeSettings(*paths, BrokerAddress("h", 1), "", bridge=KAFKA, source_factory=lambda: source))
    running.intake.arrived_together([message()], 1_700_000_000_000)
    assert running.flush()
    [(origin, topic, content)] = rows(tmp_path)
    rejection: Any = decode(topic, json.dumps(content).encode(), 0, Origin(origin))
    assert rejection.reason == "reserved" and "not from Kafka" in rejection.detail
