"""A verdict is a pure function of the rows received: not of batches, restarts, copies or order."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.columnar.blocks import is_signal, signals_to_batch
from fleetpulse.columnar.group import KeyGroup, begin
from fleetpulse.core.judgements import Judgement, Verdict
from fleetpulse.core.machine import TRANSITIONS, Mode
from fleetpulse.core.messages import FOR_EVERYONE, RESERVED, Kind, Row, key_group
from fleetpulse.core.policy import MAX_ERRORS, parse_policy
from fleetpulse.core.replay import Deployment, outcome, replay
from tests.histories import compared, compared_columns, row, signal

STEP = st.integers(0, 60).map(lambda n: n * 5)  # a coarse grid: deadlines, windows and ties meet often
DEVICES = st.sampled_from(["a", "b", "c"])
CODES = st.sampled_from(["reconnaissance", "auth_failed", "escalation", "x", None])
DEPLOYMENTS = st.sampled_from([1, 5, 20, 60]).map(lambda s: Deployment(s * 1000, 30_000))


def _policy(timeout: int, errors: int, window: int, hold: int, unknown: str) -> dict[str, Any]:
    rules = {
        "timeout": f"{timeout}s",
        "death_grace": "5s",
        "forget_after": f"{timeout + 60}s",
        "degraded": {"errors": errors, "window": f"{window}s"},
        "flagged": {"window": f"{window}s", "hold": f"{hold}s"},
        "longest_hold": "100s",
    }
    classes = {"quick": {"timeout": "10s"}}
    return parse_policy({"rules": rules, "classes": classes, "unknown_devices": unknown}).normalised()


POLICIES = st.builds(
    _policy,
    st.sampled_from([10, 20, 30, 60]),
    st.integers(1, 3),
    st.sampled_from([10, 25, 60]),
    st.sampled_from([15, 60]),
    st.sampled_from(["admit", "admit", "quarantine"]),
)


@st.composite
def _signals(draw: st.DrawFn) -> Row:
    received = draw(STEP)
    at = received - draw(st.sampled_from([0, 0, 0, 5, 10, 25, 70, -10, -30, -35]))
    kind = draw(st.sampled_from(["heartbeat", "heartbeat", "telemetry", "error", "error", "birth", "death"]))
    more = {"seq": draw(st.none() | st.integers(0, 3)), "boot": draw(st.sampled_from([None, "p", "q"])), "code": draw(CODES)}
    given_ts = draw(st.sampled_from([True] * 8 + [False]))
    more = {name: value for name, value in more.items() if value is not None}
    device = draw(DEVICES)
    return signal(at, device, kind, received, **more) if given_ts else row(received, f"{device}/{kind}", **more)


@st.composite
def _commands(draw: st.DrawFn) -> Row:
    """Our own rows: no other row shares their instant."""
    received = draw(STEP) + draw(st.integers(1, 4)) + draw(st.integers(1, 999)) / 1000
    effective = draw(st.sampled_from([None, None, received - 40, received + 30]))
    more: dict[str, Any] = {} if effective is None else {"effective_from_s": effective}
    which = draw(st.sampled_from(["gap", "gap", "policy", "add", "decommission", "maintain", "update", "release", "tick"]))
    device = draw(DEVICES)
    if which == "gap":
        back = draw(st.sampled_from([0, 5, 20, 80]))
        content: dict[str, Any] = (
            {"op": "open", "from_s": received - back} if draw(st.booleans()) else {"op": "close", "until_s": received + back}
        )
        return row(received, "fleet/_/b/gap", **content)
    if which == "tick":
        return row(received, "fleet/_/b/tick")
    if which == "policy":
        return row(received, "fleet/_/_/policy", policy=draw(POLICIES), **more)
    if which == "add":
        return row(received, f"{device}/registry", op="add", **{"class": draw(st.sampled_from(["default", "quick"]))}, **more)
    if which == "decommission":
        return row(received, f"{device}/registry", op="decommission", **more)
    if which == "release":
        return row(received, f"{device}/control", op="release", **more)
    return row(received, f"{device}/control", op=which, until_s=received + draw(st.sampled_from([10, 50, 120])), **more)


@st.composite
def histories(draw: st.DrawFn) -> list[Row]:
    """Return rows in the order of ``received_at``."""
    commands = draw(st.lists(_commands(), max_size=8, unique_by=lambda one: one.received_at_ms))
    rows = [*draw(st.lists(_signals(), min_size=1, max_size=40)), *commands]
    if draw(st.booleans()):
        rows.append(row(-1, "fleet/_/_/policy", policy=draw(POLICIES), effective_from_s=-500))
    return as_the_bridge_says(sorted(rows, key=lambda one: one.received_at_ms))


def as_the_bridge_says(rows: list[Row]) -> list[Row]:
    """A gap row says how far we had come: the ``received_at`` of the row before it."""
    told: list[Row] = []
    for one in rows:
        if one.kind is Kind.GAP and told:
            one = replace(one, body=json.dumps({**one.contents(), "after": told[-1].received_at_ms}))
        told.append(one)
    return told


def in_batches(
    rows: Sequence[Row],
    cuts: Sequence[int],
    deployment: Deployment,
    groups: int = 2,
    initial: Mapping[int, bytes] = MappingProxyType({}),
) -> Counter[tuple[Any, ...]]:
    """Judge as the stream does: key groups, batches, the stored form between any two calls, a watermark a batch behind.

    Args:
        rows: in the order of ``received_at``.
        cuts: where batches end.
        deployment: lateness, clock lead and jitter.
        groups: how many key groups there are.
        initial: what they begin with.
    """
    told: Counter[tuple[Any, ...]] = Counter()
    stored = dict(initial)
    chunks: dict[int, dict[int, bytes]] = {group: {} for group in range(groups)}
    newest = 0
    edges = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    batches = [rows[start:end] for start, end in pairwise(edges)]
    for batch in [*batches, []]:
        for group in range(groups):
            mine = [one for one in batch if one.kind in FOR_EVERYONE or key_group(one.device_id, groups) == group]
            if not mine and group not in stored:
                continue
            state = KeyGroup.from_bytes(stored[group]) if group in stored else begin(rows[0].received_at_ms)
            signals = signals_to_batch(one for one in mine if is_signal(one))
            others = [one for one in mine if not is_signal(one)]
            reached = max([newest, *(one.received_at_ms for one in mine)])
            step = state.fold(signals, others, reached, deployment, chunks[group].__getitem__)
            told += compared_columns(step.told)
            for number in step.gone:
                del chunks[group][number]
            chunks[group] |= dict(step.chunks)
            assert chunks[group].keys() == {chunk.number for chunk in state.waiting.chunks}
            stored[group] = state.to_bytes()
        newest = max([newest, *(one.received_at_ms for one in batch)])
    return told


@given(histories(), st.lists(st.integers(0, 60), max_size=6), DEPLOYMENTS, st.integers(1, 3))
def test_batch_cuts_and_restarts_do_not_change_the_judgements(
    rows: list[Row], cuts: list[int], deployment: Deployment, groups: int
) -> None:
    # A policy and a gap concern every group: each says of it what the definition says once.
    told = in_batches(rows, cuts, deployment, groups)
    want = compared(replay(rows, deployment))
    for key in list(told):
        if key[1] in ("_", "b"):
            assert key in want
            told[key] = want[key]
    assert told == want


@given(histories(), st.randoms(use_true_random=False), DEPLOYMENTS)
def test_order_among_equals_and_copies_change_no_transition(rows: list[Row], random: Any, deployment: Deployment) -> None:
    want = compared(replay(rows, deployment))
    mixed = list(rows)
    random.shuffle(mixed)
    assert compared(replay(mixed, deployment)) == want
    copied = random.choice([one for one in rows if one.kind not in RESERVED])
    newest = max(one.received_at_ms for one in rows)
    ahead = (copied.event_time_ms or 0) - copied.received_at_ms > deployment.max_clock_lead_ms
    if copied.kind.value == "death" or copied.clock.value == "received" or ahead:
        return  # its event time is when it was received, or a later copy is the first that can be believed
    again = replace(copied, received_at_ms=_while_listening(rows, random.randint(copied.received_at_ms, newest)))
    told = replay([*rows, again], deployment)
    transitions = {one: count for one, count in compared(told).items() if one[0] == "transition"}
    assert transitions == {one: count for one, count in want.items() if one[0] == "transition"}


def _while_listening(rows: list[Row], received_at_ms: int) -> int:
    """Nothing is received in a span of which a later row says that we did not listen: it comes with that row at the earliest."""
    for one in rows:
        since_ms = one.contents().get("from") if one.kind is Kind.GAP else None
        if isinstance(since_ms, int) and since_ms <= received_at_ms < one.received_at_ms:
            received_at_ms = one.received_at_ms
    return received_at_ms


@given(histories(), DEPLOYMENTS)
def test_a_life_is_numbered_connected_and_allowed(rows: list[Row], deployment: Deployment) -> None:
    lives: dict[tuple[str, int | None], list[Judgement]] = {}
    for one in replay(rows, deployment):
        if one.kind is Verdict.TRANSITION:
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
            assert one.to_mode in dressed


@given(histories(), DEPLOYMENTS)
def test_state_is_bounded(rows: list[Row], deployment: Deployment) -> None:
    told = outcome(rows, deployment)
    for device in told.devices.values():
        assert device.mode is not Mode.FORGOTTEN
        assert max(len(device.error_times_ms), len(device.codes), len(device.progress)) <= MAX_ERRORS
    frontier = told.listening.frontier_ms if told.listening else None
    assert frontier is None or all((one.event_time_ms or 0) > frontier for one in told.waiting)
