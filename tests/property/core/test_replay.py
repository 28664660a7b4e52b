"""A verdict is a pure function of the rows received: not of batches, restarts, copies or order."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.columnar.fold import pending as waiting
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.core.judgements import COMPARED, MAX_REASON, Judgement, JudgementKind, compared
from fleetpulse.core.lifecycle import HELD, TRANSITIONS, Mode
from fleetpulse.core.policy import MAX_ERRORS, MAX_SEQUENCE, parse_policy
from fleetpulse.core.replay import Deployment, outcome, replay
from fleetpulse.core.rows import EVERYONE, RESERVED, Clock, Kind, Row, key_group
from fleetpulse.core.text import MAX_ID_BYTES, MAX_TEXT
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


@given(histories(), st.lists(st.integers(0, 60), max_size=6), DEPLOYMENTS, st.integers(1, 3))
def test_batch_cuts_and_restarts_do_not_change_the_judgements(
    rows: list[Row], cuts: list[int], deployment: Deployment, groups: int
) -> None:
    want = compared(replay(rows, deployment))
    assert in_batches(rows, cuts, deployment, groups) == want


def test_who_has_no_rows_is_woken_when_the_frontier_reaches_its_deadline_and_not_later() -> None:
    deployment = Deployment(1_000, 30_000)
    other = next(name for name in "efghijk" if key_group(name, 2) != key_group("d", 2))
    rules = parse_policy({"rules": {"timeout": "60s"}}).normalised()
    policy = row(0, "fleet/_/_/policy", policy=rules, effective_from_s=-9)
    rows = [policy, signal(1, "d"), *(signal(at, other) for at in (2, 10, 62))]
    told = in_batches(rows, [3, 4], deployment, 2)  # the last row's frontier is the deadline itself
    assert told == compared(replay(rows, deployment))
    assert [one[1] for one in told if one[0] == JudgementKind.TRANSITION and one[6] == "offline"] == ["d"]


@given(histories(), st.randoms(use_true_random=False), DEPLOYMENTS)
def test_order_among_equals_and_copies_change_no_transition(rows: list[Row], random: Any, deployment: Deployment) -> None:
    want = compared(replay(rows, deployment))
    mixed = list(rows)
    random.shuffle(mixed)
    assert compared(replay(mixed, deployment)) == want
    copied = random.choice([one for one in rows if one.kind not in RESERVED])
    newest = max(one.received_at_ms for one in rows)
    in_its_time = copied.event_time_ms is not None and copied.event_time_ms <= copied.received_at_ms
    if copied.kind.value == "death" or copied.clock.value == "received" or not in_its_time:
        return  # it counts for when it was received
    again = replace(copied, received_at_ms=_while_listening(rows, random.randint(copied.received_at_ms, newest)))
    judgements = replay([*rows, again], deployment)
    copy_of = (copied.device_id, copied.event_time_ms)
    if any(
        (one.device_id, one.event_time_ms) == copy_of
        for one in judgements
        if one.kind in (JudgementKind.LATE, JudgementKind.CLOCK)
    ):
        return  # likewise
    transitions = {one: count for one, count in compared(judgements).items() if one[0] == "transition"}
    assert transitions == {one: count for one, count in want.items() if one[0] == "transition"}


@st.composite
def _arrivals(draw: st.DrawFn) -> tuple[list[Row], list[Row], Deployment]:
    """Return one history as it arrives in two ways: each message at another time within the lateness.

    Messages that say when they happened, one of a device at an instant: which of several comes first is told by when they come.
    Neither wills nor gaps, which are about when something was received, nor updates: the order of arrival decides about restarts.
    """
    deployment, choose = draw(DEPLOYMENTS), choosing(draw)
    own = [any_internal_row(choose, "abc", 60, OWN_BUT_ARRIVALS) for _ in range(draw(st.integers(0, 6)))]
    known = {one.received_at_ms: one for one in own}.values()
    kinds = ("heartbeat", "error", "error", "birth")
    drawn = (any_signal(choose, "abc", 60, kinds) for _ in range(draw(st.integers(1, 30))))
    in_time = (one for one in drawn if one.clock is Clock.DEVICE and abs(one.at_ms - one.received_at_ms) < 100_000)
    signals = {(one.device_id, one.event_time_ms): one for one in in_time}.values()
    around = [*known, row(-200, "fleet/_/b/tick"), row(1_500, "fleet/_/b/tick")]
    delays = st.integers(0, deployment.allowed_lateness_ms - 1)

    def arrived() -> list[Row]:
        come = [replace(one, received_at_ms=(one.event_time_ms or 0) + draw(delays)) for one in signals]
        return stamped_by_bridge([*around, *come])

    return arrived(), arrived(), deployment


def _without_receipt(told: Counter[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    """Return transitions without when what brought them about was received."""
    place = COMPARED.index("received_at_ms")
    return Counter({one[:place] + one[place + 1 :]: count for one, count in told.items() if one[0] == JudgementKind.TRANSITION})


@given(_arrivals(), st.lists(st.integers(0, 60), max_size=6), st.integers(1, 3))
def test_arrivals_in_any_order_within_the_lateness_change_no_transition(
    arrivals: tuple[list[Row], list[Row], Deployment], cuts: list[int], groups: int
) -> None:
    once, again, deployment = arrivals
    want = _without_receipt(compared(replay(once, deployment)))
    assert _without_receipt(in_batches(again, cuts, deployment, groups)) == want


def _while_listening(rows: list[Row], received_at_ms: int) -> int:
    """Nothing is received in a span of which a later row says that we did not listen: it comes with that row at the earliest."""
    for one in rows:
        since_ms = one.contents().get("from") if one.kind is Kind.GAP else None
        if isinstance(since_ms, int) and since_ms <= received_at_ms < one.received_at_ms:
            received_at_ms = one.received_at_ms
    return received_at_ms


@pytest.mark.parametrize("content", [{"op": "decommission"}, {"op": "add", "class": "quick"}])
def test_a_registration_of_everybody_is_one_of_nobody(content: dict[str, str]) -> None:
    """None can come in any more; a table may have one, and another device may be folded beside it."""
    odd = replace(row(6, "d/registry", **content), device_id=EVERYONE)
    rows = [row(0, "fleet/s/d/heartbeat", ts_s=0), row(5, "d/control", op="release"), odd, row(300, "fleet/_/b/tick")]
    want = Counter({one: count for one, count in compared(replay(rows, Deployment(5_000, 30_000))).items() if one[1] == "d"})
    assert in_batches(rows, [], Deployment(5_000, 30_000), 1) == want


LIVES = Floor(20)


@LIVES.over_all_examples
@given(histories(), DEPLOYMENTS)
def test_a_life_is_numbered_connected_and_allowed(rows: list[Row], deployment: Deployment) -> None:
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
            dressed = {Mode.ONLINE, Mode.DEGRADED, Mode.FLAGGED, Mode.PROVISIONED} if target is Mode.ONLINE else {target}
            assert one.to_mode in dressed | ({Mode.UNREACHABLE} if one.from_mode in HELD else set())
        LIVES.met(len(life) > 1)


@given(histories(), DEPLOYMENTS)
def test_state_is_bounded(rows: list[Row], deployment: Deployment) -> None:
    known = outcome(rows, deployment)
    for device in known.devices.values():
        assert max(len(device.error_times_ms), len(device.codes), len(device.progress)) <= MAX_ERRORS
        assert len(device.progress_of) <= MAX_SEQUENCE
        words = (device.device_class, device.gateway or "", device.boot or "", *device.codes, *device.progress_of)
        assert max(map(len, words)) <= MAX_TEXT and len(f"{device.device_id}{device.site}".encode()) <= 2 * MAX_ID_BYTES
    for one in known.pending:
        reached = known.shards.of(one.site).frontier_ms if known.shards and not one.is_for_everyone else None
        assert reached is None or one.at_ms > reached
    ends = [row(500 + number / 10, f"fleet/_/{bridge}/gap", op="close", until_s=500) for number, bridge in enumerate("bc")]
    left = outcome([*rows, *ends, row(7e7, "fleet/_/b/tick"), row(14e7, "fleet/_/b/tick")], deployment)
    assert not left.devices and not left.pending  # every path ends where nothing is kept


def test_what_a_group_knows_of_gaps_and_rules_is_bounded() -> None:
    stream = Stream(Deployment(1_000, 30_000), 1, {})
    for number in range(30):
        at, rules = number * 100.0, parse_policy({"rules": {"timeout": f"{60 + number % 2}s"}}).normalised()
        gaps = (row(at + 20, "fleet/_/b/gap", op="open", from_s=at + 15, after_s=at + 1),
                row(at + 30, "fleet/_/b/gap", op="close", until_s=at + 30))  # fmt: skip
        stream.batch([signal(at + 1), *gaps, row(at + 40, "fleet/_/_/policy", policy=rules)])
    group = KeyGroup.from_bytes(stream.stored[0])
    assert len(group.shards.listenings[0].coverage.gaps) <= 1
    assert len(group.policies.dated) <= 2


def test_gaps_that_open_at_one_instant_are_read_in_the_order_in_which_they_came() -> None:
    """Two bridges' rows by one line, as a recording plays them, may be judged one after the other."""
    for number in range(8):  # their digests alone would put them either way
        rows = [
            signal(0),
            tick(2_900),
            row(5_000, "fleet/_/a/gap", op="open", from_s=3_000, after_s=2_900, why=f"first {number}"),
            row(5_000, "fleet/_/b/gap", op="open", from_s=4_999, after_s=5_000),  # what landing says of it
            tick(6_000),
            *(row(8_000 + at, f"fleet/_/{name}/gap", op="close", until_s=8_000) for at, name in enumerate("ab")),
            tick(8_500),
        ]
        told = compared(replay(rows, Deployment(1_000)))
        assert not any(one[6] == "offline" for one in told), "3,600 s of silence are not covered"
        for cuts in ([], [3], [2, 3, 4], [5]):
            assert in_batches(rows, cuts, Deployment(1_000), 2) == told, cuts


def test_a_reason_shows_what_was_said_as_far_as_it_can_be_written() -> None:
    rows = [row(0, "fleet/s/d/heartbeat", ts_s=0)]
    rows += [row(9, "fleet/_/d/control", op="maintain", until=said) for said in ("\ud800", "x" * 5_000)]
    rows += [row(9_000, "fleet/_/b/tick")]
    told = [one for one in replay(rows, Deployment(1_000)) if one.kind is JudgementKind.REFUSED]
    reasons = [one.reason or "" for one in told]
    assert [one.isprintable() and 0 < len(one) <= MAX_REASON for one in reasons] == [True, True]
    assert in_batches(rows, [], Deployment(1_000), 1) == compared(replay(rows, Deployment(1_000)))


@pytest.fixture
def joins_at_once() -> Iterator[None]:
    """Let chunks be joined as soon as there are three, whether the frontier moves or stands."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(waiting, "MAX_CHUNKS", 2)
        patched.setattr(waiting, "MAX_CHUNKS_MOVING", 2)
        yield


@pytest.mark.usefixtures("joins_at_once")
@given(histories(), st.lists(st.integers(0, 60), min_size=8, max_size=40), DEPLOYMENTS, st.integers(1, 2))
def test_joining_what_waits_changes_no_judgement(rows: list[Row], cuts: list[int], deployment: Deployment, groups: int) -> None:
    assert in_batches(rows, cuts, deployment, groups) == compared(replay(rows, deployment))
