"""What was amended is what would have been judged, had nothing come late; and the live device goes on like that."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.amendments import Correction, ReplayOrigin, amend, content, corrections, effective_transitions, histories
from fleetpulse.core.judgements import Judgement, JudgementKind, compared
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.registry.device_patch import encode_device, fingerprint, same_state
from fleetpulse.core.replay import AMENDED, Deployment, Outcome, outcome, replay
from fleetpulse.core.rows import Kind, Origin, Row
from tests.support.floors import Floor
from tests.support.histories.histories import (
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
Said = dict[str, list[Judgement]]


@st.composite
def _rows(draw: st.DrawFn) -> list[Row]:
    """Return rows in the order of ``received_at``: many are late, and entries of the registry reach into what was judged."""
    choose, steps = choosing(draw), 60
    rows = [any_signal(choose, DEVICES, steps, delays=DELAYS) for _ in range(draw(st.integers(1, 25)))]
    own = [any_internal_row(choose, DEVICES, steps) for _ in range(draw(st.integers(0, 6)))]
    if draw(st.booleans()):
        rows.append(row(-1, "fleet/_/_/policy", policy=any_policy(choose), effective_from_s=-500))
    return stamped_by_bridge([*rows, *{one.received_at_ms: one for one in own}.values()])


def _transitions(told: Iterable[Judgement], device_id: str) -> list[Judgement]:
    return [one for one in told if one.kind is JudgementKind.TRANSITION and one.device_id == device_id]


def _seen(told: Outcome, said: Said, device_id: str) -> list[tuple[Any, ...]]:
    return [content(one) for one in effective_transitions([*_transitions(told.judgements, device_id), *said[device_id]])]


def _amend(rows: Sequence[Row], deployment: Deployment, said: Said) -> Said:
    """Amend, and return what is said then."""
    fresh = amend(histories(rows, deployment), said)
    return {device_id: [*before, *fresh.get(device_id, [])] for device_id, before in said.items()}


def _nothing_said() -> Said:
    return {device_id: [] for device_id in DEVICES}


@given(_rows(), DEPLOYMENTS, st.lists(st.integers(0, 30), max_size=3))
def test_what_is_shown_after_an_amend_is_what_would_have_been_judged(
    rows: list[Row], deployment: Deployment, cuts: list[int]
) -> None:
    said = _nothing_said()
    for end in [*sorted(cut % len(rows) + 1 for cut in cuts), len(rows)]:
        told = histories(rows[:end], deployment)
        said = _amend(rows[:end], deployment, said)
        for device_id in DEVICES:
            assert _seen(told.judged, said, device_id) == [content(o) for o in _transitions(told.amended.judgements, device_id)]
            assert [one.amendment_no for one in said[device_id]] == list(range(1, len(said[device_id]) + 1))
        assert amend(told, said) == {}, "amending twice changes nothing"


IN_TIME = Floor(50)


@IN_TIME.over_all_examples
@given(_rows(), DEPLOYMENTS)
def test_where_nothing_is_late_nothing_is_amended(rows: list[Row], deployment: Deployment) -> None:
    late = {id(one) for one in rows if one.kind is Kind.REGISTRY or one.received_at_ms - (one.event_time_ms or 0) > 500}
    in_time = [one for one in rows if id(one) not in late]
    if in_time:
        assert amend(histories(in_time, deployment), _nothing_said()) == {}
        assert corrections(in_time, deployment, DEVICES) in ([], None)
        IN_TIME.met()


@given(_rows(), st.integers(0, 30), DEPLOYMENTS)
def test_a_history_that_goes_on_from_what_it_came_to_comes_to_the_same(rows: list[Row], cut: int, deployment: Deployment) -> None:
    cut %= len(rows)
    whole, begun = outcome(rows, deployment), outcome(rows[:cut], deployment)
    rest = outcome(rows[cut:], deployment, begun=begun)
    assert compared([*begun.judgements, *rest.judgements]) == compared(whole.judgements)
    assert (rest.devices, rest.shards, rest.policies) == (whole.devices, whole.shards, whole.policies)


def _without_reasons(some: Iterable[Judgement]) -> list[Judgement]:
    return [replace(one, reason=None) for one in some]


def _came_late(told: Iterable[Judgement], device_id: str) -> list[tuple[int, int]]:
    """Return event time and ``received_at`` of what came late for a device."""
    its = [one for one in told if one.kind in UNTIMELY and one.device_id == device_id and one.message_kind in AMENDED]
    return [(one.event_time_ms or 0, one.received_at_ms or 0) for one in its]


REACHED = Floor(3)


@REACHED.over_all_examples
@settings(max_examples=max(250, settings().max_examples))  # few histories change behind a snapshot that reaches them
@given(_rows(), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), DEPLOYMENTS)
def test_amended_from_a_snapshot_is_amended_from_the_whole_history_where_the_snapshot_reaches_it(
    rows: list[Row], amended: int, corrected: int, taken: int, deployment: Deployment
) -> None:
    rows, _ = _corrected(rows, corrected, deployment)
    first, place = sorted((1 + amended % len(rows), 1 + taken % len(rows)))
    earlier, said = histories(rows[:first], deployment), _amend(rows[:first], deployment, _nothing_said())
    begun, whole = outcome(rows[:place], deployment), histories(rows, deployment)
    rest = histories(rows[place:], deployment, begun)
    if begun.frontier_ms is None:
        return
    newest_ms, done_ms = rows[place - 1].received_at_ms, rows[first - 1].received_at_ms - 1
    want, got = amend(whole, said), amend(rest, said)
    for device_id in DEVICES:
        beginning = ReplayOrigin(newest_ms, begun.frontier_ms, None if earlier.differ(device_id) else done_ms)
        if beginning.beyond(_came_late(whole.judged.judgements, device_id)) is None:
            assert _without_reasons(got.get(device_id, [])) == _without_reasons(want.get(device_id, []))
            assert same_state(rest.amended.devices.get(device_id), whole.amended.devices.get(device_id))
            assert rest.differ(device_id) == whole.differ(device_id)
            REACHED.met(bool(want.get(device_id)))


def _received(one: Correction, received_at_ms: int) -> Row:
    decoded = decode(one.topic, json.dumps(one.payload).encode(), received_at_ms, Origin.COMMAND)
    assert isinstance(decoded, Row), decoded
    return decoded


def _corrected(rows: Sequence[Row], cut: int, deployment: Deployment) -> tuple[list[Row], list[Row]]:
    """Return rows with those that correct among them, as they come when amend has read those before ``cut``; and these."""
    known = rows[: cut % len(rows) + 1]
    given_ = corrections(known, deployment, DEVICES) or []
    last_ms = known[-1].received_at_ms
    ours = [_received(one, last_ms + 1 + place) for place, one in enumerate(given_)]
    rest = [one for one in rows[len(known) :] if one.received_at_ms > last_ms + len(ours)]
    return stamped_by_bridge([*known, *ours, *rest], deployment.allowed_lateness_ms / 1000), ours


def _concerns_everyone(one: Row) -> bool:
    return one.kind in (Kind.GAP, Kind.POLICY) or one.gateway_event is not None


def _reaches_back_to(one: Row) -> int:
    return min(one.event_time_ms or 0, one.contents().get("from", one.received_at_ms))


CORRECTED = Floor(1)


@CORRECTED.over_all_examples
@given(_rows(), st.integers(0, 30), DEPLOYMENTS, st.integers(0, 400))
def test_a_corrected_device_goes_on_as_its_amended_history_does(
    rows: list[Row], cut: int, deployment: Deployment, until_s: int
) -> None:
    rows, ours = _corrected(rows, cut, deployment)
    if not ours:
        return
    at_ms, sent_ms = ours[-1].event_time_ms or 0, ours[-1].received_at_ms
    through_ms = max(at_ms, START + until_s * 1000)
    both = histories(rows, deployment, through_ms=through_ms)
    refused = {
        one.device_id for one in both.judged.judgements if one.message_kind == "correct" and one.kind is JudgementKind.REFUSED
    }
    late = {one.device_id for one in both.judged.judgements if one.kind in UNTIMELY and (one.received_at_ms or 0) > sent_ms}
    after = [one for one in rows if one.received_at_ms > sent_ms]
    if any(_concerns_everyone(one) and _reaches_back_to(one) <= at_ms for one in after):
        return  # every device may have moved on
    unforeseen = {one.device_id for one in after if (one.event_time_ms or 0) <= at_ms}
    for device_id in {one.device_id for one in ours} - unforeseen:
        assert device_id not in refused
        assert device_id in late or not both.differ(device_id)
        CORRECTED.met(device_id not in late)


WITNESSED = Floor(10)


@WITNESSED.over_all_examples
@given(_rows(), st.integers(0, 30), st.sampled_from([1, 5, 20, 60]))
def test_the_oracle_says_the_same_of_a_device_that_is_corrected(rows: list[Row], cut: int, lateness_s: int) -> None:
    rows, ours = _corrected(stamped_by_bridge(rows, lateness_s), cut, Deployment(lateness_s * 1000, 30_000))
    if not ours:
        return
    at_ms, sent_ms = ours[-1].event_time_ms or 0, ours[-1].received_at_ms
    foreseen = [one for one in rows if one.received_at_ms <= sent_ms or (one.event_time_ms or 0) > at_ms]
    foreseen = [one for one in foreseen if one.received_at_ms <= sent_ms or one.kind is not Kind.GAP]
    foreseen.append(row(1000, "fleet/_/b/tick"))
    assert by_the_core(foreseen, lateness_s) == by_the_oracle(foreseen, lateness_s)
    WITNESSED.met()


CUT = Floor(10)


@CUT.over_all_examples
@given(_rows(), st.integers(0, 30), DEPLOYMENTS, st.lists(st.integers(0, 60), max_size=6), st.integers(1, 3))
def test_batch_cuts_do_not_change_what_a_correction_does(
    rows: list[Row], cut: int, deployment: Deployment, cuts: list[int], groups: int
) -> None:
    rows, ours = _corrected(rows, cut, deployment)
    if ours:
        rows = [*rows, row(1000, "fleet/_/b/tick")]
        want = compared(replay(rows, deployment))
        assert in_batches(rows, cuts, deployment, groups) == want
        CUT.met()


FURTHER = Floor(8)


@FURTHER.over_all_examples
@given(_rows(), st.integers(0, 30), DEPLOYMENTS)
def test_what_was_amended_further_on_stands(rows: list[Row], cut: int, deployment: Deployment) -> None:
    said = _amend(rows, deployment, _nothing_said())
    earlier = histories(rows[: cut % len(rows)], deployment)
    frontier_ms = earlier.judged.shards.frontier_ms if earlier.judged.shards else None
    for device_id, fresh in amend(earlier, said).items():
        assert frontier_ms is not None
        assert all((one.event_time_ms or 0) <= frontier_ms for one in fresh)
        assert [one.amendment_no for one in fresh] == [len(said[device_id]) + place for place, _ in enumerate(fresh, 1)]
        FURTHER.met()


_GREAT = st.sampled_from([0, 1, START, 2**53 - 1, 2**53, 2**63 - 1])


@given(
    st.dictionaries(
        st.sampled_from(["transition_no", "reboots", "runtime_ms", "quiet_for_ms", "quiet_since_ms", "seq", "death_ms"])
        | st.sampled_from(["dead_for_ms", "last_seen_ms", "life_ms", "mode_since_ms", "degraded_until_ms", "flagged_until_ms"]),
        _GREAT | st.none(),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["online", "offline", "degraded", "maintenance"]),
    st.lists(st.integers(0, 5), max_size=3),
)
def test_whatever_a_device_is_to_be_the_fold_goes_on_as_the_definition_does(
    told: dict[str, int | None], mode: str, cuts: list[int]
) -> None:
    deployment = Deployment(30_000)
    rows = [signal(0), tick(60)]
    known = outcome(rows, deployment).devices["d"]
    device = {**encode_device(known, 45_000), "mode": mode, **told}
    correction = row(61, "fleet/_/d/correct", was=fingerprint(known, 45_000, START + 45_000), device=device, effective_from_s=45)
    rows += [correction, signal(70), signal(4_000, kind="error", code="x"), tick(4_100), signal(9_000), tick(9_999_999)]
    assert in_batches(rows, cuts, deployment, 1) == compared(replay(rows, deployment))
