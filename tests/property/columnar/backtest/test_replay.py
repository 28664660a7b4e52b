"""A backtest says what the definition says of the same rows, whatever policy stands in, however the rows are cut and grouped."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.columnar.backtest.diff import CHANGES
from fleetpulse.columnar.backtest.replay import DAY_MS, BacktestRequest, BacktestResult, DualReplay, merge_results
from fleetpulse.columnar.codec.arrow import is_signal, signals_to_batch
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.replay import outcome
from fleetpulse.core.rows import EVERYONE, FOR_EVERYONE, Kind, Row, key_group
from fleetpulse.io.tables.bronze_slices import BronzePiece, slices_of
from tests.support.floors import Floor
from tests.support.histories.backtests import by_hand, changes_of, instead, sides
from tests.support.histories.histories import GRID_S, START, any_policy, choosing, with_broadcasts
from tests.support.histories.strategies import DEPLOYMENTS, histories


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[Row], BacktestRequest]:
    rows, choose = draw(histories()), choosing(draw)
    instants = [None, None, *(START + GRID_S * 1000 * step for step in range(0, 60, 7))]
    instants += [one.event_time_ms for one in rows if one.kind is Kind.POLICY] * 3
    from_ms, to_ms = choose(instants), choose(instants)
    if from_ms is not None and to_ms is not None:
        from_ms, to_ms = min(from_ms, to_ms), max(from_ms, to_ms)
    received = [one.received_at_ms for one in rows]
    deployment = replace(draw(DEPLOYMENTS), verdict_jitter_ms=choose([0, 7_000]))
    return rows, BacktestRequest(deployment, any_policy(choose), from_ms, to_ms, min(received), max(received))


def rejudged(rows: Sequence[Row], question: BacktestRequest, cuts: Sequence[int] = (), groups: int = 2) -> BacktestResult:
    """Judge rows, in the order of ``received_at``, as the job does: in slices, by key group, nothing in a group without rows."""
    edges = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    judged: dict[int, DualReplay] = {}
    for begin, end in pairwise(edges):
        batch = with_broadcasts(rows[begin:end])
        for group in range(groups):
            mine = [
                one
                for one in batch
                if one.kind in FOR_EVERYONE or one.device_id == EVERYONE or key_group(one.device_id, groups) == group
            ]
            if mine:
                signals = signals_to_batch(one for one in mine if is_signal(one))
                others = [one for one in mine if not is_signal(one)]
                newest_ms = max(one.received_at_ms for one in batch)
                judged.setdefault(group, DualReplay(question, group)).fold(signals, others, newest_ms)
    return merge_results(BacktestResult.from_bytes(one.finish().to_bytes()) for one in judged.values())


@settings(max_examples=150)  # each is judged four times
@given(questions(), st.lists(st.integers(0, 60), max_size=6), st.integers(1, 3))
def test_a_backtest_finds_what_the_definition_says_otherwise(
    asked: tuple[list[Row], BacktestRequest], cuts: list[int], groups: int
) -> None:
    rows, question = asked
    before, after = sides(rows, question)
    found = rejudged(rows, question, cuts, groups)
    assert changes_of(found) == by_hand(before, after)
    said = {"before": before, "after": after}
    assert found.days == Counter(
        (side, (one.event_time_ms or 0) // DAY_MS, one.to_mode and one.to_mode.value)
        for side, some in said.items()
        for one in some
        if one.kind is JudgementKind.TRANSITION
    )
    assert found.others == Counter(
        (side, one.kind.value) for side, some in said.items() for one in some if one.kind is not JudgementKind.TRANSITION
    )
    if question.to_ms is None:
        listening = outcome(rows, question.deployment).shards
        assert listening is not None
        assert found.frontier_ms == listening.frontier_ms


@settings(max_examples=60)
@given(questions())
def test_the_policy_that_was_in_force_makes_no_difference(asked: tuple[list[Row], BacktestRequest]) -> None:
    rows, question = asked[0], replace(asked[1], from_ms=None)
    recorded = sorted(instead(rows, question), key=lambda one: one.received_at_ms)
    found = rejudged(recorded, question)
    assert not found.changed.num_rows
    assert {key[1:]: count for key, count in found.days.items() if key[0] == "before"} == {
        key[1:]: count for key, count in found.days.items() if key[0] == "after"
    }


CHANGED = Floor(20)


@CHANGED.over_all_examples
@settings(max_examples=60)
@given(questions())
def test_each_change_is_of_a_kind_that_has_a_name(asked: tuple[list[Row], BacktestRequest]) -> None:
    changed = rejudged(*asked).changed.to_pylist()
    for one in changed:
        assert one["change"] in CHANGES
        assert (one["before_ms"] is None) == (one["change"] == "added")
        assert (one["after_ms"] is None) == (one["change"] == "gone")
        assert one["before_ms"] != one["after_ms"]
        CHANGED.met()


PIECES = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=12)


@given(PIECES, st.integers(1, 60))
def test_slices_have_every_instant_once_and_follow_each_other(spans: list[tuple[int, int, int]], max_rows: int) -> None:
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
            having = [each for each in slices if each.since_ms <= at_ms and (each.until_ms is None or at_ms < each.until_ms)]
            assert len(having) == 1
            assert piece in having[0].pieces
            assert at_ms <= having[0].newest_ms
