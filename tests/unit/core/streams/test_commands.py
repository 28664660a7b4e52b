"""Commands to devices: their delivery, and the twin of a device."""

import json
from typing import Any

import pytest

from fleetpulse.core.streams.commands import delivery, desired_state, difference, is_for_device, merged

CONTROL = "fleet/oslo/pump-1/control"


def test_a_command_is_delivered_on_the_command_topic_of_its_device() -> None:
    content = {"op": "command", "id": "c1", "name": "set", "payload": {"a": 1}}
    found = delivery(CONTROL, content, 7)
    assert found is not None
    topic, payload = found
    assert topic == "fleet/oslo/pump-1/command" and is_for_device(topic)
    assert json.loads(payload) == {"id": "c1", "name": "set", "payload": {"a": 1}, "sent_at": 7}


@pytest.mark.parametrize(
    ("topic", "op"), [(CONTROL, "release"), ("fleet/oslo/pump-1/registry", "command"), ("pump-1/control", "command")]
)
def test_no_other_row_of_an_operator_is_delivered(topic: str, op: str) -> None:
    assert delivery(topic, {"op": op, "id": "c1", "name": "set"}, 7) is None


@pytest.mark.parametrize("topic", ["fleet/oslo/pump-1/control", "fleet/pump-1/command", "z/oslo/pump-1/command"])
def test_other_topics_deliver_no_commands(topic: str) -> None:
    assert not is_for_device(topic)


@pytest.mark.parametrize(
    ("state", "change", "after"),
    [
        ({}, {"a": 1}, {"a": 1}),
        ({"a": 1, "b": 2}, {"a": None}, {"b": 2}),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": None, "z": 3}}, {"a": {"y": 2, "z": 3}}),
        ({"a": {"x": 1}}, {"a": 4}, {"a": 4}),
        ({"a": 4}, {"a": {"x": None, "y": 1}}, {"a": {"y": 1}}),
    ],
)
def test_states_are_merged_as_in_rfc_7396(state: dict[str, Any], change: dict[str, Any], after: dict[str, Any]) -> None:
    before = json.dumps(state)
    assert merged(state, change) == after
    assert json.dumps(state) == before, "the state before is unchanged"


def test_the_desired_state_is_that_of_the_commands_in_order() -> None:
    sent = [("set", {"a": 1, "b": {"c": 2}}), ("reboot", {"a": 9}), ("firmware", {"version": "2.0"}), ("set", {"a": 3})]
    assert desired_state(sent) == {"a": 3, "b": {"c": 2}, "firmware": "2.0"}


def test_the_difference_has_what_the_device_did_not_report() -> None:
    desired = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4, "f": {"g": 1}}
    reported = {"a": 1, "b": {"c": 0, "d": 3}, "f": 1, "other": 5}
    assert difference(desired, reported) == {"b": {"c": 2}, "e": 4, "f": {"g": 1}}
    assert difference(reported, reported) == {}
