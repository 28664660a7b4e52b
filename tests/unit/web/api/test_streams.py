"""Routes of the API about streams: spans, filters, pages, files, twins, windows and rollouts. See also ../test_api.py."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.streams.tables import COMMANDS
from fleetpulse.core.times import DAY_MS, format_instant
from fleetpulse.io.tables import tables
from tests.support.api import Api
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import RegisteredHome
from tests.support.homes.served import ServedHome
from tests.support.homes.streams import MINUTE_MS, STOPPED, add_commands, add_sessions, add_streams

pytestmark = pytest.mark.unit
END_MS = START + 300_000


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Serve a home in which two devices have results of streams."""
    made = ServedHome(tmp_path_factory.mktemp("streams") / "home")
    made.batch(signal(10, "pump"), tick(60))
    add_streams(made.home, "pump", END_MS)
    add_commands(made.home, "other", END_MS - 5)
    add_sessions(made.home, "other", END_MS - 5)
    opened = Api(made.home)
    yield opened
    opened.close()


def test_commands_of_the_last_day_are_listed_newest_first(api: Api) -> None:
    found = api.rows("/commands")
    assert found["since_ms"] == END_MS - DAY_MS and found["next"] is None
    of_device = [row for row in found["commands"] if row["device_id"] == "pump"]
    assert [row["status"] for row in of_device] == ["pending", "timed_out", "rejected", "acknowledged", "unmatched"]
    acknowledged = of_device[3]
    assert acknowledged["payload"] == {"interval": 30, "led": "<script>"} and acknowledged["reported"] == {"interval": 60}
    assert (acknowledged["latency_ms"], acknowledged["answers"], acknowledged["site"]) == (1_500, 1, "north")
    assert (of_device[4]["sent_at_ms"], of_device[4]["name"]) == (None, None)


@pytest.mark.parametrize(
    ("address", "count"),
    [
        ("/commands?device=other", 6),
        (f"/commands?device=other&since={format_instant(END_MS - DAY_MS)}", 5),
        (f"/commands?since={format_instant(0)}", 12),
        ("/commands?status=rejected", 2),
        ("/sessions", 10),
        ("/sessions?open=true", 2),
        ("/sessions?open=false", 8),
        ("/sessions?ended_by=will&device=other", 1),
        ("/sessions?ended_by=will&open=false", 2),
    ],
)
def test_a_list_and_its_files_have_the_same_rows(api: Api, address: str, count: int) -> None:
    noun, _, query = address.removeprefix("/").partition("?")
    rows = api.rows(address)[noun]
    assert len(rows) == count
    lines = [json.loads(line) for line in api.get(f"/{noun}.ndjson?{query}").text.splitlines()]
    objects = ("payload", "reported")
    assert [
        {**row, **{name: json.loads(row[name]) if row.get(name) else None for name in objects if name in row}} for row in lines
    ] == rows
    table = list(csv.DictReader(io.StringIO(api.get(f"/{noun}.csv?{query}").text)))
    assert [row["device_id"] for row in table] == [row["device_id"] for row in rows]


@pytest.mark.parametrize("address", ["/commands?", "/sessions?", "/commands?device=pump&", "/sessions?open=false&"])
def test_pages_have_each_row_once(api: Api, address: str) -> None:
    noun = address[1:].partition("?")[0]
    whole, parts, after = api.rows(f"{address}limit=100")[noun], list[dict[str, Any]](), ""
    while True:
        page = api.rows(f"{address}limit=3&after={after}")
        parts += page[noun]
        if page["next"] is None:
            break
        after = page["next"]
    assert parts == whole and len(whole) > 3


def test_an_open_session_lasts_until_what_the_stream_has_read_and_an_ended_one_has_its_counts(api: Api) -> None:
    [session] = api.rows("/sessions?device=pump&open=true")["sessions"]
    assert (session["ended_at_ms"], session["ended_by"], session["messages"], session["duration_ms"]) == (None,) * 4
    ended = api.rows("/sessions?device=pump&ended_by=silence")["sessions"][0]
    assert (ended["messages"], ended["duration_ms"], ended["firmware"]) == (7, 9 * MINUTE_MS, "1.9")


def test_an_open_session_with_a_reason_is_refused(api: Api) -> None:
    answer = api.get("/sessions?open=true&ended_by=will")
    assert (answer.status, answer.code) == (400, "parameter-invalid")


@pytest.mark.parametrize("after", ["x", "WzFd", "WzEsMiwzLDRd"])
def test_a_cursor_of_another_list_is_refused(api: Api, after: str) -> None:
    assert api.get(f"/commands?after={after}").status == 400


def test_a_twin_has_its_states_and_its_difference(api: Api) -> None:
    found = api.rows("/devices/pump/twin")
    assert found["desired"] == {"interval": 30, "led": "<script>", "firmware": "2.0"}
    assert found["reported"] == {"interval": 60} and found["difference"] == found["desired"]
    assert found["commands"][-1]["status"] == "pending" and found["commands"][-1]["sent_at_ms"] == END_MS


def test_windows_of_a_device_are_filtered_by_metric_and_instant(api: Api) -> None:
    rows = api.rows("/devices/pump/vitals")["windows"]
    assert len(rows) == 14 and rows[0]["window_end_ms"] == END_MS
    since = format_instant(END_MS - 20 * MINUTE_MS)
    few = api.rows(f"/devices/pump/vitals?metric=battery&since={since}")["windows"]
    assert [(row["metric"], row["window_end_ms"]) for row in few] == [("battery", END_MS), ("battery", END_MS - 10 * MINUTE_MS)]
    assert len(api.rows("/devices/pump/vitals?limit=3")["windows"]) == 3
    [alarm] = api.rows("/devices/pump/vitals?metric=battery")["alarms"]
    assert (alarm["below"], alarm["above"], alarm["raised_at_ms"]) == (3.2, None, END_MS - 20 * MINUTE_MS)
    assert api.rows("/devices/pump/vitals?metric=none") == {"windows": [], "alarms": []}


@pytest.mark.parametrize("address", ["/devices/nobody/twin", "/devices/nobody/vitals", "/rollouts/none", "/rollouts/.."])
def test_what_is_unknown_has_no_answer(api: Api, address: str) -> None:
    assert api.get(address).status == 404


def test_rollouts_have_their_cohorts_and_verdicts(api: Api) -> None:
    assert [(one["rollout"], one["status"]) for one in api.rows("/rollouts")["rollouts"]] == [
        ("pumps-2", "running"),
        ("bad-3", "stopped"),
    ]
    found = api.rows("/rollouts/bad-3")
    assert found["steps"][0]["verdict"]["reason"] == found["reason"] == STOPPED
    assert (found["cohort"], found["cohorts"], found["plan"]["cohorts"]) == (1, 3, [10, 50, 100])
    assert api.rows("/rollouts/pumps-2")["steps"][0]["verdict"] is None


def test_damaged_records_and_tables_are_errors_with_a_sentence(tmp_path: Any) -> None:
    made = RegisteredHome(tmp_path / "home", Deployment(10_000))
    add_streams(made.home, "a", END_MS)
    (made.home.path / "rollouts" / "bad-3" / "rollout.json").write_text("{")
    for path in tables.paths_of(made.home, COMMANDS):
        path.write_bytes(b"damaged")
    api = Api(made.home)
    try:
        for address, code in (
            ("/rollouts", "rollout-record-damaged"),
            ("/rollouts/bad-3", "rollout-record-damaged"),
            ("/commands", "file-damaged"),
            ("/commands.csv", "file-damaged"),
            ("/devices/a/twin", "device-unknown"),
        ):
            answer = api.get(address)
            assert (answer.status, answer.code) == (404 if code == "device-unknown" else 503, code), address
    finally:
        api.close()
