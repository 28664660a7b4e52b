"""Messages of a device: every retained row once, newest first, with metrics as charts, on the page and in the API."""

import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Kind, Row
from fleetpulse.io.home.home import Home
from fleetpulse.reports.messages import messages_of, place_of, rows
from fleetpulse.web.pages.charts import Range
from fleetpulse.web.pages.device_messages import metrics_of
from fleetpulse.web.pages.rendering import device_path
from tests.support.asgi import Client
from tests.support.histories.histories import START, positioned, row, signal, tick
from tests.support.homes.homes import JudgedHome, empty
from tests.support.page_client import served

pytestmark = pytest.mark.unit
HOSTILE = "<img src=x>"


def _rows() -> list[Row]:
    """Return rows of two devices: 60 heartbeats of one instant, and later ones with metrics, an error and a command."""
    storm = [signal(10, "pump", seq=number) for number in range(60)]
    measured = [
        row(
            100 + number, "pump/telemetry", ts_s=100 + number, metrics={"temperature": 20.5 - number, HOSTILE: number, "on": True}
        )
        for number in range(5)
    ]
    others = [signal(50, "other"), row(120, "pump/error", ts_s=120, code=HOSTILE), row(130, "pump/control", op="release")]
    gap = row(140, "fleet/_/bridge-1/gap", op="open", from_s=140)
    return positioned([*storm, *measured, *others, gap, tick(150)])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    judged = JudgedHome(empty(tmp_path_factory.mktemp("messages") / "home", Deployment(10_000)))
    judged.land_and_judge(*_rows())
    return judged.home


@pytest.fixture(scope="module")
def client(home: Home) -> Iterator[Client]:
    with served(home) as client:
        yield client


@pytest.mark.parametrize("limit", [1, 7, 64, 1000])
def test_every_row_of_the_device_is_on_one_page_of_the_api_newest_first(client: Client, home: Home, limit: int) -> None:
    own = [one for one in rows(home, ["pump"]) if one.device_id == "pump"]
    found, after = list[tuple[int, str, int | None]](), ""
    while after is not None:
        answer = client.get(f"/api/v1/devices/pump/messages?limit={limit}&after={after}").json()
        found += [(one["received_at_ms"], one["kind"], one["seq"]) for one in answer["messages"]]
        after = answer["next"]
        assert len(found) <= len(own), "the pages end"
    assert found == [(one.received_at_ms, one.kind, one.seq) for one in sorted(own, key=lambda one: one.arrival, reverse=True)]
    assert len(found) == 67


def test_rows_of_two_bridges_at_one_instant_are_listed_once(tmp_path: Path) -> None:
    judged = JudgedHome(empty(tmp_path / "home", Deployment(10_000)))
    judged.land_and_judge(*[replace(signal(10, "pump", seq=number), position=0) for number in range(4)], tick(20))
    found, before = list[int](), None
    for _ in range(4):
        [one] = messages_of(judged.home, "pump", 1, before=before)
        found.append(one["seq"])
        before = place_of(one)
    assert sorted(found) == [0, 1, 2, 3]
    assert messages_of(judged.home, "pump", 1, before=before) == []


def test_the_pages_have_every_row_and_keep_the_kind(client: Client) -> None:
    address, found = device_path("pump", "messages"), list[str]()
    pages = 0
    while address:
        text = client.get(address).text
        found += re.findall(r"<tr data-row>", text)
        pages += 1
        following = re.findall(r'<a href="([^"]*)" rel="next"', text)
        address = unescape(following[0]) if following else ""
    assert (len(found), pages) == (67, 2)
    only = client.get(device_path("pump", "messages", kind=Kind.HEARTBEAT.value)).text
    [older] = re.findall(r'<a href="([^"]*)" rel="next"', only)
    assert "kind=heartbeat" in older
    assert client.get(unescape(older)).text.count("<tr data-row>") == 10
    assert "No message of this kind is retained" in client.get(device_path("pump", "messages", kind="birth")).text


def test_contents_are_escaped_and_metrics_are_drawn(client: Client) -> None:
    text = client.get(device_path("pump", "messages")).text
    assert HOSTILE not in text and "&lt;img src=x&gt;" in text
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert len(figures) == 2, "a metric that is no number has no chart"
    assert '<span class="figure">16.5</span> <span class="quiet">16.5 to 20.5</span>' in figures[1]
    assert 'd="M0 0L250 250L500 500L750 750L1000 1000"' in figures[1]
    assert "the list beneath has them" in figures[0]


def test_metrics_are_those_of_the_messages() -> None:
    messages = [{"received_at_ms": at, "metrics": text} for at, text in ((START + 10, '{"a": 1, "b": "x"}'), (START, '{"a": 3}'))]
    [found] = metrics_of(messages, Range(START, START + 10))
    assert (found.name, found.newest, found.least, found.greatest, found.count) == ("a", 1, 1, 3, 2)


def test_an_unknown_device_or_parameter_is_refused(client: Client) -> None:
    for address, status in (
        ("/devices/nobody/messages", 404), ("/devices/pump/messages?kind=x", 400), ("/devices/pump/messages?after=x", 400),
    ):  # fmt: skip
        assert client.get(address).status == client.get(f"/api/v1{address}").status == status, address
