"""`fleet device command`: a command is spooled with the topic of its device."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.replay import Deployment
from fleetpulse.io.home.home import Home
from tests.support.histories.histories import row
from tests.support.homes.homes import empty, land
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def run(home: Home, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["device", "command", *arguments, "--home", str(home.path)], catch_exceptions=False)


def spooled(home: Home) -> list[dict[str, Any]]:
    return [one for path in sorted(home.commands.glob("*.json")) for one in json.loads(path.read_text())]


def test_a_command_is_spooled_for_the_site_of_the_newest_message(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", Deployment())
    land(home, [row(1, "fleet/oslo/pump-1/heartbeat")], 1)
    done = run(home, "pump-1", "set", "--payload", '{"interval_s": 60}', "--id", "c1")
    assert done.exit_code == 0 and "command c1 is sent" in done.stdout
    content = {"op": "command", "id": "c1", "name": "set", "payload": {"interval_s": 60}}
    assert spooled(home) == [{"topic": "fleet/oslo/pump-1/control", "payload": content}]


def test_each_command_gets_another_id(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", Deployment())
    printed = [json.loads(run(home, "pump-1", "reboot", "--site", "oslo", "--json").stdout) for _ in range(2)]
    assert [one["payload"]["id"] for one in spooled(home)] == [one["id"] for one in printed]
    assert printed[0]["id"] != printed[1]["id"]


def test_a_command_needs_a_site_since_its_topic_has_one(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", Deployment())
    with refused("device-site-unknown"):
        run(home, "pump-1", "reboot")
    by_site = Home(tmp_path / "other")
    by_site.prepare(Deployment(), DeviceIdentity.SITE_AND_ID)
    assert run(by_site, "oslo/pump-1", "reboot").exit_code == 0
    assert [one["topic"] for one in spooled(by_site)] == ["fleet/oslo/pump-1/control"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("set", "--payload", "[1]"), "payload-invalid"),
        (("set", "--payload", "{"), "payload-invalid"),
        (("",), "commands-faulty"),
        (("set", "--id", ""), "commands-faulty"),
    ],
)
def test_a_faulty_command_is_not_spooled(arguments: tuple[str, ...], code: str, tmp_path: Path) -> None:
    home = empty(tmp_path / "home", Deployment())
    with refused(code):
        run(home, "pump-1", *arguments, "--site", "oslo")
    assert spooled(home) == []
