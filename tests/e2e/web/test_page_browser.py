"""Operations page in Chromium: accessibility, content security policy, phone width, keys, search, and no JavaScript.

`FLEET_PICTURES` names a folder for new pictures of the documentation.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from fleetpulse.io.home.home import Home
from fleetpulse.io.system.ports import free_port
from fleetpulse.web.access import login_key
from fleetpulse.web.app import create_app
from tests.support.homes.shown import seem_running, shown_home
from tests.support.homes.streams import add_commands, add_streams

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = os.environ.get("FLEET_PICTURES")
PAGES = {
    "fleet": "/",
    "devices": "/devices?mode=offline",
    "device": "/devices/pump-1006?why=1&facts=1",
    "changes": "/changes?last=1440",
    "stream": "/stream",
    "sessions": "/stream/sessions",
    "vitals": "/stream/vitals?device=pump-1006&metric=battery",
    "commands": "/stream/commands?last=all",
    "rollouts": "/stream/rollouts",
    "rollout": "/stream/rollouts/bad-3",
    "device-streams": "/devices/pump-1006?streams=1",
}
LIMIT_MS = 20_000
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: on Debian and Ubuntu, apt install chromium"),
]


@dataclass
class Site:
    """Server of a home, and a browser.

    Attributes:
        url: address of the server.
        home: home that it shows.
        browser: browser.
    """

    url: str
    home: Home
    browser: Browser

    @contextmanager
    def context(self, **options: Any) -> Iterator[BrowserContext]:
        """Open a context of the browser with a logged-in user."""
        context = self.browser.new_context(base_url=self.url, **options)
        context.set_default_timeout(LIMIT_MS)
        entry = context.new_page()
        entry.goto(f"/login?key={login_key(self.home)}")
        entry.close()
        try:
            yield context
        finally:
            context.close()


@dataclass
class Watched:
    """Faults that a page reports.

    Attributes:
        page: page.
        origin: address of the server.
        faults: messages of the console, errors of scripts, requests beyond the origin.
    """

    page: Page
    origin: str
    faults: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.page.on("console", lambda one: self._keep(one.text if one.type in ("error", "warning") else ""))
        self.page.on("pageerror", lambda one: self._keep(str(one)))
        self.page.on("request", lambda one: self._keep("" if one.url.startswith(self.origin) else one.url))
        self.page.add_init_script(
            "document.addEventListener('securitypolicyviolation', (e) => console.error('CSP', e.violatedDirective, e.sourceFile))"
        )

    def _keep(self, fault: str) -> None:
        if fault:
            self.faults.append(fault)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Serve a home whose newest message is of this minute."""
    home = shown_home(tmp_path_factory.mktemp("site") / "home", round(time.time() * 1000) - 5_000)
    seem_running(home)
    add_streams(home, "pump-1006", round(time.time() * 1000) - 60_000)
    add_commands(home, "<script>alert(1)</script>", round(time.time() * 1000) - 60_000)
    port = free_port("127.0.0.1", 0, RuntimeError)
    config = uvicorn.Config(create_app(home, hosts=("127.0.0.1",)), host="127.0.0.1", port=port, log_level="warning")
    server = uvicorn.Server(config)
    thread = Thread(target=server.run, daemon=True)

    thread.start()
    limit = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < limit and thread.is_alive(), "the server does not start"
        time.sleep(0.05)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # tests may run as root
        yield Site(f"http://127.0.0.1:{port}", home, browser)
        browser.close()
    server.should_exit = True
    thread.join(30)


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_page_is_accessible_and_obeys_the_policy(site: Site, scheme: Any, width: int) -> None:
    with site.context(color_scheme=scheme, viewport={"width": width, "height": 800}) as context:
        watched = Watched(context.new_page(), site.url)
        page = watched.page
        for name, address in PAGES.items():
            page.goto(address)
            page.locator("#zone").wait_for()  # scripts have run
            if width == 1280:
                _picture(page, name, scheme)
            found = Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{name} is wider than the screen"
            assert watched.faults == [], name


def _picture(page: Page, name: str, scheme: str) -> None:
    if PICTURES and scheme == "light":
        page.screenshot(path=Path(PICTURES) / f"page-{name}.png")


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
        page.get_by_label("state", exact=True).select_option("rejected")
        page.get_by_role("button", name="Show").click()
        expect(page).to_have_url(f"{site.url}/stream/commands?device=pump-1006&status=rejected")
        expect(page.locator("tr[data-row]")).to_have_count(1)
        page.locator("a.device").click()
        page.get_by_role("link", name="Read its sessions").click()
        expect(page.locator("#beside")).to_contain_text("difference")


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
