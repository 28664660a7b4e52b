"""Alarms become errors of their devices once, wherever the forwarder is killed."""

import json
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import structlog

from fleetpulse.core.streams.tables import VITAL_ALARMS
from fleetpulse.io.delta.corruption import DamagedError
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.streams import alarm_forwarder
from fleetpulse.io.streams.alarm_forwarder import AlarmForwarder
from fleetpulse.io.tables import tables
from tests.support.refusals import refused

pytestmark = pytest.mark.unit

AT_MS = 1_700_000_000_000


class Killed(BaseException):
    """End of the process between two steps."""


def _raise_alarms(home: Home, number: int, *devices: str) -> None:
    tables.create(home, VITAL_ALARMS)
    rows = [
        {
            "device_id": device, "metric": "battery", "site": "oslo", "raised_at_ms": AT_MS + number, "broken_from_ms": AT_MS,
            "for_ms": 1, "last": 3.0,
        }
        for device in devices
    ]  # fmt: skip
    tables.append_of(home, VITAL_ALARMS, tables.to_table(VITAL_ALARMS, rows), {"query": number})


def _spooled(home: Home) -> list[tuple[str, dict[str, Any]]]:
    files = sorted(home.commands.glob("*.json"))
    return [(one["topic"], one["payload"]) for file in files for one in json.loads(file.read_text())]


def test_alarm_becomes_an_error_of_its_device(home: Home) -> None:
    assert AlarmForwarder(home).forward() == 0
    _raise_alarms(home, 1, "a")
    forwarder = AlarmForwarder(home)
    assert forwarder.forward() == 1
    assert forwarder.forward() == 0
    content = {"op": "error", "code": "vital:battery", "raised_at": "2023-11-14T22:13:20.001000+00:00"}
    assert _spooled(home) == [("fleet/oslo/a/control", content)]


def test_many_alarms_go_into_several_files(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm_forwarder, "MAX_COMMANDS", 2)
    _raise_alarms(home, 1, "a", "b", "c")
    assert AlarmForwarder(home).forward() == 3
    assert len([*home.commands.glob("*.json")]) == 2
    assert [topic for topic, _ in _spooled(home)] == [f"fleet/oslo/{name}/control" for name in "abc"]


@pytest.mark.parametrize("removed", ["commit", "file"])
def test_versions_that_maintenance_removed_are_skipped(home: Home, removed: str) -> None:
    for number, device in enumerate("abc", 1):
        _raise_alarms(home, number, device)
    log = DeltaLog(home.table(VITAL_ALARMS.name))
    files = [Path(path) for path, _ in log.appended(2)]
    for path in files if removed == "file" else [log.log / f"{2:020d}.json"]:
        path.unlink()
    with structlog.testing.capture_logs() as logged:
        assert AlarmForwarder(home).forward() == 2
    assert [(one["versions"], one["first"]) for one in logged] == [(1, 2)]
    assert sorted(topic for topic, _ in _spooled(home)) == ["fleet/oslo/a/control", "fleet/oslo/c/control"]
    assert AlarmForwarder(home).forward() == 0


@pytest.mark.parametrize("step", range(6))
def test_alarms_are_forwarded_once_wherever_the_process_is_killed(home: Home, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Kill the forwarder before each write or move, and after each."""
    monkeypatch.setattr(alarm_forwarder, "MAX_COMMANDS", 1)
    _raise_alarms(home, 1, "a")
    AlarmForwarder(home).forward()
    _raise_alarms(home, 2, "b", "c")
    steps = count()

    def killing(action: Any) -> Any:
        def run(*arguments: Any) -> Any:
            if next(steps) == step:
                raise Killed
            return action(*arguments)

        return run

    with monkeypatch.context() as patched:
        for name in ("atomic_write", "spool_file"):
            patched.setattr(alarm_forwarder, name, killing(getattr(alarm_forwarder, name)))
        try:
            AlarmForwarder(home).forward()
        except Killed:
            assert step < 5
        else:
            assert step == 5  # all five steps were done
    AlarmForwarder(home).forward()
    assert sorted(topic for topic, _ in _spooled(home)) == [f"fleet/oslo/{name}/control" for name in "abc"]
    assert [path.name for path in (home.path / "checkpoints" / "vital_alarms").iterdir()] == ["position.json"]


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("is_done", [False, True])
def test_alarms_are_forwarded_once_if_the_disk_refuses_a_step(
    home: Home, monkeypatch: pytest.MonkeyPatch, step: int, is_done: bool
) -> None:
    """Fail before each write or move, and after each; the same forwarder tries again when further alarms follow."""
    monkeypatch.setattr(alarm_forwarder, "MAX_COMMANDS", 1)
    _raise_alarms(home, 1, "a")
    forwarder = AlarmForwarder(home)
    forwarder.forward()
    _raise_alarms(home, 2, "b", "c")
    steps = count()

    def failing(action: Any) -> Any:
        def run(*arguments: Any) -> Any:
            fails = next(steps) == step
            if is_done or not fails:
                action(*arguments)
            if fails:
                raise OSError(28, "No space left on device")

        return run

    with monkeypatch.context() as patched:
        for name in ("atomic_write", "spool_file"):
            patched.setattr(alarm_forwarder, name, failing(getattr(alarm_forwarder, name)))
        with nullcontext() if step == 5 else pytest.raises(OSError, match="No space"):
            forwarder.forward()
    _raise_alarms(home, 3, "d")
    forwarder.forward()
    AlarmForwarder(home).forward()
    assert sorted(topic for topic, _ in _spooled(home)) == [f"fleet/oslo/{name}/control" for name in "abcd"]


@pytest.mark.parametrize("content", ["", "{}", '{"version": "x"}', "[]"])
def test_damaged_position_is_refused_and_nothing_is_forwarded(home: Home, content: str) -> None:
    _raise_alarms(home, 1, "a")
    position = home.path / "checkpoints" / "vital_alarms" / "position.json"
    position.parent.mkdir(parents=True)
    position.write_text(content)
    with refused("alarm-position-damaged"):
        AlarmForwarder(home).forward()
    assert _spooled(home) == []


def test_damaged_file_of_alarms_is_refused_and_nothing_is_forwarded(home: Home) -> None:
    _raise_alarms(home, 1, "a")
    [(path, _)] = DeltaLog(home.table(VITAL_ALARMS.name)).appended(1)
    Path(path).write_bytes(b"not Parquet")
    with pytest.raises(DamagedError):
        AlarmForwarder(home).forward()
    assert _spooled(home) == []
