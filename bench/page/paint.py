"""Largest contentful paint of pages in Chromium with a slower CPU, a part of the benchmark of the HTTP server.

Rule 1: each page opens in a context of its own, so nothing is in its cache. The network is the loopback.
Rule 2: the paint is that of the browser: from the start of the navigation, so the answer of the server is part of it.
"""

import shutil
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, Final

from fleetpulse.core.errors import FleetError

_SLOWER: Final = 4  # times: the slow-down of the CPU in the page
_RUNS: Final = 5
_LIMIT_MS: Final = 60_000.0
_CHROMIUM: Final = ("chromium", "chromium-browser", "google-chrome")
_LARGEST: Final = """() => new Promise((resolve) => {
    let found = 0;
    new PerformanceObserver((list) => { for (const one of list.getEntries()) found = one.startTime; })
        .observe({type: 'largest-contentful-paint', buffered: true});
    setTimeout(() => resolve(found), 1000);
})"""


def paints(origin: str, token: str, pages: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Open pages repeatedly; yield a row for each, with median and maximum in seconds.

    Args:
        origin: address of the server, without a path.
        token: token of a viewer.
        pages: path of each page, by route.

    Raises:
        FleetError: a page has no paint.
    """
    executable = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        executable = None
    if executable is None:
        yield {"route": "largest paint: not measured, Chromium or Playwright is not installed"}
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])  # benchmarks may run as root
        for route, path in pages.items():
            found = [_largest_s(browser, origin + path, token) for _ in range(_RUNS + 1)][1:]
            shown = {"p50_s": round(median(found), 3), "max_s": round(max(found), 3)}
            yield {"route": f"largest paint of {route}, CPU {_SLOWER}x slower", "requests": _RUNS, **shown}
        browser.close()


def _largest_s(browser: Any, address: str, token: str) -> float:
    with browser.new_context(extra_http_headers={"Authorization": f"Bearer {token}"}) as context:
        page = context.new_page()
        context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": _SLOWER})
        answer = page.goto(address, wait_until="load", timeout=_LIMIT_MS)
        largest_ms: float = page.evaluate(_LARGEST)
        if not answer.ok or not largest_ms:
            raise FleetError(f"{address} was answered with {answer.status} and has no largest paint", code="bench-run-failed")
        return largest_ms / 1000
