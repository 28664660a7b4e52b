"""Routes about the whole fleet: the counts are those of `fleet status`."""

from pathlib import Path
from typing import Any

import pytest

from cli.commands.inspect.status import status_facts
from fleetpulse.web.api import fleet
from tests.support.api import Api
from tests.support.histories.histories import signal, tick
from tests.support.homes.api_home import ODD, api_home

pytestmark = pytest.mark.unit
_OF_PROCESSES = ("processes", "troubles", "broker", "services", "takeovers")


def _status(home: Any) -> dict[str, Any]:
    return {name: value for name, value in status_facts(home).items() if name not in _OF_PROCESSES}


def test_the_facts_are_those_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "SLOW_S", 0.0)
    made = api_home(tmp_path / "home")
    api = Api(made.home)
    found = api.rows("/fleet")
    assert {name: found[name] for name in _status(made.home)} == _status(made.home)
    for rows in ((signal(270, "new"), tick(280)), (signal(500, "a"), tick(520))):
        made.batch(*rows)
        api.refresh()
        found = api.rows("/fleet")
        assert {name: found[name] for name in _status(made.home)} == _status(made.home)
    assert [one["since_ms"] for one in found["coverage"]] == [1_700_000_030_000]
    assert "etag" not in api.get("/fleet").headers
    api.close()


def test_sites_are_sorted_by_trouble_and_add_up(tmp_path: Path) -> None:
    api = Api(api_home(tmp_path / "home").home)
    found = api.rows("/fleet/sites")
    assert [(one["name"], one["devices"], one["trouble"]) for one in found["sites"]] == [
        ("south", len(ODD), len(ODD)),
        ("north", 4, 1),
    ]
    assert sum(one["devices"] for one in found["sites"]) == sum(api.rows("/fleet")["devices"].values())
    assert found["classes"] == [{"name": "default", "devices": 12, "trouble": 9, "modes": {"offline": 9, "online": 3}}]
    assert [one["name"] for one in api.rows("/fleet/sites?sort=name&limit=1")["sites"]] == ["north"]
    assert [one["devices"] for one in api.rows("/fleet/sites?site=north")["classes"]] == [4]
    api.close()
