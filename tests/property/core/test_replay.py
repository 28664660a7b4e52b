"""Replay: judgements are a function of the received rows, independent of batches, restarts, copies and order."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.columnar.fold import pending
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.core.judgements import COMPARED, MAX_REASON, Judgement, JudgementKind, compared
from fleetpulse.core.lifecycle import HELD, TRANSITIONS, Mode
from fleetpulse.core.messages.text import MAX_ID_BYTES, MAX_TEXT
from fleetpulse.core.policy import MAX_ERRORS, MAX_SEQUENCE, parse_policy
from fleetpulse.core.replay import Deployment, outcome, replay
from fleetpulse.core.rows import EVERYONE, RESERVED, Clock, Kind, Row, key_group
from tests.support.floors import Floor
from tests.support.histories.histories import (
    any_internal_row,
    any_signal,
    choosing,
    row,
    signal,
    stamped_by_bridge,
    tick,
)
from tests.support.histories.key_groups import Stream, in_batches
from tests.support.histories.strategies import DEPLOYMENTS, OWN_BUT_ARRIVALS, histories


@given(histories(reviews=True), st.lists(st.integers(0, 60), max_size=6), DEPLOYMENTS, st.integers(1, 3))
def test_batch_cuts_and_restarts_do_not_change_the_judgements(
    rows: list[Row], cuts: list[int], deployment: Deployment, groups: int
) -> None:
    want = compared(replay(rows, deployment))
    assert in_batches(rows, cuts, deployment, groups) == want


def test_a_key_group_without_rows_wakes_when_the_frontier_reaches_its_deadline() -> None:
    deployment = Deployment(1_000, 30_000)
    other = next(name for name in "efghijk" if key_group(name, 2) != key_group("d", 2))
    rules = parse_policy({"rules": {"timeout": "60s"}}).normalised()
    policy = row(0, "fleet/_/_/policy", policy=rules, effective_from_s=-9)
    rows = [policy, signal(1, "d"), *(signal(at, other) for at in (2, 10, 62))]
    judgements = in_batches(rows, [3, 4], deployment, 2)  # the frontier of the last row equals the deadline
    assert judgements == compared(replay(rows, deployment))
    assert [one[1] for one in judgements if one[0] == JudgementKind.TRANSITION and one[6] == "offline"] == ["d"]


@given(histories(), st.randoms(use_true_random=False), DEPLOYMENTS)
def test_copies_and_the_order_of_rows_with_equal_times_change_no_transition(
    rows: list[Row], random: Any, deployment: Deployment
) -> None:
    want = compared(replay(rows, deployment))
    mixed = list(rows)
    random.shuffle(mixed)
    assert compared(replay(mixed, deployment)) == want
    copied = random.choice([one for one in rows if one.kind not in RESERVED])
    newest = max(one.received_at_ms for one in rows)
    is_ahead = copied.event_time_ms is None or copied.event_time_ms > copied.received_at_ms
    if copied.kind.value == "death" or copied.clock.value == "received" or is_ahead:
        return  # its copy counts at its own receipt
    again = replace(copied, received_at_ms=_while_listening(rows, random.randint(copied.received_at_ms, newest)))
    judgements = replay([*rows, again], deployment)
    copy_of = (copied.device_id, copied.event_time_ms)
    if any(
        (one.device_id, one.event_time_ms) == copy_of
        for one in judgements
        if one.kind in (JudgementKind.LATE, JudgementKind.CLOCK)
    ):
        return  # its copy also counts at its own receipt
    transitions = {one: count for one, count in compared(judgements).items() if one[0] == "transition"}
    assert transitions == {one: count for one, count in want.items() if one[0] == "transition"}


@st.composite
def _arrivals(draw: st.DrawFn) -> tuple[list[Row], list[Row], Deployment]:
    """Return one history with two orders of arrival, in which each message arrives at any time within the lateness.

    Each message has an event time, and a device has one message per instant, because arrival orders messages of equal event time.
    There are no wills and gaps, which depend on the time of receipt, and no updates, because restarts depend on arrival.
    """
    deployment, choose = draw(DEPLOYMENTS), choosing(draw)
    own = [any_internal_row(choose, "abc", 60, OWN_BUT_ARRIVALS) for _ in range(draw(st.integers(0, 6)))]
    internal = {one.received_at_ms: one for one in own}.values()
    kinds = ("heartbeat", "error", "error", "birth")
    drawn = (any_signal(choose, "abc", 60, kinds) for _ in range(draw(st.integers(1, 30))))
    in_time = (one for one in drawn if one.clock is Clock.DEVICE and abs(one.at_ms - one.received_at_ms) < 100_000)
    signals = {(one.device_id, one.event_time_ms): one for one in in_time}.values()
    others = [*internal, row(-200, "fleet/_/b/tick"), row(1_500, "fleet/_/b/tick")]
    delays = st.integers(0, deployment.allowed_lateness_ms - 1)

    def arrange() -> list[Row]:
        delayed = [replace(one, received_at_ms=(one.event_time_ms or 0) + draw(delays)) for one in signals]
        return stamped_by_bridge([*others, *delayed])

    return arrange(), arrange(), deployment


def _without_receipt(judgements: Counter[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    """Return transitions without their ``received_at``."""
    column = COMPARED.index("received_at_ms")
    return Counter(
        {one[:column] + one[column + 1 :]: count for one, count in judgements.items() if one[0] == JudgementKind.TRANSITION}
    )


@given(_arrivals(), st.lists(st.integers(0, 60), max_size=6), st.integers(1, 3))
def test_arrivals_in_any_order_within_the_lateness_change_no_transition(
    arrivals: tuple[list[Row], list[Row], Deployment], cuts: list[int], groups: int
) -> None:
    first, second, deployment = arrivals
    want = _without_receipt(compared(replay(first, deployment)))
    assert _without_receipt(in_batches(second, cuts, deployment, groups)) == want


def _while_listening(rows: list[Row], received_at_ms: int) -> int:
    """Return a time of receipt; in a coverage gap, it is moved to the receipt of the row that opened the gap."""
    for one in rows:
        since_ms = one.contents().get("from") if one.kind is Kind.GAP else None
        if isinstance(since_ms, int) and since_ms <= received_at_ms < one.received_at_ms:
            received_at_ms = one.received_at_ms
    return received_at_ms


@pytest.mark.parametrize("content", [{"op": "decommission"}, {"op": "add", "class": "quick"}])
def test_a_registration_of_the_broadcast_id_changes_no_device(content: dict[str, str]) -> None:
    """Such a row is refused at intake, but an older table may contain one."""
    broadcast = replace(row(6, "d/registry", **content), device_id=EVERYONE)
    rows = [row(0, "fleet/s/d/heartbeat", ts_s=0), row(5, "d/control", op="release"), broadcast, row(300, "fleet/_/b/tick")]
    want = Counter({one: count for one, count in compared(replay(rows, Deployment(5_000, 30_000))).items() if one[1] == "d"})
    assert in_batches(rows, [], Deployment(5_000, 30_000), 1) == want


LIVES = Floor(20)


@LIVES.over_all_examples
@given(histories(), DEPLOYMENTS)
def test_transitions_of_a_life_are_numbered_connected_and_allowed(rows: list[Row], deployment: Deployment) -> None:
    lives: dict[tuple[str, int | None], list[Judgement]] = {}
    for one in replay(rows, deployment):
        if one.kind is JudgementKind.TRANSITION:
            lives.setdefault((one.device_id, one.life_ms), []).append(one)
    for life in lives.values():
        assert [one.transition_no for one in life] == list(range(1, len(life) + 1))
        assert life[0].from_mode is Mode.PROVISIONED
        for before, after in pairwise(life):
            assert after.from_mode is before.to_mode
            assert (after.event_time_ms or 0) >= (before.event_time_ms or 0)
        for one in life:
            assert one.from_mode is not None
            assert one.trigger is not None
            target = TRANSITIONS[one.from_mode, one.trigger]
            modes = {Mode.ONLINE, Mode.DEGRADED, Mode.FLAGGED, Mode.PROVISIONED} if target is Mode.ONLINE else {target}
            assert one.to_mode in modes | ({Mode.UNREACHABLE} if one.from_mode in HELD else set())
        LIVES.met(len(life) > 1)


@given(histories(), DEPLOYMENTS)
def test_the_state_of_a_replay_is_bounded(rows: list[Row], deployment: Deployment) -> None:
    known = outcome(rows, deployment)
    for device in known.devices.values():
        assert max(len(device.error_times_ms), len(device.codes), len(device.progress)) <= MAX_ERRORS
        assert len(device.progress_of) <= MAX_SEQUENCE
        texts = (device.device_class, device.gateway or "", device.boot or "", *device.codes, *device.progress_of)
        assert max(map(len, texts)) <= MAX_TEXT and len(f"{device.device_id}{device.site}".encode()) <= 2 * MAX_ID_BYTES
    for one in known.pending:
        reached = known.shards.of(one.site).frontier_ms if known.shards and not one.is_for_everyone else None
        assert reached is None or one.at_ms > reached
    ends = [row(500 + number / 10, f"fleet/_/{bridge}/gap", op="close", until_s=500) for number, bridge in enumerate("bc")]
    last = outcome([*rows, *ends, row(7e7, "fleet/_/b/tick"), row(14e7, "fleet/_/b/tick")], deployment)
    assert not last.devices and not last.pending  # all devices are forgotten in the end


def test_gaps_and_policies_in_a_key_group_are_bounded() -> None:
    stream = Stream(Deployment(1_000, 30_000), 1, {})
    for number in range(30):
        at, rules = number * 100.0, parse_policy({"rules": {"timeout": f"{60 + number % 2}s"}}).normalised()
        gaps = (row(at + 20, "fleet/_/b/gap", op="open", from_s=at + 15, after_s=at + 1),
                row(at + 30, "fleet/_/b/gap", op="close", until_s=at + 30))  # fmt: skip
        stream.batch([signal(at + 1), *gaps, row(at + 40, "fleet/_/_/policy", policy=rules)])
    group = KeyGroup.from_bytes(stream.stored[0])
    assert len(group.shards.listenings[0].coverage.gaps) <= 1
    assert len(group.policies.dated) <= 2


def test_gaps_that_open_at_one_instant_take_effect_in_order_of_arrival() -> None:
    """A replayed recording can contain gap rows of two bridges with the same time of receipt."""
    for number in range(8):  # their digests alone would give either order
        rows = [
            signal(0),
            tick(2_900),
            row(5_000, "fleet/_/a/gap", op="open", from_s=3_000, after_s=2_900, why=f"first {number}"),
            row(5_000, "fleet/_/b/gap", op="open", from_s=4_999, after_s=5_000),  # with the ``after`` of landing
            tick(6_000),
            *(row(8_000 + at, f"fleet/_/{name}/gap", op="close", until_s=8_000) for at, name in enumerate("ab")),
            tick(8_500),
        ]
        judgements = compared(replay(rows, Deployment(1_000)))
        assert not any(one[6] == "offline" for one in judgements), "less than 3,600 s of the silence are covered"
        for cuts in ([], [3], [2, 3, 4], [5]):
            assert in_batches(rows, cuts, Deployment(1_000), 2) == judgements, cuts


def test_the_reason_of_a_refusal_is_printable_and_limited_in_length() -> None:
    rows = [row(0, "fleet/s/d/heartbeat", ts_s=0)]
    rows += [row(9, "fleet/_/d/control", op="maintain", until=until) for until in ("\ud800", "x" * 5_000)]
    rows += [row(9_000, "fleet/_/b/tick")]
    refused = [one for one in replay(rows, Deployment(1_000)) if one.kind is JudgementKind.REFUSED]
    reasons = [one.reason or "" for one in refused]
    assert [one.isprintable() and 0 < len(one) <= MAX_REASON for one in reasons] == [True, True]
    assert in_batches(rows, [], Deployment(1_000), 1) == compared(replay(rows, Deployment(1_000)))


@pytest.fixture
def joins_at_once() -> Iterator[None]:
    """Join chunks of pending rows as soon as there are three, whether or not the frontier moves."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pending, "MAX_CHUNKS", 2)
        patched.setattr(pending, "MAX_CHUNKS_MOVING", 2)
        yield


@pytest.mark.usefixtures("joins_at_once")
@given(histories(), st.lists(st.integers(0, 60), min_size=8, max_size=40), DEPLOYMENTS, st.integers(1, 2))
def test_joining_chunks_of_pending_rows_changes_no_judgement(
    rows: list[Row], cuts: list[int], deployment: Deployment, groups: int
) -> None:
    assert in_batches(rows, cuts, deployment, groups) == compared(replay(rows, deployment))
