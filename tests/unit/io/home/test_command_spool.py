"""Operators' commands: an impossible or forbidden one is refused when it is given."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.commands.batch.amend import amend
from cli.commands.fleet.access import grant, revoke
from cli.commands.fleet.device import import_, maintain
from cli.commands.inspect.status import transitions
from cli.supervisor.up import UpOptions, _prepare
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import DEVICES
from fleetpulse.io.home.command_spool import spool, spooled
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.effective_policy import rules_at
from streaming.bridge.command_reader import Spool
from streaming.simulator.simulator import load_fleet
from tests.support.histories.histories import START, registry_entries, row, signal
from tests.support.homes.homes import empty, landed_home
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
POLICY = {"rules": {"longest_hold": "2h"}, "classes": {"pump": {"longest_hold": "10h"}}}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A home with messages of a pump and of a device without a class, and with its own policy."""
    add = row(5, "fleet/s/p/registry", op="add", **{"class": "pump"})
    policy = row(0, "fleet/_/_/policy", policy=parse_policy(POLICY).normalised(), effective_from_s=-1000)
    created = landed_home(tmp_path / "home", [policy, add, signal(30, "p"), signal(31, "other")], Deployment())
    tables.create(created, DEVICES)
    landed = {"origin": "command", "bridge": "b", "segment": 1}
    tables.append(created, DEVICES, tables.to_table(DEVICES, [{**one, **landed} for one in registry_entries([add])]), "test", 1)
    return created


def test_maintenance_longer_than_the_policy_allows_is_refused(home: Home) -> None:
    maintain("p", for_="9h", home=home.path)
    maintain("other", for_="2h", home=home.path)
    assert len(spooled(home)) == 2
    with refused("maintenance-too-long"):
        maintain("p", for_="11h", home=home.path)
    with refused("maintenance-too-long"):
        maintain("other", for_="3h", home=home.path)
    assert len(spooled(home)) == 2


@pytest.mark.parametrize("command", [amend, transitions], ids=["amend", "transitions"])
def test_unknown_device_id_is_refused_and_not_reported_as_empty(
    command: Callable[..., None], home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_for(device_id: str) -> None:
        command(home=home.path, device=[device_id] if command is amend else device_id, json_lines=True)

    run_for("p")
    assert not capsys.readouterr().out, "the device has no judgements yet"
    with refused("device-unknown"):
        run_for("q")


def test_rules_of_a_device_are_those_of_its_class_at_the_instant(home: Home) -> None:
    for instant_s, device_class, hours in ((4, "default", 2), (5, "pump", 10)):
        found = rules_at(home, "p", START + instant_s * 1000)
        assert found is not None
        assert (found[0], found[1].longest_hold_ms) == (device_class, hours * 3_600_000)


def test_policy_that_took_effect_in_a_coverage_gap_is_on_time(tmp_path: Path) -> None:
    policy = row(9_001, "fleet/_/_/policy", policy=parse_policy(POLICY).normalised(), effective_from_s=5_000)
    gap = [row(9_000, "fleet/_/b/gap", op="open", from_s=100), row(9_000.5, "fleet/_/b/gap", op="close", until_s=9_000)]
    for rows, hours in ([signal(30, "p"), policy], 7 * 24), ([signal(30, "p"), *gap, policy], 2):
        home = landed_home(tmp_path / str(hours), rows, Deployment())
        found = rules_at(home, "p", START + 9_001_000)
        assert found is not None
        assert found[1].longest_hold_ms == hours * 3_600_000


def test_commands_are_taken_in_the_order_in_which_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, clock = empty(tmp_path / "home", Deployment()), [1_700_000_000.0]
    monkeypatch.setattr("fleetpulse.io.home.command_spool.wall_clock_ms", lambda: int(clock[0] * 1000))
    order = [f"d{number}" for number in range(12)]
    for number, device in enumerate(order):
        spool(home, [(f"fleet/s/{device}/registry", {"op": "add"})])
        clock[0] += (0, 5, -3_600)[number % 3]
        if number == 5:  # the bridge has taken them, and has not written them yet
            for path in home.commands.glob("*.json"):
                path.rename(path.with_name(f"{path.name}.taken-1"))
    given = [one for path in sorted(home.commands.glob("*.json*")) for one in json.loads(path.read_text())]
    assert [one["topic"].split("/")[2] for one in given] == order


def test_more_commands_than_a_segment_holds_are_refused_and_not_spooled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = empty(tmp_path / "home", Deployment())
    monkeypatch.setattr("fleetpulse.io.home.command_spool.MAX_COMMANDS", 3)
    commands = [(f"fleet/s/d{number}/registry", {"op": "add"}) for number in range(4)]
    with refused("commands-too-many"):
        spool(home, commands)
    assert not spooled(home)
    spool(home, commands[:3])
    assert len(spooled(home)) == 3


def test_segment_takes_command_files_up_to_its_limit_and_refuses_too_large_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streaming.bridge.command_reader._ENOUGH", 3)
    monkeypatch.setattr("streaming.bridge.command_reader.MAX_COMMANDS", 4)
    for name, count in (("1-a", 2), ("2-b", 5), ("3-c", 2), ("4-d", 1)):
        command = {"topic": "fleet/s/d/registry", "payload": {"op": "add"}}
        (tmp_path / f"{name}.json").write_text(json.dumps([command] * count))
    reader = Spool(tmp_path, 0)
    assert [name for name, _, _ in reader.take(1)] == ["1-a.json"] * 2 + ["3-c.json"] * 2
    assert [path.name for path in (tmp_path / "refused").iterdir()] == ["2-b.json"]
    assert reader.take(1) == [], "no further files are taken until the taken commands are written"
    reader.written()
    assert [name for name, _, _ in reader.take(2)] == ["4-d.json"]


def test_rules_are_unknown_before_the_first_landing(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", Deployment())
    assert rules_at(home, "p", int(time.time() * 1000)) is None
    maintain("p", for_="30d", home=home.path)
    assert len(spooled(home)) == 1


def test_grant_and_revoke_refuse_a_missing_home(tmp_path: Path) -> None:
    for command in (grant, revoke):
        with refused("home-missing"):
            command("pump", home=tmp_path / "slip")
    assert not (tmp_path / "slip").exists()


@pytest.mark.parametrize("column", ["class", "device_class"])
def test_import_accepts_the_class_column_under_both_names(tmp_path: Path, column: str) -> None:
    home = empty(tmp_path / "home", Deployment())
    (tmp_path / "devices.csv").write_text(f"device_id,site,{column},gateway\npump-1,oslo,pump,gate-7\n")
    import_(tmp_path / "devices.csv", home.path)
    [command] = [one for path in home.commands.glob("*.json") for one in json.loads(path.read_text())]
    assert command["topic"] == "fleet/oslo/pump-1/registry"
    assert command["payload"] == {"op": "add", "class": "pump", "gateway": "gate-7"}


def test_home_keeps_its_simulated_fleet_and_refuses_another(tmp_path: Path) -> None:
    def prepare(devices: int | None, seed: int | None) -> None:
        _prepare(home, UpOptions(devices, seed, None, simulate=True, broker=None, port=0, policy=None))

    home = empty(tmp_path / "home", Deployment())
    prepare(20, None)
    for devices, seed in ((None, None), (20, None), (20, 1)):
        prepare(devices, seed)
    for devices, seed in ((100, None), (None, 0), (20, 2)):
        with refused("simulated-fleet-differs"):
            prepare(devices, seed)
    found = load_fleet(home)
    assert found is not None and (found.scenario.devices, found.scenario.seed) == (20, 1)
