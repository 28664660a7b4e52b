"""Results that `fleet listen` shows for a message: on arrival, and after its judgement."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.commands.inspect.listen import (
    CANARY,
    REMEMBERED,
    Listener,
    MessageResult,
    PendingMessages,
    PrintedMessage,
    predict_result,
    read_message,
    verdicts,
)
from fleetpulse.core.messages.mapping import Mappings
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import DEVICES
from fleetpulse.io.mqtt.subscriber import Arrived
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START, registry_entries, row, signal, tick
from tests.support.homes.homes import empty, land

pytestmark = pytest.mark.unit
DEPLOYMENT = Deployment(60_000, 300_000)
LISTENING = Shards.begin(START - 3_600_000).read(START - 1_000, 60_000)


def printed(row: Row) -> PrintedMessage:
    return PrintedMessage(row.received_at_ms, f"fleet/site/{row.device_id}/{row.kind}", "{}", row)


def result_of(row: Row, listening: Shards = LISTENING) -> MessageResult:
    return predict_result(printed(row), listening, DEPLOYMENT)[1]


def arrived(topic: str, payload: bytes = b"{}", *, retained: bool = False) -> Arrived:
    return Arrived(topic, payload, retained, None)


def test_a_message_in_time_is_pending_for_the_allowed_lateness() -> None:
    found = result_of(signal(0))
    assert found.state == "waiting" and "2023-11-14T22:14:20.000Z" in found.text


def test_the_lateness_of_a_message_is_its_distance_behind_the_frontier() -> None:
    direct = result_of(signal(0, received_s=90))
    counts = "it counts only as a sign of life"
    assert (direct.state, direct.text) == ("late", f"late by 30s: behind the frontier; {counts}")
    relayed = result_of(signal(0, received_s=90, gateway="g"))
    assert relayed.state == "late" and relayed.text.endswith("; it counts only after ./fleet amend")
    assert result_of(signal(0, received_s=59.9)).state == "waiting"


@pytest.mark.parametrize(("proves", "of_class"), [(True, "as a sign of life"), (False, "after ./fleet amend")])
def test_a_rule_of_a_class_decides_whether_its_late_messages_count_at_once(
    proves: bool, of_class: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = parse_policy({"classes": {"sensor": {"late_proves_alive": proves}}}).normalised()
    home, entry = empty(tmp_path / "home", DEPLOYMENT), row(1, "fleet/site/s/registry", op="add", **{"class": "sensor"})
    land(home, [row(0, "fleet/_/_/policy", policy=policy, effective_from_s=-1), entry, tick(9)], 1)
    landed = [{**one, "origin": "command", "bridge": "b", "segment": 1} for one in registry_entries([entry])]
    tables.append(home, DEVICES, tables.to_table(DEVICES, landed), "test", 1)
    listener = Listener(home, "#", json_lines=True)
    for device, gateway in (("s", "g"), ("s", None), ("other", "g"), ("other", None)):
        payload = json.dumps({"ts": wall_clock_ms() - 3_600_000, "gateway": gateway})
        listener.show_message(arrived(f"fleet/site/{device}/heartbeat", payload.encode()))
    counts = [json.loads(line)["fate"].partition("it counts only ")[2] for line in capsys.readouterr().out.splitlines()]
    assert counts == [of_class, of_class, "after ./fleet amend", "as a sign of life"]


def test_a_coverage_gap_extends_the_wait_and_an_open_gap_has_no_end() -> None:
    opened = LISTENING.open_gap(START - 900, START - 30_000, "b")
    found = result_of(signal(0), opened)
    assert found.state == "waiting" and "a coverage gap is open" in found.text
    closed = opened.close_gap(START - 800, START + 120_000, "b")
    found = result_of(signal(0), closed)
    assert found.state == "waiting" and "2023-11-14T22:16:20.000Z" in found.text  # 60 s after the end of the gap


def test_a_message_with_a_faulty_clock_is_judged_at_its_received_at() -> None:
    counts = "so it is judged at its received_at; pending"
    ahead = result_of(signal(301, received_s=0))
    assert ahead.state == "waiting" and ahead.text.startswith(f"clock ahead by 5m1s, {counts}")
    assert result_of(signal(300, received_s=0)).text.startswith("pending")
    [(message, known)] = read_message(arrived("fleet/s/d/heartbeat", b'{"ts": 1700000000}'), START, Mappings())
    assert known is None
    read, found = predict_result(message, LISTENING, DEPLOYMENT)
    assert found.text.startswith(f"ts is not a time, {counts}")
    assert read.row is not None and read.row.at_ms == START


@pytest.mark.parametrize(
    ("message", "state"),
    [
        (arrived("zigbee/x"), "foreign"),
        (arrived("replay/x"), "history"),
        (arrived("fleet/s/d/heartbeat", retained=True), "retained"),
        (arrived("fleet/s/d/heartbeat", b"\xff\x00"), "quarantined"),
        (arrived("fleet/s/d/nonsense"), "quarantined"),
        (arrived("fleet/s/d/tick"), "quarantined"),
        (arrived(CANARY), "canary"),
        (arrived("fleet/s/d/command"), "command"),
    ],
)
def test_results_that_need_no_judgement_are_known_on_arrival(message: Arrived, state: str) -> None:
    [(_, result)] = read_message(message, START, Mappings())
    assert result is not None and result.state == state


def test_a_pending_message_is_returned_once_after_the_frontier_reaches_it() -> None:
    followed = PendingMessages()
    first, second = printed(signal(10, seq=2)), printed(signal(5, seq=1))
    assert followed.add(first) and followed.add(second)
    assert followed.pop_judged(lambda _: None) == []
    assert followed.pop_judged(lambda _: START + 4_999) == []
    assert followed.pop_judged(lambda _: START + 10_000) == [second, first]
    assert followed.pop_judged(lambda _: START + 10_000) == [] and len(followed) == 0


def test_a_copy_is_recognised_while_the_first_message_is_pending() -> None:
    followed = PendingMessages()
    assert followed.add(printed(signal(10, seq=1)))
    assert not followed.add(printed(signal(10, seq=1, received_s=12)))
    assert followed.add(printed(signal(10, seq=2)))


def test_pending_messages_are_bounded_and_the_oldest_is_dropped_first() -> None:
    followed = PendingMessages()
    for number in range(REMEMBERED + 5):
        followed.add(printed(signal(number, seq=number)))
    assert len(followed) == REMEMBERED and followed.forgotten == 5
    assert followed.pop_judged(lambda _: START + 5_000)[0].row == signal(5, seq=5)


def test_the_verdict_on_a_message_follows_from_the_judgements_about_it() -> None:
    names = ("moved", "plain", "late", "refused", "ahead")
    moved, plain, late, refused, ahead = (printed(signal(1, device, seq=7)) for device in names)
    about: dict[str, Any] = {"messages": None, "message_kind": "heartbeat", "event_time_ms": START + 1_000, "seq": 7}
    about |= {"reason": "why", "late_by_ms": 1_500}
    judgements = [
        {**about, "kind": "transition", "device_id": "moved", "from_mode": "offline", "to_mode": "online", "trigger": "signal"},
        {**about, "kind": "duplicate", "device_id": "plain"},  # about its copy
        {**about, "kind": "late", "device_id": "late"},
        {**about, "kind": "after_decommission", "device_id": "refused"},
        {**about, "kind": "clock", "device_id": "ahead"},
        {**about, "kind": "late", "device_id": "plain", "seq": 8},  # another message
    ]
    results = [result for _, result in verdicts([moved, plain, late, refused, ahead], judgements)]
    assert [result.state for result in results] == ["judged", "judged", "late", "unjudged", "judged"]
    assert results[0].text == "judged: offline -> online (signal)"
    assert results[1].text == "judged: no mode change"
    assert "after decommission: why" in results[3].text
    assert results[4].text == "judged at its received_at, because why: no mode change"
    several = {**about, "kind": "late", "device_id": "plain", "messages": 7, "received_at_ms": plain.received_at_ms}
    several |= {"event_time_ms": START, "event_time_until_ms": START + 1_000, "seq": None}
    unsure, *others = [result for _, result in verdicts([plain, late], [several])]
    assert unsure.state == "late" and "why, without rows of their own" in unsure.text
    assert [result.text for result in others] == ["judged: no mode change"]


def test_a_message_that_was_not_decoded_is_not_followed() -> None:
    with pytest.raises(AssertionError):
        PendingMessages().add(replace(printed(signal(1)), row=None))
