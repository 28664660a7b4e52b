"""Index of the ids of devices: a search finds the ids that have a text, also while ids are added."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.io.tables.tables import connect
from fleetpulse.reports.present import id_index
from fleetpulse.reports.present.id_index import IdIndex

pytestmark = pytest.mark.unit
_NONE = "SELECT '' AS device_id WHERE false"
_IDS = st.lists(st.text("aB1-ü", min_size=1, max_size=4), max_size=6)


@settings(max_examples=40)
@given(st.lists(_IDS, max_size=4), st.text("ab1-ü", min_size=1, max_size=3), st.integers(1, 20))
def test_a_search_finds_the_numbers_of_the_ids_that_have_a_text(parts: list[list[str]], searched: str, most: int) -> None:
    index = IdIndex()
    known = list[str]()
    with connect() as connection, pytest.MonkeyPatch.context() as patched:
        patched.setattr(id_index, "_READ", 2)
        for ids in parts:
            rows = ", ".join(f"({number}, '{one}')" for number, one in enumerate(ids))
            query = f"SELECT device_id FROM (VALUES {rows}) AS more(number, device_id) ORDER BY number" if ids else _NONE
            assert index.add(connection, query) == len(known)
            known += ids
    expected = [number for number, one in enumerate(known) if searched in one.lower()]
    assert index.find(searched, most).tolist() == expected[:most]


def test_an_addition_that_fails_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    index = IdIndex()
    monkeypatch.setattr(id_index, "_READ", 2_048)  # as many as one vector of DuckDB has
    with connect() as connection:
        index.add(connection, "SELECT 'a1' AS device_id")
        failing = "SELECT CASE WHEN n < 5000 THEN 'x1' ELSE error('damaged') END AS device_id FROM range(6000) AS numbers(n)"
        with pytest.raises(Exception, match="damaged"):
            index.add(connection, failing)
        assert index.add(connection, "SELECT 'b1' AS device_id") == 1
    assert index.find("1", 9).tolist() == [0, 1]
    assert not index.find("x", 9).size
