"""Text that is found and compared without being made an object: as Python finds and compares it."""

from itertools import pairwise
from random import Random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.columnar.jit.string_index import KNOWN, NOTHING, OTHER, compare, places_of, text_of
from fleetpulse.columnar.jit.take import partition_by_hash
from tests.support.floors import Floor

pytestmark = pytest.mark.property
# Texts that share all but a byte, of lengths around the eight bytes that are read at once.
ALIKE = st.builds(
    lambda size, at, letter: "a" * min(at, size) + letter + "a" * (size - min(at, size)),
    st.integers(0, 26),
    st.integers(0, 26),
    st.sampled_from(["", "b", "é", "\0", "😀"]),
)
TEXTS = ALIKE | st.text(max_size=20)


@given(st.lists(TEXTS, unique=True, max_size=60), st.lists(TEXTS, max_size=60), st.integers(0, 5), st.randoms())
def test_texts_are_found_where_they_stand(known: list[str], others: list[str], offset: int, random: Random) -> None:
    wanted = [*known, *others]
    random.shuffle(wanted)
    chosen = np.array([number % 4 != 3 for number in range(len(wanted))], bool)
    padded = pa.array(["x"] * offset + wanted, pa.string()).slice(offset)
    found = places_of(text_of(padded), chosen, text_of(pa.array(["y"] * offset + known, pa.string()).slice(offset)))
    expected = [known.index(one) if one in known and used else -1 for one, used in zip(wanted, chosen, strict=True)]
    assert found.tolist() == expected


COMPARED = Floor(20)


@COMPARED.over_all_examples
@given(
    st.lists(st.none() | TEXTS, min_size=1, max_size=30), st.lists(st.tuples(st.none() | TEXTS, st.integers(-1, 99)), max_size=60)
)
def test_texts_are_compared_with_those_of_their_places(known: list[str | None], said: list[tuple[str | None, int]]) -> None:
    asked = [(known[place % len(known)] if place % 2 else text, place % len(known) if place >= 0 else -1) for text, place in said]
    found = np.full(len(asked), NOTHING, np.int64)
    places = np.array([place for _, place in asked], np.int64)
    compare(text_of(pa.array([text for text, _ in asked], pa.string())), places, text_of(pa.array(known, pa.string())), found)
    for (text, place), verdict in zip(asked, found.tolist(), strict=True):
        expected = NOTHING if place < 0 or text is None else KNOWN if text == known[place] else OTHER
        assert verdict == expected, (text, place)
        COMPARED.met(verdict == KNOWN)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 40))
def test_rows_are_shared_out_by_their_hash_and_keep_their_order(hashes: list[int], groups: int) -> None:
    order, ends = partition_by_hash(np.array(hashes, np.int64), groups)
    shared = [order[begin:end].tolist() for begin, end in pairwise(ends)]
    assert shared == [[row for row, one in enumerate(hashes) if one % groups == group] for group in range(groups)]
