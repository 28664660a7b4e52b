"""Parameters of requests: words, numbers, instants and cursors; pages, numbers and searches of devices."""

import base64
import json
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.errors import Misuse
from fleetpulse.io.tables.tables import connect, fetch
from fleetpulse.reports.present.id_index import IdIndex
from fleetpulse.reports.present.mirror import HASH, LISTED
from fleetpulse.reports.present.tally import Tally
from fleetpulse.web import queries
from tests.support.form import examples
from tests.support.refusals import refused

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

pytestmark = pytest.mark.unit
INT64 = st.integers(-(2**63), 2**63 - 1)
TYPES = ((int,), (str,), (int, type(None)))


@given(number=INT64, word=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), last=INT64 | st.none())
def test_a_cursor_has_its_values(number: int, word: str, last: int | None) -> None:
    assert queries.decoded_cursor(queries.encoded_cursor(number, word, last), *TYPES) == [number, word, last]


@given(st.one_of(st.text(), st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists)))
def test_any_other_text_is_refused_as_a_cursor(content: object) -> None:
    text = content if isinstance(content, str) else base64.urlsafe_b64encode(json.dumps(content).encode()).decode()
    with suppress(Misuse):
        values = queries.decoded_cursor(text, *TYPES)
        assert [type(value) for value in values[:2]] == [int, str]


@pytest.mark.parametrize("values", [[2**63, "a", None], [1, "\ud800", None], [1, "a\0", None], [True, "a", None], [1, "a", 1.5]])
def test_values_that_a_query_cannot_take_are_refused(values: list[object]) -> None:
    with refused("parameter-invalid", Misuse):
        queries.decoded_cursor(base64.urlsafe_b64encode(json.dumps(values).encode()).decode(), *TYPES)
    nested = "[" * 3_000
    with refused("parameter-invalid", Misuse):
        queries.decoded_cursor(base64.urlsafe_b64encode(nested.encode()).decode(), *TYPES)


@pytest.mark.parametrize("text", ["0", "1001", "x", "-1", "٣", "1.0", "9" * 40])
def test_a_limit_out_of_bounds_is_refused(text: str) -> None:
    with refused("parameter-invalid", Misuse):
        queries.limit_of({"limit": text}, 50)
    assert (queries.limit_of({}, 50), queries.limit_of({"limit": "7"}, 50)) == (50, 7)


def test_words_are_checked() -> None:
    assert queries.flag_of({"all": "true"}, "all")
    assert not queries.flag_of({}, "all")
    for name, value in (("all", "yes"), ("all", "x" * 201)):
        with refused("parameter-invalid", Misuse):
            queries.flag_of({name: value}, name)
    assert queries.choices_of({"mode": "a,,b"}, "mode", ("a", "b")) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("yesterday", "instant-invalid"),
        ("2026-01-31T12:00:00", "instant-invalid"),
        ("9" * 18, "parameter-invalid"),
        ("1969-12-31T00:00:00Z", "parameter-invalid"),
    ],
)
def test_an_instant_that_the_tables_cannot_store_is_refused(text: str, code: str) -> None:
    with refused(code):
        queries.instant_of({"at": text}, "at")
    assert queries.instant_of({"at": "1700000000000"}, "at") == 1_700_000_000_000
    assert queries.instant_of({}, "at") is None


_DEVICE = st.fixed_dictionaries(
    {
        "device_id": st.text("aB1-", min_size=1, max_size=4),
        "mode": st.sampled_from(["online", "offline", "unjudged"]),
        "since_ms": st.sampled_from([None, 1_000, 2_000]),
        "site": st.sampled_from([None, "s1", "s2"]),
        "device_class": st.sampled_from(["c1", "c2"]),
    }
)
_FLEETS = st.lists(_DEVICE, max_size=30, unique_by=lambda row: row["device_id"])
_WANTED = st.fixed_dictionaries(
    {
        "sort": st.sampled_from(queries.SORT_KEYS),
        "limit": st.sampled_from(["1", "3", "50"]),
        "q": st.sampled_from(["", "", "b", "1", "B-", "-"]),
        "mode": st.sampled_from(["", "", "online,unjudged"]),
        "site": st.sampled_from(["", "", "s1"]),
    }
)


def _listed(fleet: list[dict[str, Any]], given: dict[str, str]) -> list[dict[str, Any]]:
    """Return the devices that match, in order: the definition, without SQL."""
    found = [
        row
        for row in fleet
        if given["q"].lower() in row["device_id"].lower()
        and (not given["mode"] or row["mode"] in given["mode"].split(","))
        and given["site"] in ("", row["site"])
    ]
    by_id = sorted(found, key=lambda row: row["device_id"])
    column = {"since": "since_ms", "device": "device_id", "class": "device_class"}
    name = given["sort"].removeprefix("-")
    none = -1 if name == "since" else ""
    descends = given["sort"].startswith("-")

    def key(row: dict[str, Any]) -> Any:
        value = row[column.get(name, name)]
        return none if value is None else value

    return sorted(by_id, key=key, reverse=descends)


def _in_memory(connection: "DuckDBPyConnection", fleet: list[dict[str, Any]]) -> IdIndex:
    """Create the tables of the facts in memory; return the index of the ids."""
    connection.execute("ATTACH ':memory:' AS live")
    columns = ", ".join(f'NULL::{"TIMESTAMPTZ" if name in ("since", "last_seen") else "VARCHAR"} AS "{name}"' for name in LISTED)
    connection.execute(
        f"CREATE TABLE live.devices AS SELECT {columns}, 0::BIGINT AS since_ms, 0::UINTEGER AS id_hash, 0 AS number LIMIT 0"
    )
    for number, row in enumerate(fleet):
        values = [number, row["device_id"], row["mode"], row["since_ms"], row["site"], row["device_class"]]
        connection.execute(
            f"""INSERT INTO live.devices BY NAME SELECT ? AS number, ? AS device_id, ? AS mode,
                make_timestamptz(1000 * ?::BIGINT) AS since, ? AS site, ? AS device_class,
                coalesce(epoch_ms(since), -1) AS since_ms,
                {HASH.format("device_id")} AS id_hash""",
            values,
        )
    Tally(connection)
    ids = IdIndex()
    ids.add(connection, "FROM live.devices ORDER BY number")
    return ids


@settings(max_examples=examples(40))
@given(_FLEETS, _WANTED, st.sampled_from([0, 2, 50_000]))
def test_pages_and_numbers_of_devices_are_those_of_the_definition(
    fleet: list[dict[str, Any]], given_: dict[str, str], most_matches: int
) -> None:
    expected = _listed(fleet, given_)
    with connect() as connection, pytest.MonkeyPatch.context() as patched:
        patched.setattr(queries, "_MOST_MATCHES", most_matches)
        ids = _in_memory(connection, fleet)
        wanted = queries.device_filter(given_)
        found = list[str]()
        while True:
            with connection.cursor() as cursor:
                where = queries.search(cursor, ids, wanted.where)
                page = queries.device_rows(cursor, replace(wanted, where=where))
                count, facets = queries.facets_of(fetch(cursor, *queries.facets_sql(where, queries.FACETS, 9)), queries.FACETS)
                after = {"after": queries.cursor_of(page[-1], wanted)} if page else {}
                place = replace(wanted, after=queries.device_filter(after).after)
                earlier = queries.device_rows(cursor, replace(place, where=where), backwards=True) if page else []
            found += [row["device_id"] for row in page]
            assert not page or [row["device_id"] for row in earlier] == found[:-1][::-1][: wanted.limit]
            assert count == len(expected)
            for facet, column in (("mode", "mode"), ("site", "site"), ("class", "device_class")):
                numbers = Counter(row[column] for row in expected if row[column] is not None)
                assert {one["value"]: one["n"] for one in facets[facet]} == numbers
            if len(page) < wanted.limit:
                break
            wanted = place
        assert found == [row["device_id"] for row in expected]
        for row in fleet[:3]:
            [one] = fetch(connection, *queries.device_sql(row["device_id"]))
            assert (one["device_id"], one["mode"], one["since_ms"]) == (row["device_id"], row["mode"], row["since_ms"])


@pytest.mark.parametrize("searched", ["\u0130zmir-1", "\u039f\u0394\u039f\u03a3", "od\u039f"])
def test_a_search_for_an_id_finds_it_although_python_has_another_lower_case(
    searched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("\u0130zmir-1", "\u039f\u0394\u039f\u03a3", "\u039f\u0394\u039f\u03a3-2", "od\u039f")
    fleet = [{"device_id": one, "mode": "online", "since_ms": 1, "site": "s", "device_class": "c"} for one in names]
    wanted = queries.device_filter({"q": searched})
    for most in (0, 50_000):
        monkeypatch.setattr(queries, "_MOST_MATCHES", most)
        with connect() as connection:
            ids = _in_memory(connection, fleet)
            with connection.cursor() as cursor:
                found = queries.device_rows(cursor, replace(wanted, where=queries.search(cursor, ids, wanted.where)))
            [(of_sql,)] = connection.execute(
                f"SELECT count(*) FROM live.devices WHERE {wanted.where.sql}", wanted.where.values
            ).fetchall()
        found_ids = {one["device_id"] for one in found}
        assert found_ids == {one for one in names if one.startswith(searched[:2])} and of_sql == len(found_ids)


@pytest.mark.parametrize("since_ms", [1_000, None])
def test_a_page_of_a_frequent_text_is_read_from_the_first_devices(monkeypatch: pytest.MonkeyPatch, since_ms: int | None) -> None:
    """Many devices can have one instant, which then selects no page: the ids of all are read."""
    fleet = [
        {
            "device_id": f"{'ab'[n % 2]}-{n:03}",
            "mode": "online",
            "since_ms": since_ms or 1_000 * n,
            "site": "s",
            "device_class": "c",
        }
        for n in range(200)
    ]
    monkeypatch.setattr(queries, "_MOST_MATCHES", 10)
    with connect() as connection:
        ids = _in_memory(connection, fleet)
        wanted = queries.device_filter({"q": "a-", "limit": "5", "sort": "-since"})
        with connection.cursor() as cursor:
            where = queries.search(cursor, ids, wanted.where)
            assert where.numbers is not None and (len(where.numbers), where.among, where.is_kept) == (100, 200, False)
            wanted = replace(wanted, where=where)
            places = queries._places_near(cursor, wanted, backwards=False)
            assert queries._places_near(cursor, replace(wanted, limit=queries._MOST_NEAR), backwards=False) is None
            found = [one["device_id"] for one in queries.device_rows(cursor, wanted)]
    assert found == ([f"a-{n:03}" for n in range(198, 188, -2)] if since_ms is None else [f"a-{n:03}" for n in range(0, 10, 2)])
    assert places is None if since_ms else places is not None and len(places) == 5
