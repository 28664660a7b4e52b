"""Fleet and device as of an instant: the rows of ``fleet rewind``, as known now and as known then."""

import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.core.times import END_OF_TIME_MS, format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports import moments
from fleetpulse.reports.history import time_travel
from fleetpulse.reports.moments import fleet_page, moment_of
from fleetpulse.web.pages import past
from fleetpulse.web.pages.rendering import device_path, query_of
from tests.support.asgi import Client
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import JudgedHome, empty
from tests.support.page_client import Page, served

pytestmark = pytest.mark.unit
DEVICES = 60
HALF_DAY_S = 43_200
BATCHES_S = (100, HALF_DAY_S, 2 * HALF_DAY_S)  # newest row of each batch, seconds after START


def _home(path: Path) -> Home:
    """Return a home of three batches; all devices fall silent but every third, and an amendment takes one silence back."""
    judged = JudgedHome(empty(path, Deployment(10_000)))
    names = [f"pump-{number:02}" for number in range(DEVICES)]
    judged.land_and_judge(*[signal(10, name) for name in names], tick(BATCHES_S[0]))
    judged.land_and_judge(*[signal(BATCHES_S[1] - 1_000, name) for name in names[::3]], tick(BATCHES_S[1]))
    judged.land_and_judge(tick(BATCHES_S[2]))
    [offline] = [one for one in time_travel.life(judged.home, names[1], _moment(BATCHES_S[2])) if one["mode"] == "offline"]
    taken_back = {
        "kind": "retract", "device_id": names[1], "life_ms": offline["life_ms"], "transition_no": offline["transition_no"],
        "to_mode": "offline", "amendment_no": 1, "event_time_ms": offline["since_ms"],
        "judged_at_ms": START + BATCHES_S[2] * 1000 + 1,
    }  # fmt: skip
    tables.append(judged.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, [taken_back]), "amend", 1)
    return judged.home


def _moment(at_s: float, *, then: bool = False) -> time_travel.Moment:
    at_ms = START + int(at_s * 1000)
    return time_travel.Moment(at_ms, at_ms) if then else time_travel.Moment(at_ms)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return _home(tmp_path_factory.mktemp("past") / "home")


@pytest.fixture(scope="module")
def client(home: Home) -> Iterator[Client]:
    with served(home) as client:
        yield client


def _address(at_s: float, **parameters: Any) -> str:
    return f"/past{query_of({'at': START + int(at_s * 1000), **parameters})}"


def _tiles(text: str) -> dict[str, int]:
    tiles = re.findall(r'<span class="mode">.*?</svg>(\w+)</span><span class="figure">([\d,]+)</span>', text, re.DOTALL)
    return {mode: int(n) for mode, n in tiles}


def _walked(client: Client, address: str) -> dict[str, str]:
    """Return the modes of all devices on the pages of a list, by id."""
    found = dict[str, str]()
    while address:
        text = client.get(address).text
        rows = re.findall(r'<tr data-row>.*?<bdi>(.*?)</bdi>.*?<span class="mode"[^>]*>.*?</svg>(\w+)</span>', text, re.DOTALL)
        assert rows and not found.keys() & dict(rows).keys()
        found |= dict(rows)
        following = re.findall(r'<a href="([^"]*)" rel="next"', text)
        address = unescape(following[0]) if following else ""
    return found


@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("at_s", [50, 10_000, HALF_DAY_S, 80_000])
def test_the_fleet_at_an_instant_is_that_of_rewind(client: Client, home: Home, at_s: float, then: bool) -> None:
    wanted = {one["device_id"]: one["mode"] for one in time_travel.fleet(home, _moment(at_s, then=then))}
    address = _address(at_s, known="then" if then else None)
    assert _tiles(client.get(address).text) == Counter(wanted.values())
    assert not wanted or _walked(client, address) == wanted


def test_what_was_known_then_differs_from_what_is_known_now(client: Client) -> None:
    now, then = (_tiles(client.get(_address(80_000, known=known)).text) for known in ("now", "then"))
    assert (now, then) == ({"online": 1, "offline": DEVICES - 1}, {"online": 20, "offline": 40})


def test_filters_and_instant_are_in_the_address(client: Client) -> None:
    text = client.get(_address(80_000, mode="offline", q="PUMP-1")).text
    assert re.findall(r'id="count"><b class="figure">(\d+)</b> of 60 match', text) == ["10"], "pump-10 to pump-19"
    links = [unescape(one) for one in re.findall(r'href="(/past[^"]*)"', text)]
    assert links and all("at=" in one for one in links)
    assert f"/past?at={START + 80_000_000}&q=PUMP-1" in links, "a filter can be removed"
    assert "No device matches" in client.get(_address(80_000, mode="flagged")).text


def test_the_field_of_the_form_is_in_utc(client: Client) -> None:
    at = format_instant(START + 80_000_000)
    whole_seconds = at.removesuffix(".000Z")
    text = client.get(f"/past?at={whole_seconds}&known=now").text
    assert f'<time datetime="{at}"' in text and f'value="{whole_seconds}"' in text
    assert _tiles(client.get(f"/past?at={whole_seconds[:-3]}").text), "a browser leaves out seconds that are zero"


def test_the_life_of_a_device_up_to_an_instant_is_that_of_rewind(client: Client, home: Home) -> None:
    for at_s, then in ((80_000, False), (80_000, True), (50, False)):
        spans = time_travel.life(
            home, "pump-00", moment_of(home, START + at_s * 1000, START + at_s * 1000 if then else END_OF_TIME_MS)
        )
        text = client.get(device_path("pump-00", "past", at=START + at_s * 1000, known="then" if then else "now")).text
        rows = re.findall(r"<tr data-row>.*?</tr>", text, re.DOTALL)
        shown = [
            re.findall(r'datetime="([^"]*)".*?<span class="mode"[^>]*>.*?</svg>(\w+)</span>', one, re.DOTALL)[0] for one in rows
        ]
        assert shown == [(format_instant(one["since_ms"]), one["mode"]) for one in reversed(spans)]
    assert "Life up to then" in text and "no mode" not in text


def test_an_instant_that_is_not_judged_is_named(client: Client) -> None:
    assert "later events are not included" in client.get(_address(80_000, known="then")).text
    assert "later events are not included" not in client.get(_address(80_000)).text


def test_links_to_later_instants_end_at_the_frontier(client: Client) -> None:
    early, late = client.get(_address(10_000)).text, client.get("/past").text
    assert "+1 h" in early and "−1 h" in early  # noqa: RUF001 - a minus
    assert "+1 min" not in late and "−1 min" in late  # noqa: RUF001 - a minus


def test_a_slider_has_the_minutes_of_the_history(client: Client) -> None:
    address = _address(80_000, known="then", mode="offline")
    page = Page.of(client.get(address).text)
    [slider] = page.all("input", type="range")
    first_ms, last_ms = int(slider["min"] or 0), int(slider["max"] or 0)
    assert slider["name"] == "at" and slider["value"] == str(START + 80_000_000)
    assert START <= first_ms < START + 60_000 and first_ms % 60_000 == last_ms % 60_000 == 0
    assert START + HALF_DAY_S * 1000 < last_ms <= START + BATCHES_S[2] * 1000
    assert page.all("label", **{"for": slider["id"] or ""}), "for readers of the screen"
    assert slider["aria-valuetext"] == format_instant(START + 80_000_000)
    kept = {(one["name"], one["value"]) for one in page.all("input", type="hidden")}
    assert {("known", "then"), ("mode", "offline")} <= kept, "the form has the knowledge and the filters"
    for instant_ms in (first_ms, last_ms):
        assert client.get(f"/past?at={instant_ms}").status == 200, "without JavaScript, the value is sent as it is"
    assert Page.of(client.get(device_path("pump-00", "past")).text).all("input", type="range")


def test_the_begin_of_the_history_is_read_once_for_a_page(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    read, began_ms = list[Home](), moments.began_ms
    own = Home(home.path)  # the server that other tests share may read at the same time, shortly before its value expires
    monkeypatch.setattr(past, "SLOW_S", 3_600.0)
    for module in (moments, past):
        monkeypatch.setattr(module, "began_ms", lambda home: read.append(home) or began_ms(home))
    with served(own) as fresh:
        for address in ("/past", device_path("pump-00", "past")):
            assert Page.of(fresh.get(address).text).all("input", type="range"), address
    assert len([one for one in read if one is own]) == 1


def test_a_history_of_less_than_a_minute_has_no_slider(tmp_path: Path) -> None:
    judged = JudgedHome(empty(tmp_path / "home", Deployment(10_000)))
    judged.land_and_judge(signal(10, "pump"), tick(30))
    with served(judged.home) as brief:
        assert not Page.of(brief.get("/past").text).all("input", type="range")


def test_instants_beyond_the_history_are_refused(client: Client, tmp_path: Path) -> None:
    for address in (_address(-1), "/past?at=2999-01-01T00:00:00Z", "/past?at=noon", "/past?known=later"):
        assert client.get(address).status == 400, address
    assert client.get("/devices/nobody/past").status == 404
    with served(empty(tmp_path / "home", Deployment(10_000))) as without_history:
        assert without_history.get("/past").status == 404


def test_a_page_of_the_fleet_begins_after_a_device(home: Home) -> None:
    found = fleet_page(home, _moment(80_000), "mode = ?", ["offline"], after="pump-56", limit=2)
    assert (found.count, [one["device_id"] for one in found.rows]) == (59, ["pump-57", "pump-58"])
