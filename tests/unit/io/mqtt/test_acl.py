"""Who may come in: rules that follow from grants, for both brokers, and no password kept."""

from pathlib import Path

import bcrypt
import pytest

from fleetpulse.core.errors import FleetError
from fleetpulse.io.mqtt.acl import Role, _subjects, grant, grants, mosquitto_rules, nats_rules, revoke
from fleetpulse.io.mqtt.address import BrokerAddress
from tests.support.refusals import refused

OURS = BrokerAddress("h", 1, "fleet", 'p"w')


def test_of_a_password_a_hash_is_kept(tmp_path: Path) -> None:
    password = grant(tmp_path, "pump-1", Role.DEVICE)
    (held,) = grants(tmp_path)
    assert bcrypt.checkpw(password.encode(), held.hashed.encode())
    assert password not in (tmp_path / "access.json").read_text()
    assert (tmp_path / "access.json").stat().st_mode & 0o077 == 0


def test_a_second_grant_is_a_new_password_and_a_revoked_name_is_gone(tmp_path: Path) -> None:
    first = grant(tmp_path, "pump-1", Role.DEVICE)
    grant(tmp_path, "a", Role.WATCHER)
    assert grant(tmp_path, "pump-1", Role.DEVICE) != first
    assert [one.name for one in grants(tmp_path)] == ["a", "pump-1"]
    revoke(tmp_path, "pump-1")
    assert [one.name for one in grants(tmp_path)] == ["a"]
    with refused("user-unknown"):
        revoke(tmp_path, "pump-1")


@pytest.mark.parametrize("name", ["", "*", ">", "a.>/", "a b", "a/b", "+", "#", "_", "x" * 129, "fleet", "é", "a\n"])
def test_a_name_that_would_be_a_pattern_or_is_ours_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(FleetError):
        grant(tmp_path, name, Role.DEVICE)
    if name != OURS.username:  # a device may be called so: it is no user
        with refused("user-name-invalid"):
            grant(tmp_path, "gateway", Role.DEVICE, [name])
    assert grants(tmp_path) == []


def test_devices_are_for_those_who_speak_as_devices(tmp_path: Path) -> None:
    with refused("role-without-devices"):
        grant(tmp_path, "eve", Role.OPERATOR, ["a"])


def test_nats_lets_a_device_publish_under_its_own_id_alone(tmp_path: Path) -> None:
    grant(tmp_path, "pump.1", Role.DEVICE)
    rules = nats_rules(OURS, grants(tmp_path))
    assert r'user: "fleet", password: "p\"w" }' in rules
    assert '"fleet.*.pump//1.heartbeat"' in rules
    assert 'subscribe: { allow: ["fleet.*.pump//1.control"] }' in rules
    assert "fleet.>" not in rules
    assert "policy" not in rules


def test_an_edge_node_speaks_under_its_group_and_node_alone(tmp_path: Path) -> None:
    grant(tmp_path, "edge", Role.DEVICE, nodes=["plant/line.1"])
    may_send, may_hear = _subjects(grants(tmp_path)[0])
    kinds = [f"spBv1//0.plant.{word}.line//1" for word in ("NBIRTH", "NDATA", "NDEATH")]
    assert sorted(may_send) == sorted(kinds + [f"spBv1//0.plant.{word}.line//1.*" for word in ("DBIRTH", "DDATA", "DDEATH")])
    commands = [f"spBv1//0.plant.{word}.line//1" for word in ("NCMD", "DCMD")]
    assert sorted(may_hear) == sorted([*commands, *(f"{one}.>" for one in commands), "spBv1//0.STATE.*"])
    rules = mosquitto_rules(grants(tmp_path))
    assert "user edge\ntopic deny fleet/+/edge/#\ntopic write spBv1.0/plant/NBIRTH/line.1\n" in rules
    assert "topic write spBv1.0/plant/DBIRTH/line.1/+\n" in rules
    assert "topic read spBv1.0/STATE/+\n" in rules
    for wrong in ("plant", "plant/+", "plant/line/pump", "/line", "a b/c"):
        with refused("edge-node-invalid"):
            grant(tmp_path, "edge", Role.DEVICE, nodes=[wrong])
    with refused("role-without-devices"):
        grant(tmp_path, "eve", Role.WATCHER, nodes=["plant/line"])


def test_who_watches_hears_what_failed_and_an_operator_also_gives_alerts(tmp_path: Path) -> None:
    for role in (Role.WATCHER, Role.OPERATOR):
        grant(tmp_path, role.value, role)
    heard = {f"{one}{more}" for one in ("fleet", "fleetpulse.alert", "fleetpulse.failed") for more in ("", ".>")}
    told = {one.name: _subjects(one) for one in grants(tmp_path)}
    assert {name: set(may_hear) for name, (_, may_hear) in told.items()} == {"watcher": heard, "operator": heard}
    assert {name: may_send for name, (may_send, _) in told.items()} == {
        "watcher": ["_nothing"],
        "operator": ["fleet.>", "fleetpulse.alert.>"],
    }
    rules = mosquitto_rules(grants(tmp_path))
    assert [rules.count(f"topic write {one}/#\n") for one in ("fleet", "fleetpulse/alert", "fleetpulse/failed")] == [1, 1, 0]


def test_nats_reads_no_list_of_ours_as_everything(tmp_path: Path) -> None:
    for role in Role:
        grant(tmp_path, role.value, role)
    assert "[]" not in nats_rules(OURS, grants(tmp_path))


def test_mosquitto_has_a_pattern_for_devices_and_a_block_for_each_other(tmp_path: Path) -> None:
    grant(tmp_path, "pump-1", Role.DEVICE)
    grant(tmp_path, "gate", Role.DEVICE, ["a", "b"])
    grant(tmp_path, "eye", Role.WATCHER)
    rules = mosquitto_rules(grants(tmp_path))
    assert "pattern write fleet/+/%u/heartbeat\n" in rules
    assert "pump-1" not in rules
    assert "user gate\ntopic deny fleet/+/gate/#\ntopic write fleet/+/a/birth\n" in rules
    assert "user eye\ntopic deny fleet/+/eye/#\ntopic read fleet/#\ntopic read fleetpulse/alert/#\n" in rules


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "access.json").write_text("{")
    with refused("grants-damaged"):
        grants(tmp_path)
