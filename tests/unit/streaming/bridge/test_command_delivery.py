"""Delivery of commands to devices: after their segment, at least once, and one file after the other."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.rows import Kind
from fleetpulse.io.ingest.segments import list_segments
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import Arrived
from streaming.bridge.bridge import Bridge, BridgeSettings
from streaming.bridge.command_delivery import FIRST_PAUSE_S, UNCONFIRMED_S, CommandDelivery
from streaming.bridge.command_reader import DELIVERY, Spool
from tests.support.fake_source import Records

pytestmark = pytest.mark.unit
SENT_MS = 1_700_000_000_000


def command(device: str, number: int) -> dict[str, Any]:
    content = {"op": "command", "id": f"c{number}", "name": "set", "payload": {"n": number}}
    return {"topic": f"fleet/oslo/{device}/{Kind.CONTROL}", "payload": content}


def write(folder: Path, number: int, *commands: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{SENT_MS + number}-abcd.json").write_text(json.dumps(commands))


def ids(source: Records) -> list[str]:
    return [json.loads(payload)["id"] for _, payload in source.sent]


def bridge(folder: Path, source: Records) -> Bridge:
    paths = folder / "segments", folder / "commands", folder / "run" / "status.json"
    return Bridge(BridgeSettings(*paths, BrokerAddress("h", 1), "", source_factory=lambda: source, canary_key=b"k"))


def test_a_command_is_published_when_its_row_is_durable_and_removed_when_confirmed(tmp_path: Path) -> None:
    source = Records()
    running = bridge(tmp_path, source)
    running.step()
    write(tmp_path / "commands", 0, command("pump-1", 1))
    before = len(list_segments(tmp_path / "segments"))
    assert running.flush() and source.sent == []
    assert len(list_segments(tmp_path / "segments")) == before + 1
    running.step()
    ((topic, payload),) = source.sent
    assert topic == "fleet/oslo/pump-1/command"
    assert json.loads(payload) == {"id": "c1", "name": "set", "payload": {"n": 1}, "sent_at": SENT_MS}
    waiting = tmp_path / "commands" / DELIVERY
    running.step()
    assert len(source.sent) == 1 and len(list(waiting.iterdir())) == 1
    source.confirming = [(1, 1)]
    running.step()
    assert list(waiting.iterdir()) == []


def test_the_bridge_writes_no_row_of_the_commands_that_it_published(tmp_path: Path) -> None:
    source = Records()
    running = bridge(tmp_path, source)
    source.coming = [Arrived("fleet/oslo/pump-1/command", b"{}", False, (1, 7))]
    running.step()
    assert "fleet/oslo/pump-1/command" not in [row.topic for row in running.intake.buffer.rows()]
    assert running.flush() and (1, 7) in source.acknowledged and running.intake.counts["commands"] == 1


@pytest.mark.parametrize("moved", [False, True])
def test_after_a_crash_a_durable_command_is_published_again(moved: bool, tmp_path: Path) -> None:
    """The crash is before the file was moved to the delivery, or before the broker confirmed its commands."""
    spool = Spool(tmp_path, 0)
    write(tmp_path, 0, command("a", 1))
    assert len(spool.take(1)) == 1
    if moved:
        assert spool.written()
    restarted = Spool(tmp_path, 1, {path.name.partition(".taken")[0] for path in tmp_path.glob("*.taken-1")})
    assert restarted.take(2) == []
    source = Records()
    for _ in range(2):
        CommandDelivery(tmp_path / DELIVERY).step(source, 0.0)
    assert ids(source) == ["c1", "c1"]


def test_a_command_whose_segment_was_not_written_is_not_published(tmp_path: Path) -> None:
    write(tmp_path, 0, command("a", 1))
    Spool(tmp_path, 0).take(1)
    assert len(Spool(tmp_path, 0).take(1)) == 1
    source = Records()
    CommandDelivery(tmp_path / DELIVERY).step(source, 0.0)
    assert source.sent == []


def test_other_rows_of_operators_are_not_delivered(tmp_path: Path) -> None:
    release = {"topic": "fleet/_/a/control", "payload": {"op": "release"}}
    spool = Spool(tmp_path, 0)
    write(tmp_path, 0, release)
    spool.take(1)
    assert not spool.written() and list(tmp_path.iterdir()) == []
    write(tmp_path, 1, release, command("a", 1))
    spool.take(2)
    assert spool.written()
    source = Records()
    CommandDelivery(tmp_path / DELIVERY).step(source, 0.0)
    assert ids(source) == ["c1"]


def test_commands_are_published_again_after_a_lost_connection(tmp_path: Path) -> None:
    write(tmp_path, 0, command("a", 1), command("b", 2))
    source, delivery = Records(), CommandDelivery(tmp_path)
    delivery.step(source, 0.0)
    source.confirming = [(1, 1)]
    delivery.step(source, 0.0)
    source.connected = False
    delivery.step(source, 1.0)
    assert ids(source) == ["c1", "c2"]
    source.connected, source.connections = True, 2
    delivery.step(source, 2.0)
    assert ids(source) == ["c1", "c2", "c1", "c2"]
    source.confirming = [(1, 2), (2, 3), (2, 4)]
    delivery.step(source, 3.0)
    assert list(tmp_path.iterdir()) == []


def test_commands_that_the_broker_never_confirms_do_not_delay_others(tmp_path: Path) -> None:
    write(tmp_path, 0, command("a b", 1))
    write(tmp_path, 1, command("c", 2))
    (tmp_path / f"{SENT_MS - 1}-broken.json").write_text("{")
    source, delivery = Records(), CommandDelivery(tmp_path)
    for now_s in (0.0, 1.0, UNCONFIRMED_S + 2, UNCONFIRMED_S + 2):
        delivery.step(source, now_s)
    assert ids(source) == ["c1", "c2"]
    source.confirming = [(1, 2)]
    for _ in range(3):
        delivery.step(source, UNCONFIRMED_S + 3)
    assert ids(source) == ["c1", "c2"] and len(list(tmp_path.iterdir())) == 2
    source.connections = 2
    for _ in range(2):
        delivery.step(source, UNCONFIRMED_S + 4)
    assert ids(source) == ["c1", "c2", "c1"]


def test_unconfirmed_commands_are_published_again_in_the_same_connection(tmp_path: Path) -> None:
    """The broker pauses, and drops one of two commands without an end of the connection."""
    write(tmp_path, 0, command("a", 1), command("b", 2))
    source, delivery = Records(), CommandDelivery(tmp_path)
    delivery.step(source, 0.0)
    source.confirming = [(1, 1)]
    delivery.step(source, 1.0)
    aside_s = UNCONFIRMED_S + 2
    delivery.step(source, aside_s)
    delivery.step(source, aside_s + FIRST_PAUSE_S - 1)
    assert ids(source) == ["c1", "c2"]
    delivery.step(source, aside_s + FIRST_PAUSE_S)
    assert ids(source) == ["c1", "c2", "c2"]
    source.confirming = [(1, 3)]
    delivery.step(source, aside_s + FIRST_PAUSE_S)
    assert list(tmp_path.iterdir()) == []


def test_pause_of_a_file_that_is_never_confirmed_grows(tmp_path: Path) -> None:
    write(tmp_path, 0, command("a b", 1))
    source, delivery = Records(), CommandDelivery(tmp_path)
    published: list[int] = []
    for now_s in range(2 * 3_600):
        before = len(source.sent)
        delivery.step(source, now_s)
        published += [now_s] * (len(source.sent) - before)
    assert [round(later - earlier, -1) for earlier, later in pairwise(published)] == [90, 150, 270, 510, 990, 1950]


def test_command_whose_file_the_disk_refused_is_published_without_a_restart(tmp_path: Path) -> None:
    source = Records()
    running = bridge(tmp_path, source)
    running.step()
    write(tmp_path / "commands", 0, command("pump-1", 1))
    blocking = tmp_path / "commands" / DELIVERY
    blocking.touch()  # in place of the folder
    assert running.flush()
    running.step()
    assert ids(source) == []
    blocking.unlink()
    running.step()
    assert ids(source) == ["c1"]
