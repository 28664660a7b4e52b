"""Operations page over a real ``fleet up``, in Chromium: every page, its numbers, and its age beside those of the jobs.

Rule 1: one fleet runs for all tests of this file. The last test stops its lifecycle job for a while.
Rule 2: a bound of a wait is no measurement. What must happen in time is compared with instants of the server.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.process import read_status
from fleetpulse.io.tables import tables
from fleetpulse.paths import ROOT
from fleetpulse.web.live import STALE_S
from fleetpulse.web.pages.rendering import NAVIGATION, device_path
from tests.support.browser import NEEDS_CHROMIUM, Site, Watched, browsing, require_fit
from tests.support.fleet_command import await_none_left, fleet, fleet_command, rows_of
from tests.support.wait import PATIENCE_S, await_that

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800), NEEDS_CHROMIUM]  # each wait has its own limit
DEVICE: Final = "sensor-00000"
TABS: Final = 8
ON_PAGE_MS: Final = 15_000  # bound of the wait for a commit on a page: 3 s where the cores are free
STREAM: Final = "/api/v1/transitions/events"
OBSERVE: Final = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const { now, state } = document.getElementById("fresh").dataset;
    seen.push([Number(now), state]);
  }).observe(document.body, { childList: true });
}"""  # keeps the instant and the state of each answer that the page shows


@contextmanager
def _running(home: Home, log: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run a small fleet with its page until the end of the block."""
    command = fleet_command("up", "--home", str(home.path), "--devices", "24", "--no-airflow", "--page-port", "0", "--port", "0")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("w") as output:
        # Not registered: the fixture of each test ends what is registered.
        running = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(PATIENCE_S)
        finally:
            running.kill()


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """Stop a process by a signal until the end of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run a fleet whose first batches are judged, and a browser."""
    folder = tmp_path_factory.mktemp("running")
    home, log = Home(folder / "home"), folder / "log"
    with _running(home, log) as running:

        def url() -> str | None:
            assert running.poll() is None, log.read_text()
            return read_status(home.run("page")).get("url")

        def judged() -> bool:
            assert running.poll() is None, log.read_text()
            return (read_status(home.run("lifecycle")).get("batch") or 0) >= 2

        address = str(await_that(url, what="the page"))
        await_that(judged, what="the first batches", pause_s=0.5)
        with browsing(address, home) as site:
            yield site
    assert running.returncode == 0, log.read_text()
    await_none_left(home.path)


def _opened(page: Page, address: str) -> Page:
    """Open an address, and wait until its scripts have run."""
    page.goto(address)
    page.locator("#zone").wait_for()
    return page


def _shown(page: Page) -> dict[str, int]:
    """Return the figures of the page Fleet: number of devices by mode."""
    tiles = page.locator(".tiles li a")
    return {
        str(one.get_attribute("href")).rpartition("mode=")[2]: int(one.locator(".figure").inner_text().replace(",", ""))
        for one in tiles.all()
    }


def _listed(page: Page) -> dict[str, str]:
    """Return the modes of the devices on the page Devices, by id."""
    rows = page.locator("tr[data-row]").all()
    return {one.locator("a.device bdi").inner_text(): one.locator("td .mode").first.inner_text().strip() for one in rows}


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])  # test_page_browser.py has all four
def test_each_page_is_accessible_and_obeys_the_policy(site: Site, scheme: Any, width: int) -> None:
    parts = [device_path(DEVICE, part) for part in ("", "messages", "past")]
    of_device = (*parts, device_path(DEVICE, why=1, facts=1, span="all"))
    with site.context(color_scheme=scheme, viewport={"width": width, "height": 800}) as context:
        watched = Watched(context.new_page(), site.url)
        for address in (
            *(path for _, path in NAVIGATION),
            "/help",
            *of_device,
            "/changes?last=1440",
            "/devices?mode=online",
            "/past",
        ):
            _opened(watched.page, address)
            expect(watched.page.locator("#fresh")).to_have_attribute("data-state", "live")
            require_fit(watched, address)
        _opened(watched.page, device_path(DEVICE))
        expect(watched.page.locator("#why .sentence")).not_to_be_empty()
        expect(watched.page.locator("#facts")).to_contain_text("life since")
        require_fit(watched, "the device with its parts")


def test_a_transition_is_on_open_pages_after_its_commit(site: Site) -> None:
    online = {one["device_id"] for one in rows_of("devices", "--mode", "online", "--json", "--home", str(site.home.path))}
    device_id = min(online - {DEVICE})

    def committed() -> bool:
        sql = "SELECT 1 FROM judgements WHERE device_id = ? AND kind = 'transition' AND to_mode = ?"
        return bool(tables.query(site.home, sql, [device_id, Mode.MAINTENANCE.value], tables=[JUDGEMENTS.name]))

    with site.context() as context:
        of_device = _opened(context.new_page(), device_path(device_id))
        changes = _opened(context.new_page(), f"/changes?last=1440&device={quote(device_id)}")
        arrow = changes.locator("tbody .change", has_text="maintenance")
        assert arrow.count() == 0
        ordered = fleet("device", "maintain", device_id, "--for", "1h", "--home", str(site.home.path))
        assert ordered.returncode == 0, ordered.stderr
        await_that(committed, what="the transition", pause_s=0.05)

        # A list does not move under the pointer: it offers the newer facts. The page of a device shows them by itself.
        offer = changes.locator("#newer")
        offer.wait_for(timeout=ON_PAGE_MS)
        while arrow.count() == 0:
            offer.click(timeout=ON_PAGE_MS)
            offer.wait_for(state="hidden", timeout=ON_PAGE_MS)
            if arrow.count() == 0:  # the offer was made before the commit
                offer.wait_for(timeout=ON_PAGE_MS)
        expect(of_device.locator("#present .now .mode")).to_have_text(re.compile("maintenance"), timeout=ON_PAGE_MS)


def test_the_eighth_tab_loads_while_streams_are_open(site: Site) -> None:
    address = urlsplit(site.url)
    with site.context() as context:
        cookie = "; ".join(f"{one.get('name')}={one.get('value')}" for one in context.cookies())
        streams = [HTTPConnection(str(address.hostname), address.port, timeout=60) for _ in range(TABS)]
        try:
            for one in streams:
                one.request("GET", STREAM, headers={"Cookie": cookie})
                answer = one.getresponse()
                assert (answer.status, answer.readline()[:6]) == (200, b"retry:")
            tabs = [_opened(context.new_page(), path) for path, _ in zip(_paths(), range(TABS), strict=False)]
            for tab in tabs:
                tab.bring_to_front()
                loaded = int(str(tab.locator("#fresh").get_attribute("data-now")))
                tab.wait_for_function("loaded => Number(document.getElementById('fresh').dataset.now) > loaded", arg=loaded)
            assert len(tabs) == TABS
        finally:
            for one in streams:
                one.close()


def _paths() -> Iterator[str]:
    while True:
        yield from (path for _, path in NAVIGATION)


def test_pages_are_stale_after_the_job_is_stopped_and_their_numbers_are_those_of_the_command(site: Site) -> None:
    pid = int(read_status(site.home.run("lifecycle"))["pid"])
    with site.context() as context:
        pages = [_opened(context.new_page(), address) for address in ("/stream", "/")]
        for page in pages:
            expect(page.locator("html")).to_have_attribute("data-state", "live")
            page.evaluate(OBSERVE)
        with _stopped(pid):
            _require_stale(site, pages)
            with _stopped(int(read_status(site.home.run("landing"))["pid"])):  # so that the numbers settle
                await_that(lambda: _agrees(site, context), limit_s=180, what="numbers of the command on the page")
        for page in pages:
            page.bring_to_front()
            expect(page.locator("html")).to_have_attribute("data-state", "live", timeout=PATIENCE_S * 1000)


def _require_stale(site: Site, pages: list[Page]) -> None:
    """Check that each page becomes stale, and that no page showed an answer that came too late as live."""
    reported_ms = site.home.run("lifecycle").stat().st_mtime * 1000
    for page in pages:
        page.bring_to_front()
        expect(page.locator("html")).to_have_attribute("data-state", "stale", timeout=PATIENCE_S * 1000)
        expect(page.locator("#fresh .why")).to_contain_text("The lifecycle job does not report")
        seen: list[tuple[int, str]] = page.evaluate("seen")
        assert seen, "the page asked again"
        assert {state for now_ms, state in seen if now_ms > reported_ms + STALE_S * 1000} <= {"stale"}


def _agrees(site: Site, context: BrowserContext) -> bool:
    """Return whether the pages show what the command line prints; False if rows were written in between."""
    home = ("--json", "--home", str(site.home.path))
    [before], listed = rows_of("status", *home), rows_of("devices", "--last", "100", *home)
    page = context.new_page()
    _opened(page, "/")
    figures, frontier = _shown(page), page.locator("#fresh time").first.get_attribute("datetime")
    _opened(page, "/devices?limit=100")
    modes, count = _listed(page), page.locator("#count .figure").inner_text()
    page.close()
    facts = context.request.get("/api/v1/fleet").json()
    names = ("devices", "never_seen", "clocks", "transitions", "judgements", "quarantine")
    [after] = rows_of("status", *home)
    if any(before[name] != after[name] for name in (*names, "messages", "frontier")):
        return False
    assert {name: facts[name] for name in names} == {name: after[name] for name in names}
    assert frontier == after["frontier"]
    assert figures == after["devices"] and sum(figures.values()) > 20
    assert modes == {one["device_id"]: one["mode"] for one in listed}
    assert int(count) == len(listed)
    return True
