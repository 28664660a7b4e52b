"""Device list from the registry: a bootstrapped device equals the device of the running job."""

from pathlib import Path

import pytest

from cli.commands.state.device_lists import registered_devices
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.columnar.snapshot.bootstrap import bootstrap_groups
from fleetpulse.columnar.snapshot.rows import snapshot_rows
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment, outcome
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import DEVICES
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START, registry_entries, row, tick
from tests.support.homes.homes import empty

HOUR_S = 3600
DEPLOYMENT = Deployment()
POLICY = row(-1, "fleet/_/_/policy", policy=parse_policy({"rules": {"timeout": "1h"}}).normalised(), effective_from_s=-500)


def _entry(hour: float, op: str = "add", **more: str) -> Row:
    return row(hour * HOUR_S, "fleet/oslo/pump/registry", op=op, **more)


@pytest.mark.parametrize(
    "entries",
    [
        [_entry(0), _entry(10, "decommission"), _entry(48)],
        [_entry(0), _entry(10, "decommission"), _entry(20), _entry(30, "decommission"), _entry(48), _entry(48.5)],
        [_entry(48), _entry(48.2, **{"class": "meter"})],
        [_entry(0, **{"class": "meter"}), _entry(1, "decommission"), _entry(48.1, **{"class": "meter"})],
        [
            _entry(0),
            _entry(1, "decommission"),
            _entry(48, **{"class": "meter"}),
            _entry(48.3),
            _entry(48.4, **{"class": "default"}),
        ],
        [_entry(48, gateway="g"), _entry(48.2, **{"class": "meter"})],
        [_entry(0, gateway="g"), _entry(10, "decommission"), _entry(48)],
        [_entry(48, gateway="g"), _entry(48.2, gateway="h"), _entry(48.3, gateway="")],
    ],
)
def test_a_bootstrapped_device_equals_a_registered_device_without_messages(tmp_path: Path, entries: list[Row]) -> None:
    home = empty(tmp_path / "home", DEPLOYMENT)
    later = [_entry(60, "decommission")]  # beyond the frontier: a pending row, not part of the list
    tables.append(home, DEVICES, tables.to_table(DEVICES, registry_entries([*entries, *later])), "test", 1)
    known = outcome([POLICY, *entries, tick(48.6 * HOUR_S)], DEPLOYMENT)
    assert known.shards is not None
    listed = registered_devices(home, known.shards.frontier_ms)
    [seed] = bootstrap_groups(listed, known.shards, known.policies, 1).to_pylist()
    [bootstrapped] = snapshot_rows(0, KeyGroup.from_bytes(seed["block"]).to_bytes(), {}, START, DEPLOYMENT)[0].to_pylist()
    expected = known.devices["pump"]
    assert (
        (bootstrapped["mode"], bootstrapped["device_class"])
        == (expected.mode, expected.device_class)
        == ("provisioned", expected.device_class)
    )
    assert (bootstrapped["site"], bootstrapped["gateway"]) == (expected.site, expected.gateway)
    for name in ("mode_since", "quiet_since", "class_since"):
        assert round(bootstrapped[name].timestamp() * 1000) == getattr(expected, f"{name}_ms"), name


def test_a_device_registered_under_an_earlier_policy_is_judged_by_it(tmp_path: Path) -> None:
    home = empty(tmp_path / "home", DEPLOYMENT)
    longer_timeout = parse_policy({"rules": {"timeout": "30d"}}).normalised()
    rows = [POLICY, row(20 * HOUR_S, "fleet/_/_/policy", policy=longer_timeout, effective_from_s=24 * HOUR_S), _entry(1)]
    tables.append(home, DEVICES, tables.to_table(DEVICES, registry_entries([_entry(1)])), "test", 1)
    known = outcome([*rows, tick(48 * HOUR_S)], DEPLOYMENT)
    assert known.shards is not None
    kept = known.policies.pruned(known.shards.frontier_ms)
    assert len(kept.dated) == 1
    [seed] = bootstrap_groups(
        registered_devices(home, known.shards.frontier_ms), known.shards, kept.with_past(known.policies), 1
    ).to_pylist()
    [bootstrapped] = snapshot_rows(0, KeyGroup.from_bytes(seed["block"]).to_bytes(), {}, START, DEPLOYMENT)[0].to_pylist()
    assert bootstrapped["mode"] == known.devices["pump"].mode == "offline"
    assert round(bootstrapped["mode_since"].timestamp() * 1000) == START + 2 * HOUR_S * 1000
