"""Commands about every device that a filter selects: the selection of the page, and the checked count."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.app import app
from cli.commands.fleet.device_bulk import require_expected
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.replay import Deployment
from fleetpulse.io.home.home import Home
from tests.support.asgi import Client
from tests.support.histories.histories import row, signal, tick
from tests.support.homes.homes import RegisteredHome
from tests.support.page_client import served
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a home with four pumps, two of them silent, and a meter."""
    made = RegisteredHome(tmp_path / "home", Deployment(10_000))
    pumps = [row(1, f"fleet/hall/pump-{number}/registry", op="add", **{"class": "pump"}) for number in range(4)]
    heard = [signal(2, f"pump-{number}") for number in range(2)]
    made.batch(*pumps, row(1, "fleet/hall/meter-1/registry", op="add", **{"class": "meter"}), *heard, tick(60))
    return made.home


def _run(home: Home, *words: str) -> Result:
    return CliRunner().invoke(app, ["device", "bulk", *words, "--home", str(home.path)])


def _spooled(home: Home) -> list[dict[str, Any]]:
    return [one for path in sorted(home.commands.glob("*.json")) for one in json.loads(path.read_text())]


def _refuses(home: Home, code: str, *words: str) -> None:
    with refused(code, FleetError):
        found = _run(home, *words)
        assert found.exception is not None
        raise found.exception
    assert not _spooled(home), "no command is given"


@pytest.mark.parametrize(
    ("words", "query"),
    [
        (("--class", "pump"), "class=pump"),
        (("--class", "pump", "--mode", "provisioned"), "class=pump&mode=provisioned"),
        (("--q", "PUMP-1"), "q=PUMP-1"),
        (("--mode", "provisioned,online", "--site", "hall"), "mode=provisioned,online&site=hall"),
    ],
)
def test_the_selection_is_that_of_the_api(home: Home, words: tuple[str, ...], query: str) -> None:
    with served(home) as client:
        listed = _listed(client, query)
    found = _run(home, "release", *words, "--expect", str(len(listed)), "--json")
    assert found.exit_code == 0, found.output
    assert {json.loads(line)["device_id"] for line in found.stdout.splitlines()} == listed and listed
    assert {one["topic"].split("/")[2] for one in _spooled(home)} == listed
    assert {json.dumps(one["payload"]) for one in _spooled(home)} == {'{"op": "release"}'}


def _listed(client: Client, query: str) -> set[str]:
    return {one["device_id"] for one in client.get(f"/api/v1/devices?{query}").json()["devices"]}


def test_maintenance_has_one_end_for_all_devices(home: Home) -> None:
    found = _run(home, "maintain", "--class", "pump", "--expect", "4", "--for", "2h")
    assert "the command maintain is given to 4 devices" in found.output
    commands = _spooled(home)
    assert len(commands) == 4 and {one["payload"]["op"] for one in commands} == {"maintain"}
    assert len({one["payload"]["until"] for one in commands}) == 1
    assert _run(home, "decommission", "--device", "pump-3", "--expect", "1").exit_code == 0
    assert _spooled(home)[-1]["topic"].endswith("/pump-3/registry")


def test_a_dry_run_gives_no_command(home: Home) -> None:
    found = _run(home, "release", "--class", "pump", "--dry-run")
    assert "would give the command release to 4 devices: pump-0, pump-1, pump-2, pump-3" in found.output
    assert not _spooled(home)


def test_a_bulk_command_is_refused_as_a_whole(home: Home) -> None:
    _refuses(home, "count-missing", "release", "--class", "pump")
    _refuses(home, "count-differs", "release", "--class", "pump", "--expect", "5")
    _refuses(home, "filter-missing", "release", "--expect", "5", "--mode", "")
    _refuses(home, "list-empty", "release", "--class", "fan", "--expect", "0")
    _refuses(home, "device-unknown", "release", "--device", "pump-1", "--device", "pump-9", "--expect", "2")
    _refuses(home, "option-conflict", "maintain", "--class", "pump", "--expect", "4")
    _refuses(home, "option-conflict", "release", "--class", "pump", "--expect", "4", "--for", "2h")
    _refuses(home, "maintenance-too-long", "maintain", "--class", "pump", "--expect", "4", "--for", "90d")
    _refuses(home, "parameter-invalid", "release", "--mode", "asleep", "--expect", "4")


def test_an_id_that_cannot_be_part_of_a_topic_refuses_all(tmp_path: Path) -> None:
    made = RegisteredHome(tmp_path / "home", Deployment(10_000))
    made.batch(signal(2, "a"), replace(signal(3, "b"), device_id="b/c"), tick(60))
    _refuses(made.home, "commands-faulty", "release", "--mode", "online", "--expect", "2")


@pytest.mark.parametrize(
    ("count", "expect", "code"),
    [
        (4, "4", None), (4, "5", "count-differs"), (990, "1,000", None), (989, "1000", "count-differs"),
        (100_010, "100000", None), (100_011, "100000", "count-differs"), (4, None, "count-missing"), (4, "-4", "count-missing"),
    ],
)  # fmt: skip
def test_the_expected_number_may_differ_by_one_per_cent_and_at_most_ten(count: int, expect: str | None, code: str | None) -> None:
    if code is None:
        require_expected(count, expect)
        return
    with refused(code, Misuse if code == "count-missing" else FleetError):
        require_expected(count, expect)
