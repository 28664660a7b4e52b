"""Pages that the operations made, shown to those who have logged in to Airflow, and the links that lead to them.

Rule 1: what is shown lies below two folders of the home, and whoever is not logged in sees nothing of it.
Rule 2: a page is shown as one of a stranger: its scripts run, and reach neither Airflow nor the session of who looks.
Rule 3: browsers send the session with nothing that such a page asks for, neither its style sheets nor, in a frame, the page
behind a link. So who is logged in is sent on to an address that is good for half a day, and what is relative to it is as well.
"""

import hmac
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

from fleetpulse.orchestration.config import PLACE, OrchestrationConfig, folder_of

PREFIX: Final = "/fleet"
PASS_S: Final = 43_200
_PASSED: Final = "for"  # an address is ``/fleet/for/<until, and its signature>/<area>/<path>``
_ALONE: Final = {
    "Content-Security-Policy": "sandbox allow-scripts allow-popups",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address is not for others
}

_INSTEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>fleetpulse</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 1.1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 4rem auto; padding: 0 1rem }}
</style></head><body><main><h1>Nothing to show here</h1><p>{words}</p></main></body></html>
"""
_NOWHERE: Final = "There is no such page."
_MISSING: Final = {
    "quality": "There is no such page. The DAG fleet_quality makes them when it looks at the data, each hour.",
    "backtests": "There is no such page. A backtest that failed has none, and one that is older than keep_logs is removed.",
}


def folders(place: OrchestrationConfig) -> dict[str, Path]:
    """Return what is shown, by the first word of its address below `PREFIX`."""
    return {"backtests": place.notes / "backtests", "quality": place.home / "quality" / "docs"}


def app(place: OrchestrationConfig) -> Any:
    """Return the application that shows the pages: who has a session is sent on to an address that is good for a while."""
    from airflow.api_fastapi.core_api.security import get_user
    from fastapi import Depends, FastAPI, Request
    from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response

    shown = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def instead(status: int, words: str) -> Response:
        return HTMLResponse(_INSTEAD.format(words=words), status, headers=_ALONE)

    def page(request: Request, area: str, path: str) -> Response:
        if page_of(place, area, path) is None:
            return instead(404, _MISSING.get(area, _NOWHERE))
        given = pass_until(int(time.time()) + PASS_S)
        return RedirectResponse(
            f"{request.scope.get('root_path', '')}/{_PASSED}/{given}/{area}/{quote(path)}", 303, headers=_ALONE
        )

    def passed(given: str, area: str, path: str) -> Response:
        if not is_good(given):
            return instead(401, "This address is no longer good. Open the page from Airflow again.")
        found = page_of(place, area, path)
        if found is None:
            return instead(404, _MISSING.get(area, _NOWHERE))
        return FileResponse(found, headers=_ALONE)

    shown.add_api_route(f"/{_PASSED}/{{given}}/{{area}}/{{path:path}}", passed, methods=["GET"])
    shown.add_api_route("/{area}/{path:path}", page, methods=["GET"], dependencies=[Depends(get_user)])
    return shown


def pass_until(until_s: int) -> str:
    """Return what an address has in it so that it is good until an instant, epoch seconds; Airflow's own key signs it."""
    from airflow.configuration import conf

    key = conf.get_mandatory_value("api", "secret_key").encode()
    return f"{until_s:x}-{hmac.new(key, f'fleet pages until {until_s}'.encode(), 'sha256').hexdigest()}"


def is_good(given: str) -> bool:
    """Whether it was given by `pass_until`, and its time has not passed."""
    try:
        until_s = int(given.partition("-")[0], 16)
    except ValueError:
        return False
    return hmac.compare_digest(given.encode(), pass_until(until_s).encode()) and time.time() < until_s


class Pages:
    """The application, made when the first page is asked for: each task of Airflow loads the plugins, and shows none.

    Args:
        place: the installation.
    """

    def __init__(self, place: OrchestrationConfig) -> None:
        self._place = place
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, as ASGI has it."""
        self._app = self._app or app(self._place)
        await self._app(scope, receive, send)


def page_of(place: OrchestrationConfig, area: str, path: str) -> Path | None:
    """Return the file of an address; None where it is none of ours."""
    root = folders(place).get(area)
    if root is None or "\0" in path:
        return None
    found = (root / path).resolve()
    return found if found.is_relative_to(root.resolve()) and found.is_file() else None


class ReportLink(BaseOperatorLink):
    """From a backtest to its page."""

    name = "Report"  # pyright: ignore[reportAssignmentType]  # Airflow declares a property

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address, on Airflow's own."""
        return f"{PREFIX}/backtests/{folder_of(PLACE.notes, ti_key.run_id).name}/report.html"


class DataDocsLink(BaseOperatorLink):
    """From a look at the data to its pages."""

    name = "Data Docs"  # pyright: ignore[reportAssignmentType]  # as above

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address, on Airflow's own."""
        return f"{PREFIX}/quality/index.html"
