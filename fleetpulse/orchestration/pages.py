"""Pages that the operations made, shown to those who have logged in to Airflow, and the links that lead to them.

Rule 1: what is shown lies below two folders of the home, and whoever is not logged in sees nothing of it.
Rule 2: a page is shown as one of a stranger: its scripts run, and reach neither Airflow nor the session of who looks.
"""

from pathlib import Path
from typing import Any, Final

from airflow.sdk import BaseOperatorLink

from fleetpulse.orchestration.place import PLACE, Place

PREFIX: Final = "/fleet"
_ALONE: Final = {"Content-Security-Policy": "sandbox allow-scripts allow-popups", "X-Content-Type-Options": "nosniff"}


def folders(place: Place) -> dict[str, Path]:
    """Return what is shown, by the first word of its address below `PREFIX`."""
    return {"backtests": place.notes / "backtests", "quality": place.home / "quality" / "docs"}


def app(place: Place) -> Any:
    """Return the application that shows the pages; nothing of it can be asked without a session."""
    from airflow.api_fastapi.core_api.security import get_user
    from fastapi import Depends, FastAPI, HTTPException
    from fastapi.responses import FileResponse

    shown = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(get_user)])

    def page(area: str, path: str) -> FileResponse:
        found = page_of(place, area, path)
        if found is None:
            raise HTTPException(404, "there is no such page")
        return FileResponse(found, headers=_ALONE)

    shown.add_api_route("/{area}/{path:path}", page, methods=["GET"])
    return shown


class Pages:
    """The application, made when the first page is asked for: each task of Airflow loads the plugins, and shows none.

    Args:
        place: the installation.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, as ASGI has it."""
        self._app = self._app or app(self._place)
        await self._app(scope, receive, send)


def page_of(place: Place, area: str, path: str) -> Path | None:
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
        from fleetpulse.orchestration.backtests import folder_of

        return f"{PREFIX}/backtests/{folder_of(PLACE.notes, ti_key.run_id).name}/report.html"


class DataDocsLink(BaseOperatorLink):
    """From a look at the data to its pages."""

    name = "Data Docs"  # pyright: ignore[reportAssignmentType]  # as above

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address, on Airflow's own."""
        return f"{PREFIX}/quality/index.html"
