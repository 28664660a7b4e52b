"""Present fleet: modes and locations in force at the frontier, and nothing beyond it."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.commands.inspect import status
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment, outcome
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import DEVICES
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports import frontiers, judgements
from fleetpulse.reports.present import devices
from tests.support.histories.histories import START, registry_entries, row, signal, tick
from tests.support.homes.homes import JudgedHome, empty

pytestmark = pytest.mark.unit
RULES: dict[str, Any] = {"rules": {"timeout": "100s", "forget_after": "500s"}, "classes": {"slow": {"timeout": "300s"}}}
IN_FORCE = row(0, "fleet/_/_/policy", policy=parse_policy(RULES).normalised(), effective_from_s=-1000)


def _add(received_s: float, device: str, site: str = "site", **content: Any) -> Row:
    return row(received_s, f"fleet/{site}/{device}/registry", op="add", **content)


def _home(path: Path, *rows: Row) -> Home:
    judged = JudgedHome(empty(path / "home", Deployment(10_000, max_clock_lead_ms=100_000)))
    judged.land_and_judge(IN_FORCE, *rows)
    tables.append(judged.home, DEVICES, tables.to_table(DEVICES, registry_entries(rows)), "test", 1)
    return judged.home


def _frontier_ms(home: Home, newest_s: int) -> int | None:
    return frontiers.frontier_ms(home, START + newest_s * 1000)


def _listed(home: Home, newest_s: int) -> dict[str, dict[str, Any]]:
    return {one["device_id"]: one for one in devices.devices(home, _frontier_ms(home, newest_s))}


def _modes(home: Home, newest_s: int) -> dict[str, int]:
    return devices.counts(home, _frontier_ms(home, newest_s))["devices"]


def _location(one: dict[str, Any]) -> tuple[Any, ...]:
    return one["site"], one["device_class"], one["gateway"]


def test_registry_entry_after_the_newest_transition_sets_the_location(tmp_path: Path) -> None:
    beats = [signal(at, "pump") for at in range(10, 301, 50)]
    moved = _add(120, "pump", "north", **{"class": "slow", "gateway": "gate"})
    ahead = _add(130, "pump", "south", effective_from_s=5000)
    home = _home(tmp_path, _add(5, "pump"), *beats, moved, ahead, tick(320))
    assert _location(_listed(home, 320)["pump"]) == ("north", "slow", "gate")
    found = judgements.device_status(home, "pump", START + 320_000)
    assert found is not None
    assert _location(found.summary) == ("north", "slow", "gate")


def test_device_status_has_the_gateway_of_the_newest_signal(tmp_path: Path) -> None:
    beats = [signal(10, "pump"), signal(60, "pump", gateway="other")]
    home = _home(tmp_path, _add(5, "pump", gateway="gate"), *beats, tick(90))
    found = judgements.device_status(home, "pump", START + 90_000)
    assert found is not None
    assert found.summary["gateway"] == "other", "the newest signal came through this gateway, and changed no mode"


def test_forgotten_device_that_is_registered_again_is_provisioned(tmp_path: Path) -> None:
    again = [_add(1000, "pump", "north"), _add(1020, "pump", "east"), tick(1040)]
    home = _home(tmp_path, signal(10, "pump"), signal(20, "gone"), *again)
    shown = _listed(home, 1040)
    assert (shown["gone"]["mode"], shown["pump"]["mode"]) == ("forgotten", "provisioned")
    assert shown["pump"]["since"].timestamp() * 1000 == START + 1_000_000
    assert (shown["pump"]["site"], shown["pump"]["transitions"], shown["pump"]["runtime_ms"]) == ("east", 0, None)
    assert _modes(home, 1040) == {"forgotten": 1, "provisioned": 1}
    found = judgements.device_status(home, "pump", START + 1_040_000)
    assert found is not None
    assert (found.summary["mode"], found.summary["life_ms"]) == ("provisioned", START + 1_000_000)


def test_decommissioned_device_that_is_registered_again_is_provisioned(tmp_path: Path) -> None:
    out = row(40, "fleet/_/pump/registry", op="decommission")
    home = _home(tmp_path, _add(5, "pump"), signal(10, "pump"), out, _add(50, "pump", "north"), tick(70))
    shown = _listed(home, 70)["pump"]
    assert (shown["mode"], shown["site"]) == ("provisioned", "north")


def test_device_registered_for_the_future_is_listed_and_not_counted(tmp_path: Path) -> None:
    home = _home(tmp_path, _add(5, "now"), _add(6, "later", effective_from_s=86_400), signal(10, "pump"), tick(60))
    shown = _listed(home, 60)
    assert {name: one["mode"] for name, one in shown.items()} == {"now": "provisioned", "later": "unjudged", "pump": "online"}
    assert shown["later"]["reason"] == "registered from 2023-11-15T22:13:20Z"
    assert _modes(home, 60) == {"online": 1, "provisioned": 1}
    assert {one["mode"] for one in devices.devices(home, None) if one["device_id"] == "now"} == {"unjudged"}


def test_listed_modes_equal_those_of_the_definition(tmp_path: Path) -> None:
    refused = _add(30, "never", effective_from_s=-50)  # effective before the frontier
    rows = [_add(5, "silent"), signal(10, "pump"), refused, _add(40, "fresh", effective_from_s=45), tick(70)]
    home = _home(tmp_path, *rows)
    defined = outcome([IN_FORCE, *rows], home.deployment()).devices
    shown = _listed(home, 70)
    assert {name: one["mode"] for name, one in shown.items() if one["mode"] != "unjudged"} == {
        name: device.mode.value for name, device in defined.items()
    }
    assert shown["never"]["reason"] == "effective_from must lie beyond the frontier"


def test_last_seen_of_a_fast_clock_is_the_time_of_receipt(tmp_path: Path) -> None:
    ahead = [signal(140, "pump", received_s=40), signal(400, "pump", received_s=41), signal(500, "liar", received_s=42)]
    home = _home(tmp_path, signal(10, "pump"), *ahead, tick(60))
    shown = _listed(home, 60)
    assert shown["pump"]["last_seen"].timestamp() * 1000 == START + 41_000
    assert shown["liar"]["last_seen"].timestamp() * 1000 == START + 42_000
    assert (shown["liar"]["mode"], shown["liar"]["reason"]) == ("online", None)


def test_query_of_one_device_equals_its_row_in_the_list(tmp_path: Path) -> None:
    rows = [
        signal(10, "a"),
        signal(20, "it's"),
        signal(500, "liar", received_s=42),
        _add(43, "never"),
        signal(200, "it's"),
        tick(250),
    ]
    home = _home(tmp_path, *rows)
    listed = _listed(home, 250)
    assert set(listed) == {"a", "it's", "liar", "never"}
    for device_id, listed_row in listed.items():
        assert devices.devices(home, _frontier_ms(home, 250), device_id=device_id) == [listed_row]
    assert devices.devices(home, _frontier_ms(home, 250), device_id="nobody") == []


def test_device_table_shows_the_newest_mode_changes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unjudged = signal(58, "a-new")
    home = _home(tmp_path, signal(10, "a"), signal(20, "c"), signal(30, "b"), unjudged, tick(60))
    status.devices(home.path, last=2)
    output = capsys.readouterr().out
    assert [line.split()[:2] for line in output.splitlines() if " online " in line] == [["b", "online"], ["c", "online"]]
    assert "2 of 4 devices, those with the newest mode changes; more with --last N" in output
    status.devices(home.path, last=2, json_lines=True)
    assert [json.loads(line)["device_id"] for line in capsys.readouterr().out.splitlines()] == ["a", "a-new", "b", "c"]
