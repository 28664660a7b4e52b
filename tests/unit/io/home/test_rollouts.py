"""Folder of a rollout: its record, its devices, and commands that are in one place at any time."""

import json
from pathlib import Path

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rollouts.plan import parse_rollout_plan
from fleetpulse.core.rollouts.rollout import Rollout
from fleetpulse.io.home.command_spool import Command
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.rollouts import StoredRollout, rollout_names, rollouts_lock
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
PLAN = parse_rollout_plan({"name": "r", "version": "2", "scope": "TRUE", "soak": "10m"})
UPDATE: Command = ("fleet/s/d/control", {"op": "update", "until": 1_700_000_000_000})
MORE: Command = ("fleet/s/d/control", {"op": "command", "id": "7", "name": "firmware", "payload": {"version": "2"}})


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a home without rows."""
    found = Home(tmp_path / "home")
    found.prepare(Deployment())
    return found


def spooled(home: Home) -> list[Command]:
    """Return the commands in the spool, in their order."""
    content = [json.loads(path.read_text()) for path in sorted(home.commands.glob("*.json"))]
    return [(command["topic"], command["payload"]) for commands in content for command in commands]


def test_a_record_and_its_devices_are_read_back(home: Home) -> None:
    stored = StoredRollout(home, "r")
    assert stored.find() is None and rollout_names(home) == []
    with rollouts_lock(home):
        stored.create([("d", "s"), ("e", "s")])
        assert stored.find() is None and rollout_names(home) == [], "without a record, there is no rollout"
        stored.write(Rollout(PLAN, 2, "ann"))
    assert stored.read() == Rollout(PLAN, 2, "ann")
    assert stored.devices() == [("d", "s"), ("e", "s")] and rollout_names(home) == ["r"]


def test_an_unknown_or_damaged_rollout_is_refused(home: Home) -> None:
    stored = StoredRollout(home, "r")
    with refused("rollout-unknown", match="known are: none"):
        stored.read()
    stored.create([])
    stored.write(Rollout(PLAN, 0, "ann"))
    (home.path / "rollouts" / "r" / "rollout.json").write_text("{")
    (home.path / "rollouts" / "r" / "devices.json").write_text("[1]")
    with refused("rollout-record-damaged"):
        stored.read()
    with refused("rollout-record-damaged"):
        stored.devices()


def test_prepared_commands_reach_the_spool_once_and_in_order(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetpulse.io.home.rollouts.MAX_IN_FILE", 1)
    stored = StoredRollout(home, "r")
    stored.create([])
    stored.prepare([UPDATE, MORE])
    assert (stored.waiting(), spooled(home)) == (2, [])
    stored.send()
    assert (stored.waiting(), spooled(home)) == (0, [UPDATE, MORE])
    stored.send()
    assert spooled(home) == [UPDATE, MORE]


def test_an_interrupted_send_continues_with_the_remaining_files(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetpulse.io.home.rollouts.MAX_IN_FILE", 1)
    stored = StoredRollout(home, "r")
    stored.create([])
    stored.prepare([UPDATE, MORE])
    blocked = home.path / "rollouts" / "r" / "commands-001.json"
    aside = blocked.rename(home.path / "aside")
    stored.send()
    aside.rename(blocked)
    assert spooled(home) == [UPDATE]
    StoredRollout(home, "r").send()
    assert spooled(home) == [UPDATE, MORE]


def test_a_new_step_replaces_the_commands_of_one_that_did_not_happen(home: Home) -> None:
    stored = StoredRollout(home, "r")
    stored.create([])
    stored.prepare([UPDATE])
    stored.prepare([MORE])
    stored.send()
    assert spooled(home) == [MORE]
    stored.prepare([UPDATE])
    stored.discard()
    stored.send()
    assert spooled(home) == [MORE]


def test_an_invalid_command_leaves_the_prepared_ones(home: Home) -> None:
    stored = StoredRollout(home, "r")
    stored.create([])
    stored.prepare([UPDATE])
    with refused("commands-faulty"):
        stored.prepare([MORE, ("fleet/s/d/control", {"op": "command", "name": "x"})])
    stored.send()
    assert spooled(home) == [UPDATE]


def test_the_announced_end_of_an_interrupted_step_is_renewed(home: Home) -> None:
    stored = StoredRollout(home, "r")
    stored.create([])
    stored.prepare([UPDATE, MORE])
    stored.renew(1_800_000_000_000)
    stored.send()
    assert spooled(home) == [(UPDATE[0], {"op": "update", "until": 1_800_000_000_000}), MORE]


def test_a_folder_that_cannot_be_written_is_an_error_with_advice(home: Home) -> None:
    (home.path / "rollouts").write_text("a file")
    with refused("rollout-unwritable"), rollouts_lock(home):
        pass
    with refused("rollout-unwritable"):
        StoredRollout(home, "r").create([])
