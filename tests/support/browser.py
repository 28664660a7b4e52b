"""Operations page in the system's Chromium: users that are logged in, faults of a page, and its accessibility."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from fleetpulse.io.home.home import Home
from fleetpulse.web.access import login_key

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NEEDS_CHROMIUM: Final = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: on Debian and Ubuntu, apt install chromium")
LIMIT_MS: Final = 60_000  # of a step; a busy machine needs 30 s for a page that takes one second elsewhere


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


@contextmanager
def browsing(url: str, home: Home) -> Iterator[Site]:
    """Start a browser for the server of a home; each step and each expectation has the limit `LIMIT_MS`."""
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # tests may run as root
        yield Site(url, home, browser)
        browser.close()


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


def require_fit(watched: Watched, name: str) -> None:
    """Check that the shown page, with all of its details, is accessible, no wider than the screen, and obeys the policy.

    Args:
        watched: page.
        name: name of the page in a failure.
    """
    page = watched.page
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    found = Axe().run(page)
    assert found.violations_count == 0, f"{name}: {found.generate_report()}"
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), f"{name} is wider than the screen"
    assert watched.faults == [], name
