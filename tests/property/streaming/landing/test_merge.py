"""Merge of the rows of several bridges: each row lands once and in order, after the rows that landed before."""

import json
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.io.ingest.segments import SegmentRow, rows_table
from streaming.landing.merge import Backlog, Part, merged, place
from tests.support.form import examples

GAP = "fleet/_/{}/gap"


def part(bridge: str, segment: int, stamps: list[int], first: int = 0, gap: bool = False) -> Part:
    payload = json.dumps({"op": "open", "from": 1, "after": 0}).encode() if gap else b"{}"
    topic = GAP.format(bridge) if gap else f"fleet/{bridge}/d/heartbeat"
    rows = [
        SegmentRow(at, topic, payload, "bridge" if gap else "mqtt", line=segment * 100 + first + n) for n, at in enumerate(stamps)
    ]
    return Part(bridge, segment, first, rows_table(rows))


def stamps(parts: list[Part]) -> list[int]:
    return [at for one in parts for at in one.rows["received_at_ms"].to_pylist()]


def lines(one: Part) -> list[int]:
    return one.rows["line"].to_pylist()


@settings(max_examples=examples(60))
@given(st.data())
def test_rows_land_once_and_in_order_and_batches_share_no_instant(data: st.DataObject) -> None:
    segments_of: dict[str, list[list[int]]] = {}
    for bridge in "abc":
        at, segments = 0, list[list[int]]()
        for _ in range(data.draw(st.integers(0, 4))):
            steps = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
            segments.append([at := at + step for step in steps])
        segments_of[bridge] = segments
    written = dict.fromkeys("abc", 0)  # number of segments that the bridge has written so far
    places = dict.fromkeys("abc", 0)
    landed: list[list[tuple[int, str, int]]] = []
    for _ in range(100):
        through = {bridge: (segments[written[bridge]][0] - 1 if written[bridge] < len(segments) else 10**6)
                   for bridge, segments in segments_of.items()}  # fmt: skip
        max_segments = data.draw(st.integers(1, 3))  # limit of segments that are read from a backlog
        backlogs = []
        for bridge, segments in segments_of.items():
            unlanded = [(number, rows) for number, rows in enumerate(segments[: written[bridge]], 1)
                      if place(number, len(rows)) > places[bridge]]  # fmt: skip
            parts = []
            for number, rows in unlanded:
                if len(parts) >= max_segments and stamps(parts)[0] < stamps(parts)[-1]:
                    break
                first = max(0, places[bridge] - place(number, 0))
                parts.append(part(bridge, number, rows[first:], first))
            more = len(unlanded) > len(parts)
            backlogs.append(Backlog(parts, through[bridge], more))
        newest = landed[-1][-1][0] if landed else None
        ready = merged(backlogs, newest, data.draw(st.integers(1, 8)))
        if ready:
            rows = [(at, one.bridge, line) for one in ready for at, line in zip(stamps([one]), lines(one), strict=True)]
            landed.append(sorted(rows, key=lambda row: row[0]))
        for one in ready:
            places[one.bridge] = one.end
        if all(written[bridge] == len(segments) for bridge, segments in segments_of.items()) and not ready:
            break
        for bridge in data.draw(st.lists(st.sampled_from("abc"), max_size=2)) if ready else "abc":
            written[bridge] = min(written[bridge] + 1, len(segments_of[bridge]))
    for before, after in pairwise(landed):
        assert before[-1][0] < after[0][0]
    everything = [row for batch in landed for row in batch]
    assert sorted(everything) == sorted(
        (at, bridge, number * 100 + n)
        for bridge, segments in segments_of.items()
        for number, rows in enumerate(segments, 1)
        for n, at in enumerate(rows)
    )


def test_rows_after_the_instant_of_an_awaited_bridge_do_not_land() -> None:
    fast, slow = Backlog([part("a", 1, [10, 20, 30])], 30), Backlog([], 20)
    assert stamps(merged([fast, slow], None, 100)) == [10, 20]
    assert stamps(merged([fast, Backlog([])], None, 100)) == [10, 20, 30]


def test_rows_older_than_landed_rows_get_later_instants_and_keep_their_order() -> None:
    ready = merged([Backlog([part("a", 1, [5, 7, 40])]), Backlog([part("b", 4, [31])])], 30, 100)
    assert {one.bridge: stamps([one]) for one in ready} == {"a": [31, 31, 40], "b": [31]}


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12), st.integers(0, 30), st.data())
def test_a_lifted_gap_row_gets_an_instant_after_the_row_before_it(
    steps: list[tuple[int, bool]], landed_ms: int, data: st.DataObject
) -> None:
    at, parts, written = 0, list[Part](), list[tuple[int, bool]]()
    for number, (step, gap) in enumerate(steps, 1):
        at += step + gap
        written.append((at, gap))
        parts.append(part("a", number, [at], gap=gap))
    other_bridge, newest, ready = Backlog([part("b", 1, [100])]), landed_ms, list[Part]()
    while parts:
        read = data.draw(st.integers(1, len(parts)))
        while read < len(parts) and stamps(parts[:read])[0] == stamps(parts[:read])[-1]:
            read += 1  # like landing
        more = read < len(parts)
        some = merged([Backlog(parts[:read], 1_000, more), other_bridge], newest, data.draw(st.integers(1, 8)))
        ready += (landed := [one for one in some if one.bridge == "a"])
        newest = max([newest, *(at for one in some for at in stamps([one]))])
        assert some, "some rows must land, or landing would stop forever"
        other_bridge = Backlog([]) if len(some) > len(landed) else other_bridge
        parts = parts[len(landed) :]
    lifted = [at for one in ready for at in stamps([one])]
    assert len(lifted) == len(written)
    assert all(
        after > before if gap else after >= before
        for (before, after), (_, gap) in zip(pairwise(lifted), written[1:], strict=True)
    )
    for one in ready:
        for at, stamped in zip(stamps([one]), one.stamped or [], strict=False):
            assert stamped.as_py() is None or stamped.as_py() < at


def test_rows_of_a_single_bridge_land_unchanged() -> None:
    assert stamps(merged([Backlog([part("a", 1, [5, 5]), part("a", 2, [5, 6])], more=True)], 9, 1)) == [5, 5, 5, 6]


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_recorded_gap_has_the_instant_of_the_line_before_it_for_any_cut(cut: int) -> None:
    lines_before, gap = [part("a", 1, [10]), part("a", 2, [50])], part("a", 3, [50], gap=True)
    landed_ms = [None, 10, 50][cut]
    ready = merged([Backlog([*lines_before[cut:], gap])], landed_ms, 100)
    assert json.loads(ready[-1].rows["payload"][0].as_py())["after"] == 50


def test_a_gap_row_has_the_last_instant_of_any_bridge_before_it() -> None:
    ready = merged([Backlog([part("a", 1, [50], gap=True)]), Backlog([part("b", 1, [10, 49, 50])])], 3, 100)
    assert json.loads(ready[0].rows["payload"][0].as_py())["after"] == 49
    ready = merged([Backlog([part("a", 1, [50], gap=True)]), Backlog([])], 3, 100)
    assert json.loads(ready[0].rows["payload"][0].as_py()) == {"op": "open", "from": 1, "after": 3}
    assert pa.types.is_binary(ready[0].rows["payload"].type)
