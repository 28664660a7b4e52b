"""Index of the ids of devices: a search finds the ids that have a text, also while ids are added."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.io.tables.tables import connect
from fleetpulse.reports.present import id_index
from fleetpulse.reports.present.id_index import IdIndex, those_in
from tests.support.form import examples

pytestmark = pytest.mark.unit
_NONE = "SELECT '' AS device_id WHERE false"
_IDS = st.lists(st.text("aB1-ü", min_size=1, max_size=4), max_size=6)


@settings(max_examples=examples(40))
@given(st.lists(_IDS, max_size=4), st.text("ab1-ü", min_size=1, max_size=3), st.integers(0, 4), st.integers(0, 4))
def test_a_search_finds_the_numbers_of_the_ids_that_have_a_text(
    parts: list[list[str]], searched: str, few: int, sample: int
) -> None:
    index = IdIndex()
    known = list[str]()
    with connect() as connection, pytest.MonkeyPatch.context() as patched:
        for name, value in (("_READ", 2), ("_FEW", few), ("_SAMPLE", sample)):
            patched.setattr(id_index, name, value)
        for ids in parts:
            rows = ", ".join(f"({number}, '{one}')" for number, one in enumerate(ids))
            query = f"SELECT device_id FROM (VALUES {rows}) AS more(number, device_id) ORDER BY number" if ids else _NONE
            assert index.add(connection, query) == len(known)
            known += ids
        assert index.find(searched).tolist() == [number for number, one in enumerate(known) if searched in one.lower()]


@pytest.mark.parametrize("prefix", ["rare", "often"])
def test_a_frequent_text_is_searched_in_all_ids_at_once(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    at_once, found = list[bytes](), id_index._find_at_once
    monkeypatch.setattr(id_index, "_find_at_once", lambda *given: at_once.append(given[-1]) or found(*given))
    index = IdIndex()
    with connect() as connection:
        index.add(
            connection, "SELECT CASE WHEN n % 50 = 0 THEN 'rare-' ELSE 'often-' END || n AS device_id FROM range(100_000) AS t(n)"
        )
    assert index.find(prefix).tolist() == [number for number in range(100_000) if (number % 50 == 0) is (prefix == "rare")]
    assert at_once == [b"often"] * (prefix == "often")


def test_an_addition_that_fails_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    index = IdIndex()
    monkeypatch.setattr(id_index, "_READ", 2_048)  # as many as one vector of DuckDB has
    with connect() as connection:
        index.add(connection, "SELECT 'a1' AS device_id")
        failing = "SELECT CASE WHEN n < 5000 THEN 'x1' ELSE error('damaged') END AS device_id FROM range(6000) AS numbers(n)"
        with pytest.raises(Exception, match="damaged"):
            index.add(connection, failing)
        assert index.add(connection, "SELECT 'b1' AS device_id") == 1
    assert index.find("1").tolist() == [0, 1]
    assert not index.find("x").size


def test_numbers_that_are_among_others_keep_their_order() -> None:
    def numbers(*some: int) -> Any:
        return np.array(some, np.uint32)

    assert those_in(numbers(1, 3, 5, 9), numbers(5, 4, 1)).tolist() == [1, 5]
    assert not those_in(numbers(), numbers(2)).size and not those_in(numbers(2), numbers()).size
