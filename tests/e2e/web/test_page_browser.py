"""Operations page in Chromium: accessibility, content security policy, phone width, keys, search, and no JavaScript.

`FLEET_PICTURES` names a folder for new pictures of the documentation.
"""

import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import expect
from starlette.requests import Request

from fleetpulse.core.streams.names import StreamName
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.ports import free_port
from fleetpulse.web.actions import Starter
from fleetpulse.web.app import create_app
from tests.support.browser import NEEDS_CHROMIUM, Site, Watched, browsing, require_fit
from tests.support.homes.shown import seem_running, shown_home
from tests.support.homes.streams import STOPPED, add_commands, add_sessions, add_streams

PICTURES = os.environ.get("FLEET_PICTURES")
PAGES = {
    "fleet": "/",
    "devices": "/devices?mode=offline",
    "device": "/devices/pump-1006?why=1&facts=1",
    "messages": "/devices/pump-1006/messages",
    "past of a device": "/devices/pump-1006/past",
    "past": "/past?known=then",
    "changes": "/changes?last=1440",
    "stream": "/stream",
    "sessions": "/stream/sessions",
    "vitals": "/stream/vitals?device=pump-1006&metric=battery",
    "commands": "/stream/commands?last=all",
    "rollouts": "/stream/rollouts",
    "rollout": "/stream/rollouts/bad-3",
    "device-streams": "/devices/pump-1006?streams=1",
}
_SHORT = ("fleet", "devices", "device", "past", "commands")  # pages with each kind of part
PICTURED = {  # name of a picture -> address, and height; the address of the past is that of a link
    "fleet": ("/", 800), "devices": ("/devices?mode=offline", 690), "device": ("/devices/pump-1006?why=1&facts=1", 800),
    "changes": ("/changes?last=1440", 800), "past": ("", 640), "sessions": ("/stream/sessions", 750),
    "vitals": ("/stream/vitals?device=pump-1006&metric=battery", 705), "commands": ("/stream/commands?last=all", 475),
    "rollout": ("/stream/rollouts/bad-3", 590),
}  # fmt: skip
pytestmark = [pytest.mark.e2e, NEEDS_CHROMIUM]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Serve a home whose newest message is of this minute."""
    home = shown_home(tmp_path_factory.mktemp("site") / "home", round(time.time() * 1000) - 5_000)
    seem_running(home)
    add_streams(home, "pump-1006", round(time.time() * 1000) - 60_000)
    add_commands(home, "<script>alert(1)</script>", round(time.time() * 1000) - 60_000)
    with _served(home) as url, browsing(url, home) as site:
        yield site


@contextmanager
def _served(home: Home, starter: Starter | None = None) -> Iterator[str]:
    """Serve a home in a thread; yield the address."""
    port = free_port("127.0.0.1", 0, RuntimeError)
    config = uvicorn.Config(
        create_app(home, hosts=("127.0.0.1",), starter=starter), host="127.0.0.1", port=port, log_level="warning"
    )
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, daemon=True)

    thread.start()
    limit = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < limit and thread.is_alive(), "the server does not start"
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.mark.parametrize(
    ("scheme", "width", "names"),
    [
        ("light", 1280, PAGES),
        ("dark", 360, _SHORT),
        *(pytest.param(*one, PAGES, marks=pytest.mark.extended) for one in (("dark", 360), ("light", 360), ("dark", 1280))),
    ],
)
def test_each_page_is_accessible_and_obeys_the_policy(site: Site, scheme: Any, width: int, names: Iterable[str]) -> None:
    with site.context(color_scheme=scheme, viewport={"width": width, "height": 800}) as context:
        watched = Watched(context.new_page(), site.url)
        page = watched.page
        for name in names:
            page.goto(PAGES[name])
            page.locator("#zone").wait_for()  # scripts have run
            require_fit(watched, name)


@pytest.mark.skipif(PICTURES is None, reason="FLEET_PICTURES does not name a folder")
def test_pictures_for_the_documentation_are_taken(site: Site, tmp_path: Path) -> None:
    now_ms = round(time.time() * 1000)
    home = shown_home(tmp_path / "home", now_ms - 5_000)
    seem_running(home, *StreamName)
    add_streams(home, "pump-1006", now_ms - 60_000, markup=False)
    add_sessions(home, "pump-1010", now_ms - 120_000)
    viewport: Any = {"width": 1280, "height": 800}
    with _served(home) as url, Site(url, home, site.browser).context(viewport=viewport) as context:
        page = context.new_page()
        page.goto("/past")
        earlier = page.locator(".steps a", has_text="−1 h").get_attribute("href")  # noqa: RUF001 - a minus
        for name, (address, height) in PICTURED.items():
            page.goto(address or earlier or "")
            page.locator("#zone").wait_for()
            clip: Any = {"x": 0, "y": 0, "width": 1280, "height": height}
            page.screenshot(path=Path(PICTURES or "") / f"page-{name}.png", clip=clip)


def test_pages_work_without_javascript(site: Site) -> None:
    with site.context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto("/")
        page.get_by_role("link", name="unreachable").first.click()
        expect(page).to_have_url(f"{site.url}/devices?mode=unreachable")
        page.get_by_label("Text within the id").fill("pump-1006")
        page.get_by_role("button", name="Search").click()
        expect(page).to_have_url(f"{site.url}/devices?q=pump-1006&mode=unreachable")
        page.locator("a.device").click()
        page.get_by_role("link", name="Explain it").click()
        expect(page.locator("#why .sentence")).to_contain_text("gw-harbour-1 died")
        page.get_by_role("link", name="Read its life").click()
        expect(page.locator("#facts")).to_contain_text("life since")
        assert page.locator("button:visible").count() == 0, "no control that does nothing"


def test_commands_are_filtered_without_javascript_and_lead_to_the_device(site: Site) -> None:
    with site.context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto("/")
        page.get_by_role("link", name="Streams", exact=True).click()
        page.get_by_role("link", name="Commands", exact=True).click()
        page.get_by_label("Id of a device").fill("pump-1006")
        page.get_by_label("status", exact=True).select_option("rejected")
        page.get_by_role("button", name="Show").click()
        expect(page).to_have_url(f"{site.url}/stream/commands?device=pump-1006&status=rejected")
        expect(page.locator("tr[data-row]")).to_have_count(1)
        page.locator("a.device").click()
        page.get_by_role("link", name="Read its sessions").click()
        expect(page.locator("#beside")).to_contain_text("difference")


@pytest.mark.parametrize("name", ["rollouts", "rollout"])
def test_the_arithmetic_of_a_rollout_is_shown_beside_the_long_name_of_its_run(site: Site, name: str) -> None:
    with site.context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        page.goto(PAGES[name])
        page.locator("td", has_text=STOPPED).wait_for()
        assert page.locator(".table").evaluate("one => one.scrollWidth <= one.clientWidth")


def test_parts_of_a_device_are_loaded_afterwards(site: Site) -> None:
    with site.context() as context:
        watched = Watched(context.new_page(), site.url)
        watched.page.goto("/devices/pump-1006")
        expect(watched.page.locator("#beside")).to_contain_text("All sessions of the device")
        expect(watched.page.locator("#why .sentence")).to_contain_text("gw-harbour-1 died")
        expect(watched.page.locator("#facts")).to_contain_text("life since")
        assert watched.faults == []


def test_search_as_you_type_keeps_the_filter_in_the_address(site: Site) -> None:
    with site.context() as context:
        watched = Watched(context.new_page(), site.url)
        page = watched.page
        page.goto("/devices?site=harbour")
        page.get_by_label("Text within the id").press_sequentially("pump-1006", delay=20)
        expect(page.locator("a.device")).to_have_count(1)
        expect(page).to_have_url(f"{site.url}/devices?q=pump-1006&site=harbour")
        expect(page.locator("#count")).to_contain_text("1 of")
        page.reload()
        expect(page.locator("a.device")).to_have_count(1)
        expect(page.get_by_label("Text within the id")).to_have_value("pump-1006")
        page.locator("a.device").click()
        page.locator("h1").wait_for()
        page.go_back()
        expect(page.locator("a.device")).to_have_count(1)
        expect(page).to_have_url(f"{site.url}/devices?q=pump-1006&site=harbour")
        assert watched.faults == []


def test_the_slider_of_the_past_moves_by_keys_and_works_without_javascript(site: Site) -> None:
    with site.context() as context:
        watched = Watched(context.new_page(), site.url)
        page = watched.page
        page.goto("/past?known=then")
        slider, shown = page.locator("#slide"), page.locator("#slid")
        before = shown.inner_text()
        slider.focus()
        page.keyboard.press("PageDown")
        expect(shown).not_to_have_text(before)
        page.wait_for_url("**/past?*at=*")
        chosen = slider.input_value()
        assert f"at={chosen}" in page.url and "known=then" in page.url
        expect(page.locator("#at")).to_have_value(re.compile(r"^20"))
        expect(slider).to_be_focused()
        assert watched.faults == []
    with site.context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto("/past")
        page.locator("#slide").focus()
        page.keyboard.press("Home")
        page.get_by_role("button", name="Go").click()
        page.wait_for_url("**/past?*at=*")


def test_keys_go_search_choose_and_switch_the_zone(site: Site) -> None:
    with site.context(timezone_id="Asia/Tokyo") as context:
        watched = Watched(context.new_page(), site.url)
        page = watched.page
        page.goto("/")
        page.locator("#zone").wait_for()
        page.keyboard.press("g")
        page.keyboard.press("d")
        expect(page).to_have_url(f"{site.url}/devices")
        shown = page.locator("tbody time").first
        before = shown.inner_text()
        page.keyboard.press("z")
        expect(shown).not_to_have_text(before)
        assert shown.get_attribute("datetime") == shown.get_attribute("title"), "UTC is at hand"
        page.keyboard.press("/")
        page.keyboard.type("gdz")
        expect(page.get_by_label("Text within the id")).to_have_value("gdz")
        expect(page).to_have_url(f"{site.url}/devices?q=gdz")
        page.goto("/devices?mode=offline")
        page.locator("#zone").wait_for()
        expect(page.locator("#zone")).to_have_text("local")
        page.keyboard.press("j")
        page.keyboard.press("j")
        chosen = page.locator("tr.chosen a.device")
        name = chosen.inner_text()
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_have_text(name)
        assert watched.faults == []


class _Airflow:
    """Airflow at the root of the server, in which everybody may start every DAG."""

    def base(self, request: Request) -> str:
        del request
        return ""

    def startable(self, request: Request, dags: Collection[str]) -> frozenset[str]:
        del request
        return frozenset(dags)


def test_an_action_on_all_that_match_posts_the_filter_and_the_number(site: Site) -> None:
    with _served(site.home, _Airflow()) as url, Site(url, site.home, site.browser).context() as context:
        watched = Watched(context.new_page(), url)
        page, posted = watched.page, list[tuple[str, Any]]()
        answer = {"dag_run_id": "manual__1"}
        page.route("**/api/v2/**", lambda route: (posted.append((route.request.url, route.request.post_data_json)),
                                                 route.fulfill(json=answer)))  # fmt: skip
        page.goto("/devices?mode=unreachable")
        page.get_by_label("Text within the id").press_sequentially("pump-10", delay=20)
        expect(page).to_have_url(f"{url}/devices?q=pump-10&mode=unreachable")  # the forms were replaced
        count = page.locator("#count .figure").inner_text()
        page.get_by_text("Actions on all").click()
        form = page.locator("form", has=page.locator('input[name="action"][value="maintain"]'))
        form.get_by_label("For").fill("3h")
        form.get_by_role("button").click()
        expect(form.get_by_role("link", name="manual__1")).to_have_attribute("href", "/dags/fleet_command/runs/manual__1")
        conf = {"action": "maintain", "for": "3h", "expect": count, "q": "pump-10", "mode": "unreachable"}
        assert posted == [(f"{url}/api/v2/dags/fleet_command/dagRuns", {"logical_date": None, "conf": conf})]
        assert watched.faults == []


def test_the_eighth_tab_loads(site: Site) -> None:
    with site.context() as context:
        tabs = [context.new_page() for _ in range(8)]
        for tab in tabs:
            tab.goto("/")
            expect(tab.locator(".tiles .figure").first).to_be_visible()


def test_a_page_whose_server_has_stopped_looks_stale(site: Site) -> None:
    with site.context() as context:
        page = context.new_page()
        page.clock.install()
        page.goto("/")
        page.locator("#zone").wait_for()
        expect(page.locator("#lost")).to_be_hidden()
        context.set_offline(True)
        page.clock.run_for(20_000)
        expect(page.locator("#lost")).to_be_visible()
        assert page.evaluate("document.documentElement.classList.contains('lost')")
        context.set_offline(False)
        page.clock.run_for(5_000)
        expect(page.locator("#lost")).to_be_hidden()
