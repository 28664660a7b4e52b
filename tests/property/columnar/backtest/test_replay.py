"""Backtest replay: it finds the changes of the definition for any policy, batch cuts and key groups."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.columnar.backtest.replay import BacktestRequest, BacktestResult, DualReplay, merge_results
from fleetpulse.columnar.codec.arrow import is_signal, signals_to_batch
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.operations.backtests import CHANGES
from fleetpulse.core.replay import outcome
from fleetpulse.core.rows import EVERYONE, FOR_EVERYONE, Kind, Row, key_group
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.tables.bronze_slices import BronzePiece, slices_of
from tests.support.floors import Floor
from tests.support.form import examples
from tests.support.histories.backtests import by_hand, changes_of, instead, sides
from tests.support.histories.histories import GRID_S, START, any_policy, choosing, with_broadcasts
from tests.support.histories.strategies import DEPLOYMENTS, histories


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[Row], BacktestRequest]:
    rows, choose = draw(histories()), choosing(draw)
    instants = [None, None, *(START + GRID_S * 1000 * step for step in range(0, 60, 7))]
    instants += [one.event_time_ms for one in rows if one.kind is Kind.POLICY] * 3
    from_ms, to_ms = choose(instants), choose(instants)
    if from_ms is not None and to_ms is not None:
        from_ms, to_ms = min(from_ms, to_ms), max(from_ms, to_ms)
    received = [one.received_at_ms for one in rows]
    deployment = replace(draw(DEPLOYMENTS), verdict_jitter_ms=choose([0, 7_000]))
    return rows, BacktestRequest(deployment, any_policy(choose, reviews=True), from_ms, to_ms, min(received), max(received))


def rejudged(rows: Sequence[Row], request: BacktestRequest, cuts: Sequence[int] = (), groups: int = 2) -> BacktestResult:
    """Judge rows in the order of ``received_at`` like the job: in slices and key groups, skipping groups without rows."""
    edges = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    judged: dict[int, DualReplay] = {}
    for begin, end in pairwise(edges):
        batch = with_broadcasts(rows[begin:end])
        for group in range(groups):
            group_rows = [
                one
                for one in batch
                if one.kind in FOR_EVERYONE or one.device_id == EVERYONE or key_group(one.device_id, groups) == group
            ]
            if group_rows:
                signals = signals_to_batch(one for one in group_rows if is_signal(one))
                others = [one for one in group_rows if not is_signal(one)]
                newest_ms = max(one.received_at_ms for one in batch)
                judged.setdefault(group, DualReplay(request, group)).fold(signals, others, newest_ms)
    return merge_results(BacktestResult.from_bytes(one.finish().to_bytes()) for one in judged.values())


@settings(max_examples=examples(150))  # each example is judged four times
@given(requests(), st.lists(st.integers(0, 60), max_size=6), st.integers(1, 3))
def test_a_backtest_finds_the_changes_of_the_definition(
    example: tuple[list[Row], BacktestRequest], cuts: list[int], groups: int
) -> None:
    rows, request = example
    before, after = sides(rows, request)
    found = rejudged(rows, request, cuts, groups)
    assert changes_of(found) == by_hand(before, after)
    judgements = {"before": before, "after": after}
    assert found.days == Counter(
        (side, (one.event_time_ms or 0) // DAY_MS, one.to_mode and one.to_mode.value)
        for side, some in judgements.items()
        for one in some
        if one.kind is JudgementKind.TRANSITION
    )
    assert found.others == Counter(
        (side, one.kind.value) for side, some in judgements.items() for one in some if one.kind is not JudgementKind.TRANSITION
    )
    if request.to_ms is None:
        shards = outcome(rows, request.deployment).shards
        assert shards is not None
        assert found.frontier_ms == shards.frontier_ms


@settings(max_examples=examples(60))
@given(requests())
def test_a_backtest_with_the_policy_in_force_finds_no_changes(example: tuple[list[Row], BacktestRequest]) -> None:
    rows, request = example[0], replace(example[1], from_ms=None)
    recorded = sorted(instead(rows, request), key=lambda one: one.received_at_ms)
    found = rejudged(recorded, request)
    assert not found.changed.num_rows
    assert {key[1:]: count for key, count in found.days.items() if key[0] == "before"} == {
        key[1:]: count for key, count in found.days.items() if key[0] == "after"
    }


CHANGED = Floor(20)


@CHANGED.over_all_examples
@settings(max_examples=examples(60))
@given(requests())
def test_each_change_has_a_named_kind(example: tuple[list[Row], BacktestRequest]) -> None:
    changed = rejudged(*example).changed.to_pylist()
    for one in changed:
        assert one["change"] in CHANGES
        assert (one["before_ms"] is None) == (one["change"] == "added")
        assert (one["after_ms"] is None) == (one["change"] == "gone")
        assert one["before_ms"] != one["after_ms"]
        CHANGED.met()


PIECES = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=12)


@given(PIECES, st.integers(1, 60))
def test_slices_cover_every_instant_once_and_are_contiguous(spans: list[tuple[int, int, int]], max_rows: int) -> None:
    pieces = sorted(
        (BronzePiece(str(number), None, rows, first, first + length) for number, (first, length, rows) in enumerate(spans)),
        key=lambda piece: piece.first_ms,
    )
    slices = slices_of(pieces, max_rows)
    assert [each.number for each in slices] == list(range(len(slices)))
    for earlier, later in pairwise(slices):
        assert earlier.until_ms == later.since_ms > earlier.since_ms
        assert earlier.newest_ms < later.since_ms
    for piece in pieces:
        for at_ms in (piece.first_ms, piece.last_ms):
            matching = [each for each in slices if each.since_ms <= at_ms and (each.until_ms is None or at_ms < each.until_ms)]
            assert len(matching) == 1
            assert piece in matching[0].pieces
            assert at_ms <= matching[0].newest_ms
