"""Scope of a rollout: the selected devices, and the longest timeout among them."""

from pathlib import Path

import pytest

from fleetpulse.core.operations.device_filter import parse_device_filter
from fleetpulse.core.tables import DEVICES
from fleetpulse.reports.rollouts.scope import devices_in_scope, longest_timeout, rules_in_force
from tests.support.histories.histories import registry_entries, row
from tests.support.homes.homes import empty
from tests.support.homes.rolled_out import RolledOutHome
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> RolledOutHome:
    """Return a home with 3 pumps and 2 sensors: pump-1 is offline and decommissioned is pump-2."""
    found = RolledOutHome(tmp_path_factory.mktemp("scope") / "home", pumps=3, others=2)
    found.run(100, silent=["pump-1"], firmware="1.0")
    found.run(20, silent=["pump-1"], firmware="1.1")
    found.batch(row(found.now_s + 2, "fleet/north/pump-2/registry", op="decommission"))
    found.run(40, silent=["pump-1", "pump-2"])
    return found


@pytest.mark.parametrize(
    ("text", "selected"),
    [
        ("TRUE", "pump-0 pump-1 sensor-0 sensor-1"),
        ("FALSE", ""),
        ("device_class = 'pump'", "pump-0 pump-1"),
        ("device_class != 'pump' AND site <> 'north'", "sensor-0 sensor-1"),
        ("mode = 'offline' OR site = 'south'", "pump-1 sensor-0 sensor-1"),
        ("NOT (mode = 'offline')", "pump-0 sensor-0 sensor-1"),
        ("device_id IN ('pump-0', 'pump-2', 'x')", "pump-0"),
        ("device_id NOT IN ('pump-0')", "pump-1 sensor-0 sensor-1"),
        ("device_id LIKE '%-1'", "pump-1 sensor-1"),
        (r"device_id LIKE 'pump\_%'", ""),
        ("gateway IS NULL", "pump-0 pump-1 sensor-0 sensor-1"),
        ("gateway = 'g' OR NOT gateway = 'g'", ""),
        ("device_class = site", ""),
        ("last_seen > '2023-11-14T22:14:50Z'", "pump-0 sensor-0 sensor-1"),
        ("last_seen NOT IN ('2023-11-14T22:14:20Z')", "pump-0 sensor-0 sensor-1"),
        ("mode_since BETWEEN '2023-11-14T22:14:50Z' AND last_seen", ""),
        ("runtime_ms >= 0 AND mode = 'offline'", "pump-1"),
        ("firmware = '1.1'", "pump-0 sensor-0 sensor-1"),
        ("firmware IS NULL", "pump-1"),
    ],
)
def test_a_filter_selects_devices_in_service(fleet: RolledOutHome, text: str, selected: str) -> None:
    found = devices_in_scope(fleet.home, parse_device_filter(text))
    assert [one.device_id for one in found] == selected.split()


def test_a_selected_device_has_its_site_mode_and_class(fleet: RolledOutHome) -> None:
    [found] = devices_in_scope(fleet.home, parse_device_filter("device_id = 'pump-1'"))
    assert (found.site, found.mode, found.device_class) == ("north", "offline", "pump")


def test_a_column_of_snapshots_alone_is_refused(fleet: RolledOutHome) -> None:
    with refused("rollout-scope-invalid", match="cannot compare reboots, seq;"):
        devices_in_scope(fleet.home, parse_device_filter("NOT (seq = 1 OR reboots BETWEEN 1 AND 2) AND site = 'north'"))


def test_the_longest_timeout_is_that_of_a_class_or_of_a_device(fleet: RolledOutHome) -> None:
    policy = rules_in_force(fleet.home, fleet.now_ms)
    assert policy is not None

    def select(text: str) -> tuple[int, str]:
        return longest_timeout(fleet.home, policy, devices_in_scope(fleet.home, parse_device_filter(text)))

    assert select("TRUE") == (90_000, 'class "sensor"')
    assert select("site = 'north'") == (60_000, 'class "pump"')
    own = row(fleet.now_s + 3, "fleet/north/pump-0/registry", op="add", **{"class": "pump"}, timeout_ms=120_000)
    fleet.append(DEVICES, *registry_entries([own]))
    assert select("TRUE") == (120_000, 'device "pump-0"')
    assert select("site = 'south'") == (90_000, 'class "sensor"')


def test_a_home_without_rows_has_no_devices_and_no_rules(tmp_path: Path) -> None:
    from fleetpulse.core.replay import Deployment

    home = empty(tmp_path / "home", Deployment())
    assert devices_in_scope(home, parse_device_filter("TRUE")) == []
    assert rules_in_force(home, 0) is None
