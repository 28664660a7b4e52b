"""Routes about changes of modes: pages, filters, files, and the feed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.reports.judgements import transitions
from tests.support.api import Api
from tests.support.histories.histories import signal, tick
from tests.support.homes.api_home import ApiHome

pytestmark = pytest.mark.unit


@settings(max_examples=8)
@given(limit=st.integers(1, 30))
def test_the_pages_have_each_transition_once_newest_first(api: Api, made: ApiHome, limit: int) -> None:
    found, after = [], ""
    while after is not None:
        page = api.rows(f"/transitions?limit={limit}&after={after}")
        found += page["transitions"]
        after = page["next"]
        assert len(found) <= 100, "the pages end"
    known = [
        (round(row["event_time"].timestamp() * 1000), row["device_id"], row["transition_no"]) for row in transitions(made.home)
    ]
    assert [(row["event_time_ms"], row["device_id"], row["transition_no"]) for row in found] == sorted(known, reverse=True)
    assert page["count"] == len(known)


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("to_mode=offline&trigger=silence&site=north&class=default", {"a", "silent"}),
        ("device=b", {"b"}),
        ("from_mode=offline", {"a"}),
        ("since=2023-11-14T22:16:50Z", {"a"}),
        ("until=1700000011000", {"a"}),
        ("last=1", {"a"}),
    ],
)
def test_transitions_are_filtered(api: Api, query: str, wanted: set[str]) -> None:
    page = api.rows(f"/transitions?{query}")
    assert {row["device_id"] for row in page["transitions"]} == wanted
    assert page["count"] == len(page["transitions"])
    lines = api.get(f"/transitions.ndjson?{query}").text.splitlines()
    assert [json.loads(line) for line in lines] == page["transitions"]
    assert api.get(f"/transitions.csv?{query}").text.count("\n") == len(lines) + 1


@pytest.mark.parametrize("after", ["x", "WzEsImEiXQ==", "W251bGwsImEiLDEsMSwxXQ=="])
def test_a_forged_cursor_is_refused(api: Api, after: str) -> None:
    assert api.get(f"/transitions?after={after}").status == 400


def test_the_feed_continues_with_new_commits(made: ApiHome, api: Api) -> None:
    everything = api.rows("/transitions/feed?after=oldest")
    assert {row["device_id"] for row in everything["changes"]} >= {"a", "b", "silent"}
    assert everything["at_end"] is True
    part = api.rows("/transitions/feed?after=oldest&limit=2")
    assert (part["changes"], part["at_end"]) == (everything["changes"][:2], False)
    end = api.rows("/transitions/feed")["next"]
    assert end == everything["next"]
    made.batch(signal(600, "fresh"), tick(620))
    following = api.rows(f"/transitions/feed?after={end}")
    assert "fresh" in {row["device_id"] for row in following["changes"]}
    assert api.rows(f"/transitions/feed?after={following['next']}")["changes"] == []


def test_an_expired_cursor_is_an_error_with_its_remedy(made: ApiHome, api: Api) -> None:
    latest = DeltaLog(made.home.table(JUDGEMENTS.name)).latest()
    answer = api.get(f"/transitions/feed?after={latest + 9}.0")
    assert (answer.status, answer.json()["error"]["code"]) == (410, "cursor-expired")
    assert 'continue with the "cursor" of the first page' in answer.json()["error"]["message"]
    assert api.get("/transitions/feed?after=1").status == 400


def test_the_feed_continues_after_the_facts_of_a_list(made: ApiHome, api: Api) -> None:
    api.refresh()
    cursor = api.rows("/devices")["cursor"]
    assert api.rows(f"/transitions/feed?after={cursor}")["changes"] == []
    made.batch(signal(900, "newer"), tick(920))
    assert "newer" in {row["device_id"] for row in api.rows(f"/transitions/feed?after={cursor}")["changes"]}
    api.refresh()
    assert "newer" in {row["device_id"] for row in api.rows("/devices?limit=1000")["devices"]}
    assert api.rows(f"/transitions/feed?after={api.rows('/devices')['cursor']}")["changes"] == []
