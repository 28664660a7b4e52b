"""Chaos: what its load says, and that its accounts see what is wrong."""

from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from cli.chaos.kills import Kill
from cli.chaos.ledger import (
    FAULTS,
    Account,
    KillCounts,
    Ledger,
    acted_twice,
    balance,
    distinct_messages,
    identity_of,
    missing,
    repeated,
    wrongly_offline,
)
from cli.chaos.load import SILENT_EVERY, SILENT_MS, Acknowledged, Devices, Message
from cli.chaos.targets import KillKind
from fleetpulse.core.messages.decode import Rejection, decode
from fleetpulse.core.rows import Kind, Row
from fleetpulse.reports.agreement import differences

pytestmark = pytest.mark.unit
TIMEOUT_MS = 10_000


def heard(at_ms: int, device: str = "d", seq: int = 1, *, on_time: bool = True) -> Acknowledged:
    return Acknowledged(Message("t", b"{", (device, "heartbeat", at_ms, "b", seq), at_ms if on_time else None), at_ms)


def offline(at_ms: int, device: str = "d", number: int = 2) -> dict[str, Any]:
    return {"device_id": device, "life_ms": 0, "transition_no": number, "to_mode": "offline", "at_ms": at_ms,
            "trigger": "silence"}  # fmt: skip


def test_the_load_is_drawn_from_its_seed_and_every_message_has_an_identity_of_its_own() -> None:
    one, other = (Devices(range(40), Random("s")) for _ in range(2))
    said = [message for now_ms in range(4 * SILENT_MS, 4 * SILENT_MS + 20_000) for message in one.next_messages(now_ms)]
    assert said == [message for now_ms in range(4 * SILENT_MS, 4 * SILENT_MS + 20_000) for message in other.next_messages(now_ms)]
    copies = Counter(message.identity or message.payload for message in said)
    assert set(copies.values()) == {1, 2}
    assert 0.005 < sum(count == 2 for count in copies.values()) / len(said) < 0.02
    for message in said:
        row = decode(message.topic, message.payload, 5 * SILENT_MS)
        assert isinstance(row, Rejection if message.identity is None else Row)


def test_some_devices_are_silent_for_longer_than_their_timeout_and_the_others_never() -> None:
    devices = Devices(range(2 * SILENT_EVERY), Random(1))
    spoken: dict[str, list[int]] = {}
    for now_ms in range(10_000_000, 10_000_000 + 4 * SILENT_MS, 100):
        for message in devices.next_messages(now_ms):
            spoken.setdefault(message.topic.split("/")[2], []).append(now_ms)
    pauses = {device: max(b - a for a, b in pairwise(at)) for device, at in spoken.items()}
    assert {device for device, longest in pauses.items() if longest > TIMEOUT_MS} == {"chaos-00000", f"chaos-{SILENT_EVERY:05d}"}


def test_what_was_acknowledged_and_is_nowhere_is_lost() -> None:
    there, gone, broken = heard(1), heard(2), Acknowledged(Message("t", b"broken", None, None), 3)
    landed = Counter([there.message.identity])
    assert missing([there, gone], landed, Counter()) == [gone]
    assert missing([there, there], landed, Counter()) == [there], "what was acknowledged twice is to be there twice"
    assert missing([broken], landed, Counter()) == [broken]
    assert missing([there, broken], landed, Counter(["broken"])) == []


def test_a_copy_that_nobody_speaks_of_acted_and_one_that_is_spoken_of_twice_is_wrong_too() -> None:
    landed = Counter({"a": 2, "b": 1, "c": 2, "d": 1})
    once, nothing = Counter(landed.keys()), Counter[str]()
    said = {"duplicate": Counter({"a": 1, "c": 1}), "late": Counter({"d": 1})}
    assert acted_twice(landed, once, nothing, said) == []
    assert acted_twice(landed, once, nothing, {**said, "duplicate": Counter({"a": 1})}) == ["c"]
    assert acted_twice(landed, once, nothing, {**said, "late": Counter({"d": 2})}) == ["d"]
    parts = balance(landed, once, nothing, said, Counter({"x": 1}))
    assert parts == {"received": 7, "judged": 3, "waiting": 0, "late": 1, "duplicate": 2, "quarantined": 1}


def test_rows_of_one_identity_act_where_they_are_two_wills_or_come_before_their_event_time() -> None:
    wills = [Row(1_000, Kind.DEATH, "d", "s", 1_000, session=session, digest=digest) for session, digest in (("1", 7), ("2", 8))]
    landed, nothing = Counter(map(identity_of, wills)), Counter[Any]()
    assert acted_twice(landed, distinct_messages(wills), nothing, {}) == []
    assert balance(landed, distinct_messages(wills), nothing, {}, nothing)["judged"] == 2
    ahead = [Row(at_ms, Kind.BIRTH, "d", "s", 2_000, boot="b", seq=4) for at_ms in (1_000, 1_500, 3_000, 4_000)]
    assert distinct_messages(ahead) == {identity_of(ahead[0]): 3}, "heard at 1,000 and 1,500; the copies behind its time are one"
    copies = [wills[0], wills[0]]
    assert acted_twice(landed, distinct_messages(copies), nothing, {}) == [identity_of(wills[0])]


def test_a_transition_that_is_told_twice_is_seen() -> None:
    assert repeated([offline(1), offline(2, number=3), offline(3, device="e")]) == []
    assert repeated([offline(1), offline(2)]) == [offline(2)]


@pytest.mark.parametrize(
    ("spoken", "at_ms", "wrong"),
    [
        ([1_000], 11_000, False),  # a timeout after it was last heard
        ([1_000, 20_000], 11_000, False),  # it came back later
        ([1_000, 1_001], 11_000, True),
        ([1_000, 11_000], 11_000, True),  # a message exactly at the deadline is in time
        ([], 11_000, False),
    ],
)
def test_an_offline_of_a_device_that_spoke_is_false(spoken: list[int], at_ms: int, wrong: bool) -> None:
    acknowledged = [heard(at) for at in spoken] + [heard(at_ms, "another")]
    assert wrongly_offline(acknowledged, [offline(at_ms)], TIMEOUT_MS, 1_000) == [offline(at_ms)] * wrong


def test_what_was_said_late_is_no_sign_of_life() -> None:
    assert wrongly_offline([heard(5_000, on_time=False)], [offline(11_000)], TIMEOUT_MS, 1_000) == []


def test_a_device_that_has_come_back_within_the_grace_after_its_will_is_wrongly_offline() -> None:
    by_will = offline(11_000) | {"trigger": "death"}
    assert wrongly_offline([heard(9_000)], [by_will], TIMEOUT_MS, 1_000) == []
    assert wrongly_offline([heard(10_500)], [by_will], TIMEOUT_MS, 1_000) == [by_will]


def test_a_fault_is_counted_under_the_kill_that_is_nearest() -> None:
    kills = [Kill(KillKind.BROKER, 1_000, 1, 0.0, recovered_s=2.0), Kill(KillKind.LANDING, 3_000, 1, 0.0, recovered_s=4.0)]
    entered = Ledger(kills)
    for instant_ms in (0, 1_900, 2_100):
        entered.enter("lost", instant_ms, "it")
    assert [(line.lost, line.kills, line.recovery_s) for line in entered.lines.values()] == [(2, 1, [2.0]), (1, 1, [4.0])]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_of_any_kind_is_not_clean(fault: str) -> None:
    line, even = KillCounts(kills=1), {"received": 1, "judged": 1}
    assert Account({KillKind.BROKER: line}, even, 0, 0, 0, []).clean
    assert not Account({KillKind.BROKER: line}, {"received": 2, "judged": 1}, 0, 0, 0, []).clean
    setattr(line, fault, 1)
    assert not Account({KillKind.BROKER: line}, even, 0, 0, 0, []).clean


def test_verdicts_that_only_one_side_has_are_differences_each() -> None:
    def verdict(device: str) -> tuple[Any, ...]:
        return ("transition", device, *[None] * 19)

    found = differences(Counter({verdict("a"): 2, verdict("b"): 1}), Counter([verdict("a"), verdict("c")]))
    assert sorted((one["side"], one["device_id"]) for one in found) == [("defined", "c"), ("told", "a"), ("told", "b")]
