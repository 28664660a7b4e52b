"""Ledger of a chaos run: it counts each kind of fault, and its load is reproducible."""

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

pytestmark = pytest.mark.unit
TIMEOUT_MS = 10_000


def acknowledged_message(at_ms: int, device: str = "d", seq: int = 1, *, on_time: bool = True) -> Acknowledged:
    return Acknowledged(Message("t", b"{", (device, "heartbeat", at_ms, "b", seq), at_ms if on_time else None), at_ms)


def offline(at_ms: int, device: str = "d", number: int = 2) -> dict[str, Any]:
    return {"device_id": device, "life_ms": 0, "transition_no": number, "to_mode": "offline", "at_ms": at_ms,
            "trigger": "silence"}  # fmt: skip


def test_the_load_follows_from_its_seed_and_its_messages_have_unique_identities() -> None:
    devices, same_seed = (Devices(range(40), Random("s")) for _ in range(2))
    messages = [message for now_ms in range(4 * SILENT_MS, 4 * SILENT_MS + 20_000) for message in devices.next_messages(now_ms)]
    assert messages == [
        message for now_ms in range(4 * SILENT_MS, 4 * SILENT_MS + 20_000) for message in same_seed.next_messages(now_ms)
    ]
    copies = Counter(message.identity or message.payload for message in messages)
    assert set(copies.values()) == {1, 2}
    assert 0.005 < sum(count == 2 for count in copies.values()) / len(messages) < 0.02
    for message in messages:
        row = decode(message.topic, message.payload, 5 * SILENT_MS)
        assert isinstance(row, Rejection if message.identity is None else Row)


def test_only_some_devices_are_silent_for_longer_than_their_timeout() -> None:
    devices = Devices(range(2 * SILENT_EVERY), Random(1))
    sent_ms: dict[str, list[int]] = {}
    for now_ms in range(10_000_000, 10_000_000 + 4 * SILENT_MS, 100):
        for message in devices.next_messages(now_ms):
            sent_ms.setdefault(message.topic.split("/")[2], []).append(now_ms)
    pauses = {device: max(b - a for a, b in pairwise(instants)) for device, instants in sent_ms.items()}
    assert {device for device, longest in pauses.items() if longest > TIMEOUT_MS} == {"chaos-00000", f"chaos-{SILENT_EVERY:05d}"}


def test_acknowledged_messages_without_a_row_are_lost() -> None:
    stored, lost, undecodable = (
        acknowledged_message(1),
        acknowledged_message(2),
        Acknowledged(Message("t", b"broken", None, None), 3),
    )
    landed = Counter([stored.message.identity])
    assert missing([stored, lost], landed, Counter()) == [lost]
    assert missing([stored, stored], landed, Counter()) == [stored], "a message acknowledged twice needs two rows"
    assert missing([undecodable], landed, Counter()) == [undecodable]
    assert missing([stored, undecodable], landed, Counter(["broken"])) == []


def test_unlisted_copies_and_copies_listed_twice_are_wrong() -> None:
    landed = Counter({"a": 2, "b": 1, "c": 2, "d": 1})
    distinct, pending = Counter(landed.keys()), Counter[str]()
    listed = {"duplicate": Counter({"a": 1, "c": 1}), "late": Counter({"d": 1})}
    assert acted_twice(landed, distinct, pending, listed) == []
    assert acted_twice(landed, distinct, pending, {**listed, "duplicate": Counter({"a": 1})}) == ["c"]
    assert acted_twice(landed, distinct, pending, {**listed, "late": Counter({"d": 2})}) == ["d"]
    parts = balance(landed, distinct, pending, listed, Counter({"x": 1}))
    assert parts == {"received": 7, "judged": 3, "waiting": 0, "late": 1, "duplicate": 2, "quarantined": 1}


def test_two_wills_and_early_copies_of_one_identity_may_all_be_applied() -> None:
    wills = [Row(1_000, Kind.DEATH, "d", "s", 1_000, session=session, digest=digest) for session, digest in (("1", 7), ("2", 8))]
    landed, empty = Counter(map(identity_of, wills)), Counter[Any]()
    assert acted_twice(landed, distinct_messages(wills), empty, {}) == []
    assert balance(landed, distinct_messages(wills), empty, {}, empty)["judged"] == 2
    early = [Row(at_ms, Kind.BIRTH, "d", "s", 2_000, boot="b", seq=4) for at_ms in (1_000, 1_500, 3_000, 4_000)]
    assert distinct_messages(early) == {identity_of(early[0]): 3}, (
        "received at 1,000 and 1,500; copies after the event time count once"
    )
    copies = [wills[0], wills[0]]
    assert acted_twice(landed, distinct_messages(copies), empty, {}) == [identity_of(wills[0])]


def test_repeated_transitions_are_found() -> None:
    assert repeated([offline(1), offline(2, number=3), offline(3, device="e")]) == []
    assert repeated([offline(1), offline(2)]) == [offline(2)]


@pytest.mark.parametrize(
    ("signals_ms", "at_ms", "wrong"),
    [
        ([1_000], 11_000, False),  # one timeout after its last signal
        ([1_000, 20_000], 11_000, False),  # it returned later
        ([1_000, 1_001], 11_000, True),
        ([1_000, 11_000], 11_000, True),  # a message at the deadline is in time
        ([], 11_000, False),
    ],
)
def test_offline_is_wrong_if_the_device_sent_a_signal_within_its_timeout(signals_ms: list[int], at_ms: int, wrong: bool) -> None:
    acknowledged = [acknowledged_message(at) for at in signals_ms] + [acknowledged_message(at_ms, "another")]
    assert wrongly_offline(acknowledged, [offline(at_ms)], TIMEOUT_MS, 1_000) == [offline(at_ms)] * wrong


def test_late_messages_do_not_prove_life() -> None:
    assert wrongly_offline([acknowledged_message(5_000, on_time=False)], [offline(11_000)], TIMEOUT_MS, 1_000) == []


def test_offline_by_a_will_is_wrong_if_the_device_returns_within_the_grace_period() -> None:
    by_will = offline(11_000) | {"trigger": "death"}
    assert wrongly_offline([acknowledged_message(9_000)], [by_will], TIMEOUT_MS, 1_000) == []
    assert wrongly_offline([acknowledged_message(10_500)], [by_will], TIMEOUT_MS, 1_000) == [by_will]


def test_a_fault_counts_for_the_nearest_kill() -> None:
    kills = [Kill(KillKind.BROKER, 1_000, 1, 0.0, recovered_s=2.0), Kill(KillKind.LANDING, 3_000, 1, 0.0, recovered_s=4.0)]
    ledger = Ledger(kills)
    for instant_ms in (0, 1_900, 2_100):
        ledger.enter("lost", instant_ms, "it")
    assert [(line.lost, line.kills, line.recovery_s) for line in ledger.lines.values()] == [(2, 1, [2.0]), (1, 1, [4.0])]


@pytest.mark.parametrize("fault", FAULTS)
def test_an_account_with_one_fault_of_any_kind_is_not_clean(fault: str) -> None:
    line, balanced = KillCounts(kills=1), {"received": 1, "judged": 1}
    assert Account({KillKind.BROKER: line}, balanced, 0, 0, 0, []).clean
    assert not Account({KillKind.BROKER: line}, {"received": 2, "judged": 1}, 0, 0, 0, []).clean
    setattr(line, fault, 1)
    assert not Account({KillKind.BROKER: line}, balanced, 0, 0, 0, []).clean
