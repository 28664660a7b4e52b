"""Amendments: the effective transitions are those of a history without late messages, and corrections restore the state."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleetpulse.core.amendments import Correction, ReplayOrigin, amend, content, corrections, effective_transitions, histories
from fleetpulse.core.judgements import Judgement, JudgementKind, compared
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.registry.device_patch import encode_device, fingerprint, same_state
from fleetpulse.core.replay import AMENDED, Deployment, Outcome, outcome, replay
from fleetpulse.core.rows import SIGNALS, Kind, Origin, Row
from tests.support.floors import Floor
from tests.support.histories.histories import (
    KINDS_AND_ANSWERS,
    OWN_AND_REVIEWS,
    START,
    any_internal_row,
    any_policy,
    any_signal,
    choosing,
    row,
    signal,
    stamped_by_bridge,
    tick,
)
from tests.support.histories.key_groups import in_batches
from tests.support.histories.strategies import DEPLOYMENTS
from tests.support.oracle.compare import by_the_core, by_the_oracle

DEVICES = "abc"
DELAYS = (0, 0, 0, 5, 10, 70, 70, 100, 200)
UNTIMELY = (JudgementKind.LATE, JudgementKind.REFUSED)
Emitted = dict[str, list[Judgement]]


@st.composite
def _rows(draw: st.DrawFn) -> list[Row]:
    """Return rows in the order of ``received_at``; many are late, and some registry entries apply before the frontier."""
    choose, steps = choosing(draw), 60
    rows = [any_signal(choose, DEVICES, steps, KINDS_AND_ANSWERS, DELAYS) for _ in range(draw(st.integers(1, 25)))]
    own = [any_internal_row(choose, DEVICES, steps, OWN_AND_REVIEWS) for _ in range(draw(st.integers(0, 6)))]
    if draw(st.booleans()):
        rows.append(row(-1, "fleet/_/_/policy", policy=any_policy(choose, reviews=True), effective_from_s=-500))
    return stamped_by_bridge([*rows, *{one.received_at_ms: one for one in own}.values()])


def _transitions(judgements: Iterable[Judgement], device_id: str) -> list[Judgement]:
    return [one for one in judgements if one.kind is JudgementKind.TRANSITION and one.device_id == device_id]


def _effective(outcome_: Outcome, emitted: Emitted, device_id: str) -> list[tuple[Any, ...]]:
    return [content(one) for one in effective_transitions([*_transitions(outcome_.judgements, device_id), *emitted[device_id]])]


def _amend(rows: Sequence[Row], deployment: Deployment, emitted: Emitted) -> Emitted:
    """Amend devices, and return all emitted rows afterwards."""
    fresh = amend(histories(rows, deployment), emitted)
    return {device_id: [*before, *fresh.get(device_id, [])] for device_id, before in emitted.items()}


def _nothing_emitted() -> Emitted:
    return {device_id: [] for device_id in DEVICES}


@given(_rows(), DEPLOYMENTS, st.lists(st.integers(0, 30), max_size=3))
def test_effective_transitions_equal_those_of_the_amended_history(
    rows: list[Row], deployment: Deployment, cuts: list[int]
) -> None:
    emitted = _nothing_emitted()
    for end in [*sorted(cut % len(rows) + 1 for cut in cuts), len(rows)]:
        both = histories(rows[:end], deployment)
        emitted = _amend(rows[:end], deployment, emitted)
        for device_id in DEVICES:
            assert _effective(both.judged, emitted, device_id) == [
                content(one) for one in _transitions(both.amended.judgements, device_id)
            ]
            assert [one.amendment_no for one in emitted[device_id]] == list(range(1, len(emitted[device_id]) + 1))
        assert amend(both, emitted) == {}, "a second amend must change nothing"


IN_TIME = Floor(50)


@IN_TIME.over_all_examples
@given(_rows(), DEPLOYMENTS)
def test_a_history_without_late_rows_is_not_amended(rows: list[Row], deployment: Deployment) -> None:
    late = {id(one) for one in rows if one.kind is Kind.REGISTRY or one.received_at_ms - (one.event_time_ms or 0) > 500}
    in_time = [one for one in rows if id(one) not in late]
    if in_time:
        assert amend(histories(in_time, deployment), _nothing_emitted()) == {}
        assert corrections(in_time, deployment, DEVICES) in ([], None)
        IN_TIME.met()


@given(_rows(), st.integers(0, 30), DEPLOYMENTS)
def test_a_replay_resumed_from_an_outcome_has_the_same_outcome(rows: list[Row], cut: int, deployment: Deployment) -> None:
    cut %= len(rows)
    want, first = outcome(rows, deployment), outcome(rows[:cut], deployment)
    rest = outcome(rows[cut:], deployment, initial=first)
    assert compared([*first.judgements, *rest.judgements]) == compared(want.judgements)
    assert (rest.devices, rest.shards, rest.policies) == (want.devices, want.shards, want.policies)


def _without_reasons(some: Iterable[Judgement]) -> list[Judgement]:
    return [replace(one, reason=None) for one in some]


def _late_times(judgements: Iterable[Judgement], device_id: str) -> list[tuple[int, int]]:
    """Return event time and ``received_at`` of the late rows of a device."""
    late = [one for one in judgements if one.kind in UNTIMELY and one.device_id == device_id and one.message_kind in AMENDED]
    return [(one.event_time_ms or 0, one.received_at_ms or 0) for one in late]


REACHED = Floor(3)


@REACHED.over_all_examples
@settings(max_examples=max(250, settings().max_examples))  # few histories have amendments that the snapshot reaches
@given(_rows(), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), DEPLOYMENTS)
def test_amendments_from_a_snapshot_that_reaches_them_equal_those_from_all_rows(
    rows: list[Row], amended: int, corrected: int, taken: int, deployment: Deployment
) -> None:
    rows, _ = _corrected(rows, corrected, deployment)
    amended_at, taken_at = sorted((1 + amended % len(rows), 1 + taken % len(rows)))
    earlier, emitted = histories(rows[:amended_at], deployment), _amend(rows[:amended_at], deployment, _nothing_emitted())
    snapshot, complete = outcome(rows[:taken_at], deployment), histories(rows, deployment)
    rest = histories(rows[taken_at:], deployment, snapshot)
    if snapshot.frontier_ms is None:
        return
    newest_ms, amended_ms = rows[taken_at - 1].received_at_ms, rows[amended_at - 1].received_at_ms - 1
    want, got = amend(complete, emitted), amend(rest, emitted)
    for device_id in DEVICES:
        origin = ReplayOrigin(newest_ms, snapshot.frontier_ms, None if earlier.differ(device_id) else amended_ms)
        if origin.beyond(_late_times(complete.judged.judgements, device_id)) is None:
            assert _without_reasons(got.get(device_id, [])) == _without_reasons(want.get(device_id, []))
            assert same_state(rest.amended.devices.get(device_id), complete.amended.devices.get(device_id))
            assert rest.differ(device_id) == complete.differ(device_id)
            REACHED.met(bool(want.get(device_id)))


def _received(one: Correction, received_at_ms: int) -> Row:
    decoded = decode(one.topic, json.dumps(one.payload).encode(), received_at_ms, Origin.COMMAND)
    assert isinstance(decoded, Row), decoded
    return decoded


def _corrected(rows: Sequence[Row], cut: int, deployment: Deployment) -> tuple[list[Row], list[Row]]:
    """Insert the correction rows of an amend that has read the rows up to ``cut``; return all rows and the inserted ones."""
    known = rows[: cut % len(rows) + 1]
    computed = corrections(known, deployment, DEVICES) or []
    last_ms = known[-1].received_at_ms
    correction_rows = [_received(one, last_ms + 1 + offset) for offset, one in enumerate(computed)]
    rest = [one for one in rows[len(known) :] if one.received_at_ms > last_ms + len(correction_rows)]
    return stamped_by_bridge([*known, *correction_rows, *rest], deployment.allowed_lateness_ms / 1000), correction_rows


def _concerns_everyone(one: Row) -> bool:
    return one.kind in (Kind.GAP, Kind.POLICY) or one.gateway_event is not None


def _effective_ms(one: Row) -> int:
    """Return the first instant at which a row can have an effect: a signal whose clock leads is proof of life at its receipt."""
    event_time_ms = one.event_time_ms or 0
    if one.kind in SIGNALS:
        return min(event_time_ms, one.received_at_ms)
    return min(event_time_ms, one.contents().get("from", event_time_ms))


CLOCK_LEADS = stamped_by_bridge(
    [row(0, "fleet/north/a/death"), row(50, "fleet/north/a/heartbeat", ts_s=45), row(55, "fleet/north/a/heartbeat", ts_s=255)]
)
CORRECTED = Floor(1)


@CORRECTED.over_all_examples
@example(CLOCK_LEADS, 1, Deployment(1_000, 30_000), 100)
@given(_rows(), st.integers(0, 30), DEPLOYMENTS, st.integers(0, 400))
def test_a_corrected_device_continues_like_its_amended_history(
    rows: list[Row], cut: int, deployment: Deployment, until_s: int
) -> None:
    rows, correction_rows = _corrected(rows, cut, deployment)
    if not correction_rows:
        return
    at_ms, sent_ms = correction_rows[-1].event_time_ms or 0, correction_rows[-1].received_at_ms
    through_ms = max(at_ms, START + until_s * 1000)
    both = histories(rows, deployment, through_ms=through_ms)
    refused = {
        one.device_id for one in both.judged.judgements if one.message_kind == "correct" and one.kind is JudgementKind.REFUSED
    }
    late = {one.device_id for one in both.judged.judgements if one.kind in UNTIMELY and (one.received_at_ms or 0) > sent_ms}
    after = [one for one in rows if one.received_at_ms > sent_ms]
    if any(_concerns_everyone(one) and _effective_ms(one) <= at_ms for one in after):
        return  # such a row can change every device before its correction
    changed = {one.device_id for one in after if _effective_ms(one) <= at_ms}
    for device_id in {one.device_id for one in correction_rows} - changed:
        assert device_id not in refused
        assert device_id in late or not both.differ(device_id)
        CORRECTED.met(device_id not in late)


COMPARED_WITH_ORACLE = Floor(10)


@COMPARED_WITH_ORACLE.over_all_examples
@example(CLOCK_LEADS, 1, 1)
@given(_rows(), st.integers(0, 30), st.sampled_from([1, 5, 20, 60]))
def test_the_oracle_and_the_core_agree_on_corrected_devices(rows: list[Row], cut: int, lateness_s: int) -> None:
    rows, correction_rows = _corrected(stamped_by_bridge(rows, lateness_s), cut, Deployment(lateness_s * 1000, 30_000))
    if not correction_rows:
        return
    at_ms, sent_ms = correction_rows[-1].event_time_ms or 0, correction_rows[-1].received_at_ms
    compared_rows = [one for one in rows if one.received_at_ms <= sent_ms or _effective_ms(one) > at_ms]
    compared_rows = [one for one in compared_rows if one.received_at_ms <= sent_ms or one.kind is not Kind.GAP]
    compared_rows.append(row(1000, "fleet/_/b/tick"))
    assert by_the_core(compared_rows, lateness_s) == by_the_oracle(compared_rows, lateness_s)
    COMPARED_WITH_ORACLE.met()


CUT = Floor(10)


@CUT.over_all_examples
@given(_rows(), st.integers(0, 30), DEPLOYMENTS, st.lists(st.integers(0, 60), max_size=6), st.integers(1, 3))
def test_batch_cuts_do_not_change_the_effect_of_a_correction(
    rows: list[Row], cut: int, deployment: Deployment, cuts: list[int], groups: int
) -> None:
    rows, correction_rows = _corrected(rows, cut, deployment)
    if correction_rows:
        rows = [*rows, row(1000, "fleet/_/b/tick")]
        want = compared(replay(rows, deployment))
        assert in_batches(rows, cuts, deployment, groups) == want
        CUT.met()


FURTHER = Floor(8)


@FURTHER.over_all_examples
@given(_rows(), st.integers(0, 30), DEPLOYMENTS)
def test_an_amend_with_an_older_frontier_keeps_later_amendments(rows: list[Row], cut: int, deployment: Deployment) -> None:
    emitted = _amend(rows, deployment, _nothing_emitted())
    earlier = histories(rows[: cut % len(rows)], deployment)
    frontier_ms = earlier.judged.shards.frontier_ms if earlier.judged.shards else None
    for device_id, fresh in amend(earlier, emitted).items():
        assert frontier_ms is not None
        assert all((one.event_time_ms or 0) <= frontier_ms for one in fresh)
        assert [one.amendment_no for one in fresh] == [len(emitted[device_id]) + number for number, _ in enumerate(fresh, 1)]
        FURTHER.met()


_LIMIT_VALUES = st.sampled_from([0, 1, START, 2**53 - 1, 2**53, 2**63 - 1])


@given(
    st.dictionaries(
        st.sampled_from(["transition_no", "reboots", "runtime_ms", "quiet_for_ms", "quiet_since_ms", "seq", "death_ms"])
        | st.sampled_from(["dead_for_ms", "last_seen_ms", "life_ms", "mode_since_ms", "degraded_until_ms", "flagged_until_ms"])
        | st.sampled_from(["velocity_count", "velocity_since_ms", "review_ms", "confirmed_ms"]),
        _LIMIT_VALUES | st.none(),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["online", "offline", "degraded", "maintenance"]),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_fold_and_definition_agree_after_any_correction(fields: dict[str, int | None], mode: str, cuts: list[int]) -> None:
    deployment = Deployment(30_000)
    rows = [signal(0), tick(60)]
    known = outcome(rows, deployment).devices["d"]
    device = {**encode_device(known, 45_000), "mode": mode, **fields}
    correction = row(61, "fleet/_/d/correct", was=fingerprint(known, 45_000, START + 45_000), device=device, effective_from_s=45)
    rows += [correction, signal(70), signal(4_000, kind="error", code="x"), tick(4_100), signal(9_000), tick(9_999_999)]
    assert in_batches(rows, cuts, deployment, 1) == compared(replay(rows, deployment))
