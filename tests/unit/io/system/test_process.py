"""Processes: stop signals, status files, the spool of commands, and broker addresses."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse.core.errors import FleetError
from fleetpulse.io.mqtt.address import BrokerAddress, load_address, parse_broker_url, save_address
from fleetpulse.io.system.locks import lock_holder, named_lock
from fleetpulse.io.system.process import StopSignal, read_status, write_status
from streaming.bridge.command_reader import Spool
from tests.support.refusals import refused


def test_a_signal_stops_a_wait_at_once() -> None:
    stop = StopSignal()
    try:
        assert not stop.wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(30)
    finally:
        stop.close()


def test_end_of_the_parent_stops_a_wait() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stop = StopSignal(child.pid)
    try:
        assert not stop.is_set()
        child.communicate(b"\n", timeout=30)
        assert stop.wait(30)
    finally:
        stop.close()


def test_status_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "bridge.json"
    assert read_status(path) == {}
    assert write_status(path, {"pid": 1})
    assert write_status(path, {"pid": 2})
    assert read_status(path) == {"pid": 2}
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_status_file_raises_no_error(tmp_path: Path) -> None:
    assert not write_status(tmp_path / "none" / "bridge.json", {})


def test_commands_are_taken_in_order_of_their_names(tmp_path: Path) -> None:
    single, several = {"topic": "a", "payload": {"n": 1}}, [{"topic": "b", "payload": {}}, {"topic": "c", "payload": {}}]
    (tmp_path / "2.json").write_text(json.dumps(several))
    (tmp_path / "1.json").write_text(json.dumps(single))
    spool = Spool(tmp_path, 0)
    assert spool.take(1) == [("1.json", "a", {"n": 1}), ("2.json", "b", {}), ("2.json", "c", {})]
    assert spool.take(1) == []
    spool.written()
    assert list(tmp_path.iterdir()) == []


def test_a_command_taken_for_a_segment_that_was_never_written_is_put_back(tmp_path: Path) -> None:
    for number in (4, 5):
        (tmp_path / f"{number}.json.taken-{number}").write_text('{"topic": "a", "payload": {}}')
    assert [name for name, _, _ in Spool(tmp_path, newest=4).take(5)] == ["5.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["5.json.taken-5"]


def test_command_that_is_not_named_by_its_segment_is_put_back(tmp_path: Path) -> None:
    """Another process of the same bridge wrote the segment, and had not taken the command."""
    for name in ("1.json", "2.json"):
        (tmp_path / f"{name}.taken-4").write_text('{"topic": "a", "payload": {}}')
    assert [name for name, _, _ in Spool(tmp_path, newest=4, named={"1.json"}).take(5)] == ["2.json"]


def test_rename_of_a_taken_command_is_durable_before_its_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "1.json").write_text('{"topic": "a", "payload": {}}')
    spool = Spool(tmp_path, 0)
    monkeypatch.setattr("os.fsync", full)
    spool.sync()  # nothing was taken
    assert spool.take(1) == [("1.json", "a", {})]
    with pytest.raises(OSError, match="No space"):
        spool.sync()


def test_command_file_that_cannot_be_moved_loses_no_earlier_command(tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text('{"topic": "a", "payload": {}}')
    (tmp_path / "2.json").write_text("{")
    (tmp_path / "refused").write_text("where the folder should be")
    spool = Spool(tmp_path, 0)
    assert spool.take(1) == [("1.json", "a", {})]
    spool.written()
    assert spool.take(2) == []
    (tmp_path / "refused").unlink()
    assert spool.take(2) == []
    assert (tmp_path / "refused" / "2.json").exists()


@pytest.mark.parametrize("text", ["{", "[" * 200_000, "[1]", '{"topic": 1, "payload": {}}', '{"topic": "a"}', '"x"'])
def test_a_broken_command_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "1.json").write_text(text)
    assert Spool(tmp_path, 0).take(1) == []
    assert (tmp_path / "refused" / "1.json").read_text() == text


def test_addresses_are_read_and_their_password_is_never_shown(tmp_path: Path) -> None:
    address = parse_broker_url("mqtt://m%40e@host:1884", {"FLEET_MQTT_PASSWORD": "s@cret"})
    assert address == BrokerAddress("host", 1884, "m@e", "s@cret")
    assert "s@cret" not in f"{address} {address!r}"
    save_address(tmp_path / "broker.json", address)
    assert load_address(tmp_path / "broker.json") == address
    assert stat.S_IMODE((tmp_path / "broker.json").stat().st_mode) == 0o600
    named = parse_broker_url("mqtt://host", {"FLEET_MQTT_USERNAME": "u", "FLEET_MQTT_PASSWORD": "p"})
    assert named == BrokerAddress("host", 1883, "u", "p")


@pytest.mark.parametrize("url", ["host:1883", "http://host", "mqtt://", "mqtt://h:x", "mqtt://u:secret@h:99999", "mqtt://h/path"])
def test_a_wrong_address_is_refused_without_its_password(url: str) -> None:
    with refused("broker-url-invalid") as caught:
        parse_broker_url(url)
    assert "secret" not in str(caught.value)


def test_a_password_on_the_command_line_is_refused_and_not_repeated() -> None:
    with refused("password-in-url") as caught:
        parse_broker_url("mqtt://me:secret@host")
    assert "secret" not in str(caught.value)


def test_missing_broker_address_is_refused(tmp_path: Path) -> None:
    with refused("broker-unknown"):
        load_address(tmp_path / "broker.json")


def _held(other: str) -> FleetError:
    return FleetError(f"the lock is held by {other}", code="lock-held")


def test_lock_is_held_without_the_name_of_its_holder_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with named_lock(tmp_path / "lock", "one", _held):
        assert lock_holder(tmp_path / "lock") == "another run"
        with refused("lock-held", match="another run"), named_lock(tmp_path / "lock", "two", _held):
            raise AssertionError("two processes hold the lock")
    assert lock_holder(tmp_path / "lock") is None
    with named_lock(tmp_path / "lock", "one", _held):
        pass
