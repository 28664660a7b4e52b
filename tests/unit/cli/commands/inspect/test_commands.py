"""`fleet commands` and `fleet twin`: rows for people and for programs."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from fleetpulse.core.replay import Deployment
from fleetpulse.core.streams.tables import COMMANDS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START, row
from tests.support.homes.homes import empty, land
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = empty(tmp_path / "home", Deployment())
    sent = {"device_id": "pump-1", "sent_at_ms": START, "command_id": "c1", "name": "set", "payload": '{"interval_s":60}'}
    answer = {"status": "acknowledged", "answered_at_ms": START + 2_000, "latency_ms": 2_000, "reported": '{"interval_s":60}'}
    rows = [{**sent, "status": "pending"}, {**sent, **answer}, {**sent, "command_id": "c2", "status": "pending"}]
    tables.append(made, COMMANDS, tables.to_table(COMMANDS, rows), "test", 1)
    land(made, [row(1, "fleet/s/pump-1/birth", firmware="1.0")], 1)
    return made


def run(home: Home, *arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--home", str(home.path)], catch_exceptions=False)
    assert done.exit_code == 0
    return done


def test_commands_are_listed_with_their_states(home: Home) -> None:
    done = run(home, "commands", "pump-1")
    assert [word in done.stdout for word in ("c1", "acknowledged", "2s", "c2", "pending")] == [True] * 5
    assert "the stream commands is off" in done.stderr
    assert "acknowledged" not in run(home, "commands", "--status", "pending").stdout
    assert run(home, "commands", "other", "--json").stdout == ""
    rows = [json.loads(line) for line in run(home, "commands", "--json").stdout.splitlines()]
    assert [(one["command_id"], one["status"], one["latency_ms"]) for one in rows] == [
        ("c1", "acknowledged", 2_000),
        ("c2", "pending", None),
    ]


def test_a_twin_shows_both_states_and_their_difference(home: Home) -> None:
    found = json.loads(run(home, "twin", "pump-1", "--json").stdout)
    assert (found["desired"], found["reported"]) == ({"interval_s": 60}, {"interval_s": 60, "firmware": "1.0"})
    assert (found["difference"], len(found["commands"])) == ({}, 2)
    assert 'reported: {"interval_s": 60, "firmware": "1.0"}' in run(home, "twin", "pump-1").stdout
    with refused("device-unknown"):
        run(home, "twin", "pump-2")
