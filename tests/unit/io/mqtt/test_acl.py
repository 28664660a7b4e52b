"""Access rules of the brokers: rights follow from grants, and only hashes of passwords are stored."""

from pathlib import Path

import bcrypt
import pytest

from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.io.ingest.payload_paths import compile_path
from fleetpulse.io.mqtt.acl import (
    Role,
    _subjects,
    grant,
    grant_certificate,
    grants,
    mosquitto_rules,
    nats_rules,
    revoke,
    suggested_client_id,
)
from fleetpulse.io.mqtt.address import BrokerAddress
from tests.support.refusals import refused

SERVICE = BrokerAddress("h", 1, "fleet", 'p"w')


def test_grant_stores_only_the_hash_of_a_password(tmp_path: Path) -> None:
    password = grant(tmp_path, "pump-1", Role.DEVICE)
    (stored,) = grants(tmp_path)
    assert bcrypt.checkpw(password.encode(), stored.hashed.encode())
    assert password not in (tmp_path / "access.json").read_text()
    assert (tmp_path / "access.json").stat().st_mode & 0o077 == 0


def test_second_grant_replaces_the_password_and_revoke_removes_the_user(tmp_path: Path) -> None:
    first = grant(tmp_path, "pump-1", Role.DEVICE)
    grant(tmp_path, "a", Role.WATCHER)
    assert grant(tmp_path, "pump-1", Role.DEVICE) != first
    assert [one.name for one in grants(tmp_path)] == ["a", "pump-1"]
    revoke(tmp_path, "pump-1")
    assert [one.name for one in grants(tmp_path)] == ["a"]
    with refused("user-unknown"):
        revoke(tmp_path, "pump-1")


@pytest.mark.parametrize(
    "name", ["", "*", ">", "a.>/", "a b", "a/b/c", "a/", "/a", "+/a", "+", "#", "_", "x" * 129, "fleet", "é", "a\n"]
)
def test_grant_refuses_names_that_are_patterns_or_reserved(name: str, tmp_path: Path) -> None:
    with refused("user-reserved" if name == SERVICE.username else "user-name-invalid"):
        grant(tmp_path, name, Role.DEVICE)
    if name != SERVICE.username:  # as a device id the name is allowed: it is no user
        with refused("user-name-invalid"):
            grant(tmp_path, "gateway", Role.DEVICE, [name])
    assert grants(tmp_path) == []


def test_only_the_role_device_takes_devices(tmp_path: Path) -> None:
    with refused("role-without-devices"):
        grant(tmp_path, "eve", Role.OPERATOR, ["a"])


TOPICS = ("tele/{device}/STATE", "lamp 1/{device}", "lamp\n/{device}", "/a//{device}")


def test_a_device_may_publish_what_a_mapping_gives_it_and_a_gateway_its_topics(tmp_path: Path) -> None:
    rules = [{"topic": topic, "site": "h", "kind": "telemetry"} for topic in TOPICS]
    mappings = parse_mappings({"mapping": rules}, compile_path)
    grant(tmp_path, "plug-1", Role.DEVICE)
    grant(tmp_path, "gateway", Role.DEVICE, topics=["gw/+/report", "out/#", "/b//c/"])
    gateway, plug = grants(tmp_path)
    assert "tele.plug-1.STATE" in _subjects(plug, mappings)[0] and "tele.gateway.STATE" in _subjects(gateway, mappings)[0]
    assert not [one for one in _subjects(plug, mappings)[0] if "lamp" in one], "NATS has no subject with a blank"
    assert {"gw.*.report", "out.>", "/.b./.c./"} <= set(_subjects(gateway, mappings)[0])
    assert "/.a./.plug-1" in _subjects(plug, mappings)[0], "another subject would stop the broker"
    assert "topic write tele/plug-1/STATE" in mosquitto_rules([plug, gateway], mappings)
    assert "topic write out/#" in mosquitto_rules([plug, gateway], mappings)


def test_a_mapping_that_begins_with_a_placeholder_gives_no_reserved_topic(tmp_path: Path) -> None:
    """A device must not write lines of a replay, verdicts, or requests to the broker's store."""
    grant(tmp_path, "pump-1", Role.DEVICE)
    grant(tmp_path, "edge-1", Role.DEVICE, ["edge-1"], ["plant/line"])
    table = {"topic": "{site}/{device}", "kind": "telemetry"}
    edge, pump = nats_rules(SERVICE, known := grants(tmp_path), parse_mappings({"mapping": [table]}, compile_path)).split("\n")[
        2:4
    ]
    assert '"*.pump-1"' in pump
    assert 'deny: ["fleetpulse.>", "replay.>", "spBv1//0.>", "$FLEET.>", "$JS.>", "$MQTT.>", "$SYS.>"]' in pump
    assert 'deny: ["fleetpulse.>", "replay.>", "$FLEET.>", "$JS.>", "$MQTT.>", "$SYS.>"]' in edge
    assert "topic deny replay/#" in mosquitto_rules(known, parse_mappings({"mapping": [table]}, compile_path))
    assert "deny" not in nats_rules(SERVICE, known)


@pytest.mark.parametrize(
    "topic", ["", "#", "+/a", "fleet/#", "fleetpulse/x", "$SYS/#", "/", "/#", "a b", "a*", "a/>", "spBv1.0/#", "a#"]
)
def test_topics_of_others_cannot_be_granted(topic: str, tmp_path: Path) -> None:
    with refused("topic-not-grantable"):
        grant(tmp_path, "gateway", Role.DEVICE, topics=[topic])
    with refused("role-without-devices"):
        grant(tmp_path, "eve", Role.WATCHER, topics=["a/b"])


def test_nats_rules_limit_a_device_to_its_own_id(tmp_path: Path) -> None:
    grant(tmp_path, "pump.1", Role.DEVICE)
    rules = nats_rules(SERVICE, grants(tmp_path))
    assert r'user: "fleet", password: "p\"w", allowed_connection_types: ["MQTT", "MQTT_WS", "STANDARD"] }' in rules
    assert rules.count("STANDARD") == 1, "no other user logs in at the NATS port"
    assert rules.count("allowed_connection_types") == 2
    assert '"fleet.*.pump//1.heartbeat"' in rules
    assert 'subscribe: { allow: ["fleet.*.pump//1.control", "fleet.*.pump//1.command"] }' in rules
    assert "pattern read fleet/+/%u/command\n" in mosquitto_rules(grants(tmp_path))
    assert "fleet.>" not in rules
    assert "policy" not in rules


def test_an_id_with_its_site_gives_the_topics_of_that_site_only(tmp_path: Path) -> None:
    tables = [
        {"topic": "tele/{site}/{device}", "kind": "telemetry"},
        {"topic": "z/{device}", "site": "oslo", "kind": "telemetry"},
        {"topic": "y/{device}", "site": "turku", "kind": "telemetry"},
        {"topic": "x/{device}", "site": {"path": "site"}, "kind": "telemetry"},
    ]
    mappings = parse_mappings({"mapping": tables}, compile_path)
    grant(tmp_path, "oslo/pump.1", Role.DEVICE, identity=DeviceIdentity.SITE_AND_ID)
    (known,) = grants(tmp_path)
    may_send, may_hear = _subjects(known, mappings)
    kinds = ("ack", "birth", "death", "error", "heartbeat", "telemetry")
    assert may_send == [*(f"fleet.oslo.pump//1.{kind}" for kind in kinds), "tele.oslo.pump//1", "z.pump//1"]
    assert may_hear == ["fleet.oslo.pump//1.control", "fleet.oslo.pump//1.command"], "the commands to itself, and no others"
    rules = mosquitto_rules([known], mappings)
    assert "user oslo/pump.1\n" in rules and "topic write fleet/oslo/pump.1/heartbeat\n" in rules
    assert "fleet/+/pump.1" not in rules


def test_a_device_is_granted_with_its_site_where_that_is_a_part_of_its_identity(tmp_path: Path) -> None:
    """One id at two sites is two devices there, and none must speak for the other."""
    by_site = DeviceIdentity.SITE_AND_ID
    for name, devices in (("pump-1", []), ("gate", ["oslo/pump-1", "pump-1"])):
        with refused("device-without-site"):
            grant(tmp_path, name, Role.DEVICE, devices, identity=by_site)
        with refused("device-without-site"):
            grant_certificate(tmp_path, name, Role.DEVICE, "CN=a", devices, identity=by_site)
    with refused("user-name-invalid"):
        grant(tmp_path, "oslo/ann", Role.OPERATOR)
    assert grants(tmp_path) == []
    grant(tmp_path, "ann", Role.OPERATOR, identity=by_site)
    grant(tmp_path, "edge", Role.DEVICE, nodes=["plant/line"], identity=by_site)
    grant(tmp_path, "oslo/pump-1", Role.DEVICE, identity=by_site)
    grant(tmp_path, "gate", Role.DEVICE, ["oslo/pump-1"], identity=by_site)
    rules = mosquitto_rules(grants(tmp_path), identity=by_site)
    assert "pattern write fleet/%u/heartbeat\n" in rules
    assert "user oslo/pump-1\n" not in rules, "the patterns are enough"
    assert "user gate\ntopic deny fleet/gate/+\ntopic write fleet/oslo/pump-1/ack\n" in rules
    assert "fleet/+" not in rules


def test_edge_node_publishes_only_under_its_group_and_node(tmp_path: Path) -> None:
    grant(tmp_path, "edge", Role.DEVICE, nodes=["plant/line.1"])
    publishable, readable = _subjects(grants(tmp_path)[0])
    kinds = [f"spBv1//0.plant.{kind}.line//1" for kind in ("NBIRTH", "NDATA", "NDEATH")]
    assert sorted(publishable) == sorted(kinds + [f"spBv1//0.plant.{kind}.line//1.*" for kind in ("DBIRTH", "DDATA", "DDEATH")])
    commands = [f"spBv1//0.plant.{kind}.line//1" for kind in ("NCMD", "DCMD")]
    assert sorted(readable) == sorted([*commands, *(f"{one}.>" for one in commands), "spBv1//0.STATE.*"])
    rules = mosquitto_rules(grants(tmp_path))
    assert "user edge\ntopic deny fleet/+/edge/+\ntopic write spBv1.0/plant/NBIRTH/line.1\n" in rules
    assert "topic write spBv1.0/plant/DBIRTH/line.1/+\n" in rules
    assert "topic read spBv1.0/STATE/+\n" in rules
    for malformed in ("plant", "plant/+", "plant/line/pump", "/line", "a b/c"):
        with refused("edge-node-invalid"):
            grant(tmp_path, "edge", Role.DEVICE, nodes=[malformed])
    with refused("role-without-devices"):
        grant(tmp_path, "eve", Role.WATCHER, nodes=["plant/line"])


def test_watchers_and_operators_read_everything_and_only_operators_publish(tmp_path: Path) -> None:
    for role in (Role.WATCHER, Role.OPERATOR):
        grant(tmp_path, role.value, role)
    below = ("fleet", "fleetpulse.alert", "fleetpulse.failed", "fleetpulse.state", "homeassistant")
    all_subjects = {"fleetpulse.status", *(f"{one}{suffix}" for one in below for suffix in ("", ".>"))}
    subjects = {one.name: _subjects(one) for one in grants(tmp_path)}
    assert {name: set(readable) for name, (_, readable) in subjects.items()} == {
        "watcher": all_subjects,
        "operator": all_subjects,
    }
    assert {name: publishable for name, (publishable, _) in subjects.items()} == {
        "watcher": ["_nothing"],
        "operator": ["fleet.>", "fleetpulse.alert.>"],
    }
    rules = mosquitto_rules(grants(tmp_path))
    assert [rules.count(f"topic write {one}/#\n") for one in ("fleet", "fleetpulse/alert", "fleetpulse/failed")] == [1, 1, 0]


def test_nats_rules_contain_no_empty_list_which_would_allow_everything(tmp_path: Path) -> None:
    for role in Role:
        grant(tmp_path, role.value, role)
    assert "[]" not in nats_rules(SERVICE, grants(tmp_path))


def test_mosquitto_rules_have_patterns_for_devices_and_blocks_for_other_users(tmp_path: Path) -> None:
    grant(tmp_path, "pump-1", Role.DEVICE)
    grant(tmp_path, "gate", Role.DEVICE, ["a", "b"])
    grant(tmp_path, "eye", Role.WATCHER)
    rules = mosquitto_rules(grants(tmp_path))
    assert "pattern write fleet/+/%u/heartbeat\n" in rules
    assert "pump-1" not in rules
    assert "user gate\ntopic deny fleet/+/gate/+\ntopic write fleet/+/a/ack\n" in rules
    assert "user eye\ntopic deny fleet/+/eye/+\ntopic read fleet/#\ntopic read fleetpulse/alert/#\n" in rules


def test_users_with_certificates_have_no_password_and_are_left_out_unless_the_listener_maps_them(tmp_path: Path) -> None:
    grant(tmp_path, "pump-1", Role.DEVICE)
    grant_certificate(tmp_path, "pump-1", Role.DEVICE, r" CN=pümp\, 1,O=Acme ")
    known = grants(tmp_path)
    assert [(one.name, one.hashed, one.devices) for one in known] == [("pump-1", "", ("pump-1",))]
    assert "pump-1" not in nats_rules(SERVICE, known)
    mapped = nats_rules(SERVICE, known, certificates=True)
    assert r'{ user: "CN=pümp\\, 1,O=Acme", allowed_connection_types: ["MQTT", "MQTT_WS"], permissions' in mapped
    assert "user CN=pümp\\, 1,O=Acme\ntopic write fleet/+/pump-1/ack\n" in mosquitto_rules(known)
    grant(tmp_path, "pump-1", Role.DEVICE)
    assert [one.certificate for one in grants(tmp_path)] == [""]


def test_two_users_never_have_the_same_login_which_would_stop_the_broker(tmp_path: Path) -> None:
    grant_certificate(tmp_path, "a", Role.DEVICE, "CN=a,O=Acme")
    grant_certificate(tmp_path, "b", Role.DEVICE, "b.acme.example")
    for same in ("CN=a,O=Acme", "O=Acme, CN=a"):
        with refused("login-granted"):
            grant_certificate(tmp_path, "c", Role.WATCHER, same)
    with refused("login-granted"):
        grant(tmp_path, "b.acme.example", Role.DEVICE)
    for malformed, code in (
        ("", "certificate-invalid"),
        ("a\nb", "certificate-invalid"),
        ("fleet", "user-reserved"),
        ("_fleet", "user-reserved"),
    ):
        with refused(code):
            grant_certificate(tmp_path, "c", Role.DEVICE, malformed)
    assert [one.login for one in grants(tmp_path)] == ["CN=a,O=Acme", "b.acme.example"]


def test_suggested_client_ids_are_valid_and_cannot_be_guessed() -> None:
    first, second = suggested_client_id("pump.1"), suggested_client_id("pump.1")
    assert suggested_client_id("oslo/pump.1").startswith("oslo-pump-1-")
    assert first != second
    assert first.startswith("pump-1-") and "." not in first and len(first) >= len("pump-1-") + 16


def test_damaged_file_of_grants_is_refused(tmp_path: Path) -> None:
    (tmp_path / "access.json").write_text("{")
    with refused("grants-damaged"):
        grants(tmp_path)
