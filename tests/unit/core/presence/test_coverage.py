"""Covered time: gaps, their inverses, and the frontier."""

from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.presence.coverage import Coverage, ShardProgress
from fleetpulse.core.replay import Deployment, outcome
from tests.support.histories.histories import START, row, signal, tick


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=4), st.integers(0, 300))
def test_covered_time_has_inverses(gaps: list[tuple[int, int]], instant: int) -> None:
    coverage = Coverage(10)
    for opened, length in sorted(gaps):
        coverage = coverage.open_gap(opened, "b").close_gap(opened + length, "b")
    missed = sum(coverage.covered(moment + 1) == coverage.covered(moment) for moment in range(10, instant)) if instant > 10 else 0
    assert coverage.covered(instant) == max(0, instant - 10 - missed)
    covered = coverage.covered(instant)
    earliest, greatest = coverage.earliest(covered), coverage.greatest(covered)
    assert earliest is not None
    assert greatest is not None
    assert coverage.covered(earliest) == coverage.covered(greatest) == covered
    assert earliest <= max(instant, 10) <= greatest
    assert coverage.covered(greatest + 1) == covered + 1
    later = coverage.forget_before(instant)
    assert [later.covered(moment) for moment in range(instant, instant + 100)] == [
        coverage.covered(moment) for moment in range(instant, instant + 100)
    ]


def test_a_gap_never_reaches_behind_the_frontier() -> None:
    listening = ShardProgress.begin(0).read(1_000, 100)
    assert listening.frontier_ms == 900
    listening = listening.open_gap(1_001, 500, "b").read(2_000, 100)
    assert listening.frontier_ms == 900
    assert listening.coverage.gaps == ((900, None),)


@given(st.lists(st.tuples(st.integers(10, 200), st.integers(0, 60), st.sampled_from("abc")), max_size=6), st.integers(0, 300))
def test_time_is_uncovered_while_any_bridge_has_an_open_gap(spans: list[tuple[int, int, str]], instant: int) -> None:
    opened = [(since, True, bridge) for since, _, bridge in spans]
    closed = [(since + length, False, bridge) for since, length, bridge in spans]
    coverage, open_since, missed = Coverage(10), dict[str, int](), set[int]()
    for at, opens, bridge in sorted(opened + closed):
        coverage = coverage.open_gap(at, bridge) if opens else coverage.close_gap(at, bridge)
        if opens:
            open_since.setdefault(bridge, at)
        elif bridge in open_since:
            missed |= set(range(open_since.pop(bridge), at))
    for since in open_since.values():
        missed |= set(range(since, 301))
    assert coverage.covered(instant) == max(0, instant - 10 - len([moment for moment in missed if moment < instant]))


def test_an_open_gap_extends_back_to_an_earlier_gap_of_another_bridge() -> None:
    coverage = Coverage(0).open_gap(50, "a").open_gap(30, "b").close_gap(90, "b")
    assert (coverage.gaps, coverage.deaf) == (((30, None),), ("a",))
    assert coverage.close_gap(70, "a").gaps == ((30, 90),)


def test_a_row_that_opens_a_gap_does_not_judge_the_span_that_it_excuses() -> None:
    before = [signal(0, received_s=0), tick(2)]
    opened = row(600, "fleet/_/b/gap", op="open", from_s=2, why="broker")
    result = outcome([*before, opened, signal(601)], Deployment(1_000))
    assert result.shards is not None
    assert result.shards.frontier_ms == START + 1_000
    assert result.shards.listenings[0].coverage.gaps == ((START + 2_000, None),)
