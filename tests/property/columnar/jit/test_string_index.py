"""String index over Arrow buffers: compiled lookup and comparison agree with Python."""

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
# Texts that differ in one character, with lengths around the eight bytes that are read at once.
ALIKE = st.builds(
    lambda size, at, letter: "a" * min(at, size) + letter + "a" * (size - min(at, size)),
    st.integers(0, 26),
    st.integers(0, 26),
    st.sampled_from(["", "b", "é", "\0", "😀"]),
)
TEXTS = ALIKE | st.text(max_size=20)


@given(st.lists(TEXTS, unique=True, max_size=60), st.lists(TEXTS, max_size=60), st.integers(0, 5), st.randoms())
def test_lookup_returns_the_index_of_each_known_text(known: list[str], others: list[str], offset: int, random: Random) -> None:
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
def test_comparison_of_texts_by_index_agrees_with_python(known: list[str | None], drawn: list[tuple[str | None, int]]) -> None:
    pairs = [
        (known[index % len(known)] if index % 2 else text, index % len(known) if index >= 0 else -1) for text, index in drawn
    ]
    found = np.full(len(pairs), NOTHING, np.int64)
    indices = np.array([index for _, index in pairs], np.int64)
    compare(text_of(pa.array([text for text, _ in pairs], pa.string())), indices, text_of(pa.array(known, pa.string())), found)
    for (text, index), result in zip(pairs, found.tolist(), strict=True):
        expected = NOTHING if index < 0 or text is None else KNOWN if text == known[index] else OTHER
        assert result == expected, (text, index)
        COMPARED.met(result == KNOWN)


@given(st.lists(st.integers(-(2**63), 2**63 - 1)), st.integers(1, 40))
def test_partitioning_by_hash_keeps_the_order_of_rows(hashes: list[int], groups: int) -> None:
    order, ends = partition_by_hash(np.array(hashes, np.int64), groups)
    partitions = [order[begin:end].tolist() for begin, end in pairwise(ends)]
    assert partitions == [[row for row, value in enumerate(hashes) if value % groups == group] for group in range(groups)]
