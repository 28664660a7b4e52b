"""Serve the operations page, backtest reports and Data Docs to users who are logged in to Airflow.

The operator links that lead to these pages are defined here, too.

Rule 1: pages lie in two folders of the home. They are served only to users who are logged in.
Rule 2: such a page is served as untrusted content. Its scripts run in a sandbox and can reach neither
Airflow nor the session of the user.
Rule 3: from a sandboxed page, browsers send no session cookie, neither for its style sheets nor for
links inside a frame. A logged-in user is therefore redirected to a signed address, which is valid
for an hour. Relative links resolve below that address, so they are signed as well.
Rule 4: a start of Airflow, or the removal of the key file, revokes all signed addresses.
"""

import hmac
import secrets
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

from fleetpulse.io.system.secret_files import create_secret
from fleetpulse.orchestration.config import CONFIG, OrchestrationConfig, backtest_folder

PREFIX: Final = "/fleet"
PASS_S: Final = 3_600
_MAX_EXPIRY_DIGITS: Final = 16  # hexadecimal; Python converts no number of many digits
_PASSED: Final = "for"  # signed addresses: ``/fleet/for/<expiry>-<signature>/<area>/<path>``
_ALONE: Final = {
    "Content-Security-Policy": "sandbox allow-scripts allow-popups",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address grants access
}

_MESSAGE_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>fleetpulse</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 1.1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 4rem auto; padding: 0 1rem }}
</style></head><body><main><h1>Nothing to show here</h1><p>{text}</p></main></body></html>
"""
_NOWHERE: Final = "There is no such page."
_MISSING: Final = {
    "quality": "There is no such page. The DAG fleet_quality builds these pages every hour, when it checks the data.",
    "backtests": "There is no such page. A failed backtest has no page, and pages older than keep_logs are deleted.",
}


def folders(place: OrchestrationConfig) -> dict[str, Path]:
    """Return the served folders by area, the first path component below `PREFIX`."""
    return {"backtests": place.data_folder / "backtests", "quality": place.home / "quality" / "docs"}


def app(place: OrchestrationConfig) -> Any:
    """Build the application that serves the pages, with the operations page below ``/ui``.

    It redirects a user with a session to a signed address, which is valid for `PASS_S` seconds.
    """
    from airflow.api_fastapi.core_api.security import get_user
    from fastapi import Depends, FastAPI, Request
    from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

    from fleetpulse.orchestration.pages.operations_page import PATH, OperationsPage

    shown = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    shown.mount(PATH, OperationsPage(place, PREFIX + PATH))  # before the routes, which match its path as well

    def instead(status: int, text: str) -> Response:
        return HTMLResponse(_MESSAGE_PAGE.format(text=text), status, headers=_ALONE)

    def page(request: Request, area: str, path: str) -> Response:
        if page_of(place, area, path) is None:
            return instead(404, _MISSING.get(area, _NOWHERE))
        signed_pass = signed_expiry(int(time.time()) + PASS_S, place)
        return RedirectResponse(
            f"{request.scope.get('root_path', '')}/{_PASSED}/{signed_pass}/{area}/{quote(path)}", 303, headers=_ALONE
        )

    def passed(given: str, area: str, path: str) -> Response:
        if not is_valid_pass(given, place):
            return instead(401, "This address has expired. Open the page from Airflow again.")
        found = page_of(place, area, path)
        if found is None:
            return instead(404, _MISSING.get(area, _NOWHERE))
        return FileResponse(found, headers=_ALONE)

    shown.add_api_route(f"/{_PASSED}/{{given}}/{{area}}/{{path:path}}", passed, methods=["GET"])
    shown.add_api_route("/{area}/{path:path}", page, methods=["GET"], dependencies=[Depends(get_user)])
    return shown


def signed_expiry(until_s: int, place: OrchestrationConfig) -> str:
    """Return an expiry (epoch seconds) and its signature, as part of a page address.

    The keys are the secret key of Airflow's API server, and `OrchestrationConfig.pages_key`, which
    is created if it does not exist.
    """
    from airflow.configuration import conf

    place.data_folder.mkdir(0o700, parents=True, exist_ok=True)
    revocable = create_secret(place.pages_key, secrets.token_hex(32))
    key = f"{conf.get_mandatory_value('api', 'secret_key')} {revocable}".encode()
    return f"{until_s:x}-{hmac.new(key, f'fleet pages until {until_s}'.encode(), 'sha256').hexdigest()}"


def is_valid_pass(signed_pass: str, place: OrchestrationConfig) -> bool:
    """Whether `signed_expiry` issued the pass, and it is neither expired nor revoked."""
    until = signed_pass.partition("-")[0]
    if len(until) > _MAX_EXPIRY_DIGITS:
        return False
    try:
        until_s = int(until, 16)
    except ValueError:
        return False
    return hmac.compare_digest(signed_pass.encode(), signed_expiry(until_s, place).encode()) and time.time() < until_s


class PagesApp:
    """ASGI application that is built on the first request.

    Every Airflow task loads the plugins but serves no page, so building is deferred.

    Args:
        place: configuration of the installation.
    """

    def __init__(self, place: OrchestrationConfig) -> None:
        self._place = place
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one ASGI request."""
        self._app = self._app or app(self._place)
        await self._app(scope, receive, send)


def page_of(place: OrchestrationConfig, area: str, path: str) -> Path | None:
    """Return the file at an address; None if no served folder contains it."""
    root = folders(place).get(area)
    if root is None or "\0" in path:
        return None
    found = (root / path).resolve()
    return found if found.is_relative_to(root.resolve()) and found.is_file() else None


class ReportLink(BaseOperatorLink):
    """Link from a backtest to its report."""

    name = "Report"  # pyright: ignore[reportAssignmentType]  # Airflow declares a property

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address, relative to the address of Airflow."""
        return f"{PREFIX}/backtests/{backtest_folder(CONFIG.data_folder, ti_key.run_id).name}/report.html"


class DataDocsLink(BaseOperatorLink):
    """Link from a quality check to the Data Docs."""

    name = "Data Docs"  # pyright: ignore[reportAssignmentType]  # as above

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address, relative to the address of Airflow."""
        return f"{PREFIX}/quality/index.html"
