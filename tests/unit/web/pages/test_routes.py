"""Operations page: numbers, filters, escaping, links and errors, over a home that the definition judged."""

import base64
import csv
import io
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from fleetpulse.core.lifecycle import TROUBLE
from fleetpulse.core.replay import Deployment
from fleetpulse.core.times import DAY_MS, HOUR_MS, format_instant
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.reports import judgements as reports
from fleetpulse.reports.present import devices as present
from fleetpulse.reports.why import why
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.pages import devices, fleet
from fleetpulse.web.pages.charts import IN_SERVICE
from fleetpulse.web.pages.rendering import NAVIGATION, device_path
from fleetpulse.web.queries import EVERYTHING
from tests.support.asgi import Client
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import empty, land
from tests.support.homes.served import ServedHome
from tests.support.homes.shown import HOSTILE, seem_running, shown_home
from tests.support.homes.streams import add_commands, add_sessions, add_streams
from tests.support.page_client import Page, served

pytestmark = pytest.mark.unit
FRONTIER_MS = START + 30 * DAY_MS - 60_000
PAGES = (
    "/", "/?sites=all", "/?by=count", "/devices", "/devices?mode=offline&site=harbour", "/devices?q=zzz", "/changes",
    "/changes?last=1440", "/changes?last=15&trigger=errors", "/help", "/devices/pump-1006",
    "/devices/pump-1006?why=1&facts=1&span=all", "/devices/pump-1006/why", "/devices/pump-1006/facts",
    "/devices/pump-1006/messages", "/devices/pump-1006/past", "/past", "/past?known=then&mode=offline",
    "/devices/nobody", "/nothing", "/devices/pump-1006/streams", "/devices/pump-1006?streams=1", "/stream/sessions",
    "/stream/commands", "/stream/commands?status=pending", "/stream/vitals?device=pump-1006", "/stream/rollouts",
    "/stream/rollouts/bad-3",
)  # fmt: skip
FILTERS = {"mode": "mode", "site": "site", "class": "device_class", "gateway": "gateway"}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Return the home of the pages."""
    home = shown_home(tmp_path_factory.mktemp("shown") / "home")
    add_streams(home, "pump-1006", FRONTIER_MS)
    for device_id in HOSTILE:
        add_commands(home, device_id, FRONTIER_MS - 1)
        add_sessions(home, device_id, FRONTIER_MS - 1)
    return home


@pytest.fixture(scope="module")
def client(shown: Home) -> Iterator[Client]:
    with served(shown) as client:
        yield client


@pytest.fixture(scope="module")
def listed(shown: Home) -> list[dict[str, Any]]:
    """Return the devices as the command line lists them."""
    return present.devices(shown, FRONTIER_MS)


def _figures(text: str) -> dict[str, int]:
    tiles = re.findall(r'href="/devices\?mode=(\w+)".*?<span class="figure">([\d,]+)</span>', text, re.DOTALL)
    return {mode: int(n.replace(",", "")) for mode, n in tiles}


def _count(text: str) -> int:
    [found] = re.findall(r'<p class="count"[^>]*><b class="figure">([\d,]+)</b>', text)
    return int(found.replace(",", ""))


def _ids(text: str) -> list[str]:
    return [unescape(one) for one in re.findall(r'<a class="device"[^>]*><bdi>(.*?)</bdi>', text)]


def _next(text: str, rel: str = "next") -> str | None:
    found = re.findall(rf'<a href="([^"]*)" rel="{rel}"', text)
    return unescape(found[0]) if found else None


def test_counts_are_those_of_the_api_and_of_the_command_line(client: Client, shown: Home) -> None:
    figures = _figures(client.get("/").text)
    assert figures == client.get("/api/v1/fleet").json()["devices"]
    assert figures == {str(mode): n for mode, n in present.counts(shown, FRONTIER_MS)["devices"].items()}
    assert len(figures) >= 8 and figures["unreachable"] > 5


def test_the_list_has_the_devices_of_the_api(client: Client, listed: list[dict[str, Any]]) -> None:
    found = client.get("/api/v1/devices").json()
    text = client.get("/devices").text
    assert _ids(text) == [one["device_id"] for one in found["devices"]]
    assert _count(text) == found["count"] == len(listed)


@pytest.mark.parametrize("by", ["share", "count"])
def test_the_sites_are_those_of_the_api_trouble_first(client: Client, by: str) -> None:
    sites = client.get("/api/v1/fleet/sites?limit=1000").json()["sites"]
    found = list[tuple[str, int, int]]()
    text = client.get(f"/?sites=all&by={by}").text.partition('aria-label="Sites"')[2]
    for row in re.findall(r"<tr data-row>.*?</tr>", text, re.DOTALL):
        name, served, bar = (
            re.findall(pattern, row)[0]
            for pattern in (r"<bdi>(.*?)</bdi>", r'<td class="num">([\d,]+)</td>', r'role="img" aria-label="(.*?)"')
        )
        numbers = dict(one.rsplit(" ", 1) for one in bar.split(", "))
        assert numbers.keys() <= set(IN_SERVICE) and sum(map(int, numbers.values())) == int(served), (
            "the bar has devices in service"
        )
        found.append((unescape(name), int(served), sum(int(numbers.get(mode, 0)) for mode in TROUBLE)))
    served_of = {one["name"]: sum(one["modes"].get(mode, 0) for mode in IN_SERVICE) for one in sites}
    wanted = [(one["name"], served_of[one["name"]], one["trouble"]) for one in sites]
    if by == "share":
        wanted.sort(key=lambda one: (-one[2] / max(1, one[1]), -one[2], one[0]))
    else:
        wanted.sort(key=lambda one: (-one[2], one[0]))
    assert found == wanted and len(found) > 2


@pytest.mark.parametrize("name", FILTERS)
def test_each_facet_counts_the_devices_that_its_link_lists(client: Client, listed: list[dict[str, Any]], name: str) -> None:
    values = Counter(one[FILTERS[name]] for one in listed if one[FILTERS[name]])
    text = client.get("/devices").text
    links = re.findall(rf'<li><a href="(/devices\?{name}=[^"]*)".*?<span class="n">([\d,]+)</span>', text)
    assert {int(n) for _, n in links} <= set(values.values()) and len(links) == min(8, len(values))
    for link, n in links:
        chosen = client.get(unescape(link)).text
        assert _count(chosen) == int(n)
        assert f"{name}: <b>" in chosen, "the filter is a word that can be removed"


def test_text_within_the_id_is_searched_without_case(client: Client, listed: list[dict[str, Any]]) -> None:
    assert _count(client.get("/devices?q=PUMP-1&limit=7").text) == sum("pump-1" in one["device_id"] for one in listed)
    assert "No device matches" in client.get("/devices?q=zzz").text
    assert _count(client.get("/devices?never_seen=true").text) == sum(one["never_seen"] for one in listed) == 1


@pytest.mark.parametrize("sort", ["-since", "since", "device", "-device", "site", "-mode", "class"])
def test_older_and_newer_pages_have_each_device_once(client: Client, listed: list[dict[str, Any]], sort: str) -> None:
    address: str | None = f"/devices?limit=50&sort={sort}"
    pages = list[list[str]]()
    last = ""
    while address:
        last = client.get(address).text
        pages.append(_ids(last))
        address = _next(last)
    assert sorted(one for page in pages for one in page) == sorted(one["device_id"] for one in listed)
    assert [len(page) for page in pages[:-1]] == [50, 50]
    back = client.get(_next(last, "prev") or "").text
    assert _ids(back) == pages[1]
    first = client.get(_next(back, "prev") or "").text
    assert (_ids(first), _next(first, "prev")) == (pages[0], None)


@pytest.mark.parametrize("device_id", HOSTILE)
def test_any_text_is_an_id_that_is_escaped_and_reachable(client: Client, device_id: str) -> None:
    listing = client.get("/devices?site=mill").text
    [link] = [
        unescape(one)
        for one in re.findall(r'<a class="device" href="([^"]*)"', listing)
        if unescape(one) == device_path(device_id)
    ]
    assert not re.search(r"[<>\"' ]|/\.\.?(/|$)", link)
    for address in (link, device_path(device_id, "why"), device_path(device_id, "facts"), device_path(device_id, at=FRONTIER_MS)):
        answer = client.get(address)
        assert answer.status == 200, address
        page = Page.of(answer.text)
        assert all("src" in one for one in page.all("script"))
        assert all(one.get("hx-get") != "/x" for _, one in page.elements)
    text = client.get(link).text
    assert f'<h1 id="h-device"><bdi>{device_id}</bdi>' in unescape(text) and ("<" not in device_id or device_id not in text)


@pytest.mark.parametrize("address", PAGES)
def test_no_page_has_inline_scripts_or_styles(client: Client, address: str) -> None:
    page = Page.of(client.get(address).text)
    assert all(set(one) == {"src", "defer"} for one in page.all("script"))
    assert not page.all("style")
    for name, attributes in page.elements:
        assert "style" not in attributes, name
        assert not [one for one in attributes if one.startswith("on") or "hx-on" in one], name
        assert "[" not in (attributes.get("hx-trigger") or ""), "a filter of a trigger is evaluated as a script"
        assert not any("js:" in (value or "") for one, value in attributes.items() if one.startswith("hx-"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_every_link_of_every_page_leads_somewhere(client: Client) -> None:
    links = dict[str, str]()  # one address of each kind: path without ids, and names of the parameters
    for address in PAGES:
        found = Page.of(client.get(address).text).links
        assert all(one.startswith("/") for one in found), "no address is beyond the origin"
        for link in found:
            place = link.partition("#")[0]
            links[re.sub(r"=[^&]*", "", re.sub(r"/devices/[^/?]+", "/devices/X", place))] = place
    assert {"/changes.csv?last&trigger", "/api/v1/devices.csv", "/devices/X?at&to", "/devices?after"} <= {*links}
    assert [(place, status) for place in links.values() if (status := client.get(place).status) != 200] == []


def test_a_page_is_small(client: Client) -> None:
    import gzip

    sizes = {address: len(gzip.compress(client.get(address).content)) for address in PAGES}
    assert max(sizes.values()) < 60_000, sizes


def test_the_modes_of_the_last_day_follow_from_the_transitions(client: Client, shown: Home) -> None:
    live = client.app.state.live
    counts = {row["mode"]: row["n"] for row in live.query("SELECT mode, count(*) AS n FROM live.devices GROUP BY mode")}
    found, changed = fleet._modes_over_time(live, counts, FRONTIER_MS)
    history = [
        (round(one["event_time"].timestamp() * 1000), one["device_id"], one["to_mode"]) for one in reports.transitions(shown)
    ]
    for edge in (0, 40, 70, 92, 96):
        at_ms = FRONTIER_MS - DAY_MS + edge * DAY_MS // 96
        modes = {device_id: mode for since_ms, device_id, mode in history if since_ms <= at_ms}
        expected = Counter(modes.values())
        assert {mode: values[edge] for mode, values in found.items()} == {mode: expected[mode] for mode in found}
    assert changed["unreachable"] == found["unreachable"][-1] - found["unreachable"][-5] != 0


def test_changes_are_grouped_and_listed(client: Client, shown: Home) -> None:
    text = client.get("/changes").text
    recent = [one for one in reports.transitions(shown) if one["event_time"].timestamp() * 1000 > FRONTIER_MS - HOUR_MS]
    assert _count(text) == len(recent)
    groups = Counter((one["site"], one["from_mode"], one["to_mode"], one["trigger"]) for one in recent)
    shown_ = re.findall(r'<a class="figure" href="([^"]*)#h-list">([\d,]+)</a>', text)
    assert sorted(int(n) for _, n in shown_) == sorted(groups.values())
    for link, n in shown_[:4]:
        assert _count(client.get(unescape(link)).text) == int(n)
    assert _ids(text) == [one["device_id"] for one in sorted(recent, key=lambda one: one["device_id"])] or len(_ids(text)) == len(
        recent
    )


def test_a_group_of_changes_counts_each_of_its_devices_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    live: LiveFleet = client.app.state.live
    changes = [(site, "online", to, "silence", device, at) for at, site, to, device in (
        (1, None, "offline", "d1"), (2, None, "offline", "d1"), (3, None, "offline", "d2"), (4, "hall", "offline", "d3"),
        (5, "hall", "offline", "d3"), (6, "hall", "degraded", "d3"),
    )]  # fmt: skip
    with live.reading() as cursor:  # an attached database is open in all cursors
        cursor.execute("ATTACH IF NOT EXISTS ':memory:' AS held")
        columns = 'site, from_mode, to_mode, "trigger", device_id, event_ms'
        cursor.execute("CREATE TABLE held.changes AS FROM live.changes LIMIT 0")
        cursor.executemany(f"INSERT INTO held.changes ({columns}) VALUES (?, ?, ?, ?, ?, ?)", changes)
    query = live.query
    monkeypatch.setattr(live, "query", lambda sql, values=(): query(sql.replace("live.changes", "held.changes"), values))
    total, groups, _ = fleet._summary(live, EVERYTHING, None)
    assert total == len(changes)
    assert [(one["site"], one["to_mode"], one["n"], one["devices"], one["newest_ms"]) for one in groups] == [
        (None, "offline", 3, 2, 3),
        ("hall", "offline", 2, 1, 5),
        ("hall", "degraded", 1, 1, 6),
    ]


def test_changes_of_a_day_are_on_pages_and_in_a_file(client: Client) -> None:
    rows = list(csv.DictReader(io.StringIO(client.get("/changes.csv?last=1440").text)))
    address: str | None = "/changes?last=1440"
    listed = list[str]()
    while address:
        text = client.get(address).text
        listed += _ids(text)
        address = _next(text)
    assert listed == [one["device_id"].removeprefix("'") for one in rows]
    assert len(listed) == _count(client.get("/changes?last=1440").text) > 30


def test_changes_are_summed_once_for_a_version_and_few_are_laid_out(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    summed, summary = list[bool](), fleet._summary
    monkeypatch.setattr(fleet, "_summary", lambda *given: summed.append(True) or summary(*given))
    first, second = (client.get("/changes?last=1440&until=4102444800000").text for _ in range(2))
    assert summed == [True] and _count(first) == _count(second)
    assert first.count("<tr data-row>") <= 70, "a browser lays out all of them before it paints"


def test_a_copied_link_of_changes_has_instants(client: Client) -> None:
    text = client.get("/changes?last=60&site=harbour").text
    [link] = re.findall(r'data-copy="([^"]*)"', text)
    assert f"since={quote(format_instant(FRONTIER_MS - HOUR_MS), safe='')}" in link and "last" not in link
    assert _count(client.get(unescape(link)).text) == _count(text) > 0


def test_a_gap_in_coverage_is_drawn_and_listed(client: Client) -> None:
    for address in ("/", "/changes?last=1440", "/devices/pump-1000"):
        text = client.get(address).text
        assert 'class="gap" x=' in text, address
    assert "1 coverage gap" in client.get("/").text
    assert "1 coverage gap" not in client.get("/changes?last=15").text


def test_the_explanation_is_that_of_the_report(client: Client, shown: Home) -> None:
    found = why(shown, "pump-1006", judged_ms(shown.checkpoint))
    text = " ".join(Page.of(client.get("/devices/pump-1006?why=1").text).texts)
    assert found["sentence"][1:] in text and found["otherwise"] in text
    assert f"{found['rule']['key']} = {found['rule']['value']}" in text
    for row in found["evidence"]:
        assert row["role"] in text
    assert "pump-1006" in text and found["rule"]["policy_version"] in text
    earlier = client.get(f"/devices/pump-1006?at={found['since_ms'] - 1}").text
    assert "Why online since" in " ".join(Page.of(earlier).texts)
    assert "had no mode at" in client.get("/devices/pump-1006?at=1").text


def test_an_address_names_one_of_several_transitions_at_an_instant(
    client: Client, shown: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = why(shown, "pump-1006", judged_ms(shown.checkpoint))
    asked = list[str | None]()

    def recorded(home: Home, device_id: str, judged: int | None, at_ms: int | None, to_mode: str | None) -> dict[str, Any]:
        asked.append(to_mode)
        return why(home, device_id, judged, at_ms, to_mode)

    monkeypatch.setattr(devices, "explained", recorded)
    for part in ("", "/why"):
        for to, chosen in ((found["mode"], 1), ("online", 0)):
            text = client.get(f"/devices/pump-1006{part}?at={found['since_ms']}&to={to}&span=all").text
            assert asked.pop() == to and (part or text.count('class="chosen"') == chosen)


def test_the_timeline_has_each_transition(client: Client, shown: Home) -> None:
    changes = reports.transitions(shown, "pump-1006")
    text = client.get("/devices/pump-1006?span=all").text
    instants = [format_instant(round(one["event_time"].timestamp() * 1000)) for one in changes]
    timeline = text[text.index('id="h-timeline"') : text.index('id="why"')]
    for instant in instants:
        assert f"at {instant}</span>" in timeline
    assert re.findall(r'<rect class="f-(\w+)"', timeline) == [changes[0]["from_mode"], *(one["to_mode"] for one in changes)]


def test_the_life_of_a_device_has_its_errors_and_registry(client: Client) -> None:
    text = client.get("/devices/camera-1011?facts=1").text
    assert text.count("<code>overheat</code>") == 4
    assert "Registry" in text and "life since" in text
    assert "Life" in client.get("/devices/camera-1011/facts").text


def test_an_unknown_device_is_not_found(client: Client) -> None:
    answer = client.get("/devices/nobody")
    assert (answer.status, "device-unknown" in answer.text) == (404, True)
    assert client.get("/devices/nobody/facts").status == client.get("/devices/nobody/why").status == 404
    assert client.get("/devices/pump-1006/else").status == 404


def cursor(text: str) -> str:
    """Return a text as the parameter ``after``."""
    return base64.urlsafe_b64encode(text.encode()).decode()


FORGED = [cursor(f'[1, "a", 1, 2, {2**200}]'), cursor(r'[1, "\ud800", 1, 2, 3]'), cursor("[" * 2_900)]


@pytest.mark.parametrize(
    "address",
    ["/devices?sort=x", "/devices?after=x", "/devices?mode=x", f"/devices?q={'x' * 300}", "/changes?after=eDE=",
     "/changes?last=0", "/devices?before=W10=", "/changes?after=WzEsICJhIiwgMV0=",
     "/changes?after=WzEsICJcdWQ4MDAiLCAwLCAwLCAwXQ==", *(f"/changes?after={one}" for one in FORGED)],
)  # fmt: skip
def test_an_invalid_parameter_is_refused(client: Client, address: str) -> None:
    answer = client.get(address)
    assert (answer.status, "parameter-invalid" in answer.text) == (400, True)
    assert answer.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("instant", ["253402300799999", "9999-12-31T23:59:59.999Z", "0", "1970-01-01T00:00:00Z"])
def test_instants_at_the_ends_of_time_have_a_page(client: Client, instant: str) -> None:
    for address in (f"/changes?since={instant}", f"/changes?until={instant}", f"/devices/pump-1006?at={instant}"):
        assert client.get(address).status == 200, address


def test_an_explanation_of_an_instant_that_no_table_has_is_refused(client: Client) -> None:
    answer = client.get("/devices/pump-1006/why?at=0001-01-01T00:00:00%2B14:00")
    assert (answer.status, "years 1970 to 9999" in answer.text) == (200, True)


def test_errors_are_pages_for_people_and_json_for_programs(client: Client, shown: Home) -> None:
    assert "<h1>Not found</h1>" in client.get("/nothing").text
    assert client.get("/api/v1/nothing").code == "not-found"
    assert client.get(f"/devices?q={'x' * 10_000}").status == 414
    with served(shown, user=None) as nobody:
        answer = nobody.get("/")
        assert (answer.status, "<h1>Log in</h1>" in answer.text) == (401, True)
        assert "judged up to" not in answer.text and "<nav" not in answer.text


def test_a_device_that_a_load_adds_is_counted(tmp_path: Path) -> None:
    """A load may have further devices and other clocks in the same version of the tables."""
    made = ServedHome(tmp_path / "home")
    made.batch(signal(10, "known"), tick(20))
    with served(made.home) as client:
        live = client.app.state.live  # type: ignore[attr-defined]
        assert '<b class="figure">1</b> device<' in client.get("/devices").text
        live.stop()
        land(made.home, [signal(30, "heard")], 9)
        live.mirror._loaded_s = 0.0
        live.mirror.refresh(wall_clock_ms())
        text = client.get("/devices").text
        assert "/devices/heard" in text and '<b class="figure">2</b> devices<' in text


def test_an_empty_home_has_pages(tmp_path: Path) -> None:
    with served(empty(tmp_path / "home", Deployment(60_000))) as client:
        for address, text in (("/", "No device yet"), ("/devices", "No device yet"), ("/changes", "No change in this range")):
            answer = client.get(address)
            assert (answer.status, text in answer.text, "nothing judged yet" in answer.text) == (200, True, True), address


def test_the_header_says_how_fresh_the_facts_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = round(time.time() * 1000)
    home = shown_home(tmp_path / "home", now_ms, hours=3)

    def state() -> str:
        [found] = re.findall(r'id="fresh"[^>]* data-state="(\w+)"', client.get("/fragments/freshness").text)
        return found

    with served(home) as client:
        assert state() == "stopped"
        seem_running(home)
        assert state() == "live"
        monkeypatch.setattr("fleetpulse.web.pages.rendering.wall_clock_ms", lambda: now_ms + HOUR_MS // 2)
        assert state() == "behind"
        os.utime(home.run("lifecycle"), (now_ms / 1000 - 60, now_ms / 1000 - 60))
        monkeypatch.setattr("fleetpulse.web.pages.rendering.in_use", lambda _home: True)
        assert state() == "stale"
        text = client.get("/").text
        assert '<html lang="en" data-state="stale">' in text and "does not report" in text


def test_the_navigation_marks_the_page(client: Client) -> None:
    for name, path in NAVIGATION[:3]:
        page = Page.of(client.get(path).text)
        [current] = page.all("a", **{"aria-current": "page"})
        assert (current["href"], name in page.texts) == (path, True)
