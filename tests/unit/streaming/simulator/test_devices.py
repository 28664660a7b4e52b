"""Simulated devices: deterministic answers to commands, and firmware, good and bad."""

import json
from typing import Any

import pytest

from fleetpulse.core.messages.decode import decode
from fleetpulse.core.rows import Row
from streaming.simulator.devices import ERROR_CODE, SimulatedDevices
from streaming.simulator.scenario import Scenario, Sent, command_topics

NOW = 1_700_000_000_000
SCENARIO = Scenario(7, 40, NOW)
TOPICS = sorted(command_topics(SCENARIO))


def send(devices: SimulatedDevices, topic: str, command_id: str, name: str, payload: Any = None, at_ms: int = NOW) -> None:
    content = {"id": command_id, "name": name, "payload": payload or {}, "sent_at": at_ms}
    devices.receive(topic, json.dumps(content).encode(), at_ms)


def answers(devices: SimulatedDevices) -> list[dict[str, Any]]:
    return [json.loads(one.payload) for one in devices.due(NOW + 60_000)]


def heartbeat(topic: str) -> Sent:
    return Sent(NOW, topic.replace("/command", "/heartbeat"), b'{"ts":1}')


def test_a_device_answers_after_a_short_delay_and_applies_settings() -> None:
    devices = SimulatedDevices(SCENARIO)
    send(devices, TOPICS[0], "c1", "set", {"interval_s": 60})
    assert list(devices.due(NOW + 199)) == []
    (answer,) = devices.due(NOW + 2_000)
    row = decode(answer.topic, answer.payload, NOW + 3_000)
    assert isinstance(row, Row) and row.kind == "ack" and NOW < (row.event_time_ms or 0) <= NOW + 2_000
    assert row.contents() == {"id": "c1", "status": "accepted", "reported": {"interval_s": 60}}
    (state,) = devices.to_plain().values()
    assert state["settings"] == {"interval_s": 60}


@pytest.mark.parametrize(("name", "payload"), [("dance", {}), ("firmware", {}), ("firmware", {"version": 2})])
def test_a_command_that_a_device_does_not_know_is_rejected(name: str, payload: dict[str, Any]) -> None:
    devices = SimulatedDevices(SCENARIO)
    send(devices, TOPICS[0], "c1", name, payload)
    (answer,) = answers(devices)
    assert answer["status"] == "rejected" and answer["reason"]


def test_other_topics_and_broken_commands_are_ignored() -> None:
    devices = SimulatedDevices(SCENARIO)
    send(devices, "fleet/north/pump-1/command", "c1", "set")
    for payload in (b"{", b"[1]", b'{"id": 7}'):
        devices.receive(TOPICS[0], payload, NOW)
    assert answers(devices) == []


def test_a_repeated_command_has_the_same_answer_and_no_further_effect() -> None:
    devices = SimulatedDevices(SCENARIO)
    send(devices, TOPICS[0], "c1", "firmware", {"version": "2.0"})
    send(devices, TOPICS[0], "c2", "firmware", {"version": "3.0"}, NOW + 5_000)
    send(devices, TOPICS[0], "c1", "firmware", {"version": "2.0"}, NOW + 10_000)
    found = answers(devices)
    assert {**found[0], "ts": 0} == {**found[2], "ts": 0}
    assert devices.changes == 2 and next(iter(devices.to_plain().values()))["firmware"] == "3.0"


def test_good_firmware_is_named_in_later_messages_also_after_a_restart() -> None:
    devices = SimulatedDevices(SCENARIO)
    sent = heartbeat(TOPICS[0])
    send(devices, TOPICS[0], "c1", "firmware", {"version": "2.0"})
    assert devices.adapted(sent) == sent, "the update has not happened yet"
    answers(devices)
    for each in (devices, SimulatedDevices(SCENARIO, json.loads(json.dumps(devices.to_plain())))):
        adapted = each.adapted(sent)
        assert adapted is not None and json.loads(adapted.payload) == {"ts": 1, "firmware": "2.0"}
        assert each.adapted(heartbeat(TOPICS[1])) == heartbeat(TOPICS[1])
    garbage = Sent(NOW, sent.topic, b'{"ts":')
    assert devices.adapted(garbage) == garbage


def test_bad_firmware_silences_some_devices_and_the_others_send_errors() -> None:
    devices, again = SimulatedDevices(SCENARIO), SimulatedDevices(SCENARIO)
    for topic in TOPICS:
        for each in (devices, again):
            send(each, topic, "c1", "firmware", {"version": "2.0-bad"})
    assert answers(devices) == answers(again)
    adapted = [devices.adapted(heartbeat(topic)) for topic in TOPICS]
    assert adapted == [again.adapted(heartbeat(topic)) for topic in TOPICS]
    failing = [one for one in adapted if one is not None]
    assert 0 < len(failing) < len(TOPICS)
    assert all(one.topic.endswith("/error") and json.loads(one.payload)["code"] == ERROR_CODE for one in failing)


def test_a_silent_device_takes_firmware_only() -> None:
    devices = SimulatedDevices(SCENARIO)
    for topic in TOPICS:
        send(devices, topic, "c1", "firmware", {"version": "bad"})
    answers(devices)
    silent = next(topic for topic in TOPICS if devices.adapted(heartbeat(topic)) is None)
    send(devices, silent, "c2", "set", {"a": 1})
    assert answers(devices) == []
    send(devices, silent, "c3", "firmware", {"version": "2.1"})
    assert [one["status"] for one in answers(devices)] == ["accepted"]
    assert devices.adapted(heartbeat(silent)) is not None
