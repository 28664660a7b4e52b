"""Messages about verdicts: topics without collisions, and payloads that Home Assistant accepts."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.messages.verdicts import (
    DISCOVERY_PREFIX,
    STATUS,
    PresentMode,
    discovery_topic,
    messages,
    object_id,
    prefix_fault,
    state_topic,
)

pytestmark = pytest.mark.unit

# Keys by part of a device discovery payload, as Home Assistant documents them (integrations mqtt,
# sensor.mqtt and binary_sensor.mqtt); the first set is required.
SHARED = {"device", "origin", "components"}, {"availability_topic", "state_topic", "qos", "encoding"}
ENTITY = {"platform", "unique_id", "state_topic"}, {"name", "device_class", "value_template", "json_attributes_topic", "qos"}
KEYS = {"sensor": (ENTITY[0], ENTITY[1] | {"options"}), "binary_sensor": (ENTITY[0], ENTITY[1] | {"payload_on", "payload_off"})}
DEVICE_KEYS = {"identifiers", "name", "model", "suggested_area", "via_device"}
ORIGIN_KEYS = {"name", "sw_version", "support_url"}
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20) | st.text("aA_-%0F/. +#", min_size=1, max_size=6)


def published(present: PresentMode, prefix: str = DISCOVERY_PREFIX) -> list[tuple[str, object]]:
    return [(topic, json.loads(payload) if payload else None) for topic, payload in messages(present, prefix)]


@given(one=NAMES, other=NAMES)
def test_topics_of_two_devices_differ_and_have_only_characters_that_are_allowed(one: str, other: str) -> None:
    for name in (state_topic, object_id):
        assert (name(one) == name(other)) == (one == other)
    assert re.fullmatch(r"[A-Za-z0-9_-]+", object_id(one))
    assert re.fullmatch(r"fleetpulse/state/[A-Za-z0-9_.~:@%/-]+", state_topic(one))


def test_escaped_ids_are_stable() -> None:
    assert state_topic("oslo/pump 1+%é") == "fleetpulse/state/oslo/pump%201%2B%25%C3%A9"
    assert object_id("oslo/pump_1-é") == "fleetpulse_oslo_2Fpump__1-_C3_A9"
    assert state_topic("plant:line.1@a") == "fleetpulse/state/plant:line.1@a"


def test_the_state_has_mode_since_last_seen_and_trigger() -> None:
    present = PresentMode("pump-1", Mode.OFFLINE, 1_700_000_000_123, None, "silence", appears=False)
    state = {
        "device_id": "pump-1",
        "mode": "offline",
        "since": "2023-11-14T22:13:20.123Z",
        "last_seen": None,
        "trigger": "silence",
    }
    assert published(present) == [("fleetpulse/state/pump-1", state)]


def test_discovery_has_the_documented_keys_and_no_template_with_a_device_id() -> None:
    hostile = "{{ states() }}'"
    (_, state), (topic, config) = published(PresentMode(hostile, Mode.ONLINE, 0, 0, "signal"))
    assert isinstance(state, dict)
    assert isinstance(config, dict)
    assert re.fullmatch(r"homeassistant/device/[A-Za-z0-9_-]+/config", topic)
    assert SHARED[0] <= config.keys() <= SHARED[0] | SHARED[1]
    assert {"identifiers", "name"} <= config["device"].keys() <= DEVICE_KEYS
    assert {"name"} <= config["origin"].keys() <= ORIGIN_KEYS
    assert config["availability_topic"] == STATUS
    for entity in config["components"].values():
        required, more = KEYS[entity["platform"]]
        whole = {"state_topic": config["state_topic"], **entity}
        assert required <= whole.keys() <= required | more
        assert hostile not in json.dumps(entity)
    mode = config["components"]["mode"]
    assert (mode["device_class"], state["mode"] in mode["options"]) == ("enum", True)
    assert not {"decommissioned", "forgotten"} & {*mode["options"]}
    assert len({entity["unique_id"] for entity in config["components"].values()}) == len(config["components"])


@pytest.mark.parametrize("mode", [Mode.FORGOTTEN, Mode.DECOMMISSIONED, None])
def test_a_device_out_of_service_is_removed_first_from_discovery(mode: Mode | None) -> None:
    expected = [(discovery_topic(DISCOVERY_PREFIX, "d"), None), (state_topic("d"), None)]
    assert published(PresentMode("d", mode, 0, 0, "forget", appears=False)) == expected
    assert published(PresentMode("d", mode, 0, 0, "forget"), prefix="") == expected[1:]


@pytest.mark.parametrize(
    "prefix", ["a b", "a/#", "+", "/a", "a/", "a//b", "$SYS", "fleet", "fleet/x", "fleetpulse/state", "é", "a\n"]
)
def test_a_prefix_that_is_no_topic_or_has_other_messages_is_refused(prefix: str) -> None:
    assert prefix_fault(prefix)
    assert prefix_fault("homeassistant") is prefix_fault("plant-1/ha") is prefix_fault("") is None
