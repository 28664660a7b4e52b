"""Operations page inside Airflow, behind Airflow's login.

Rule 1: the application is that of ``./fleet serve``. Only the authentication differs: the user is Airflow's, and
every route needs one.
Rule 2: this module starts no run. A button of the page posts to Airflow's own REST, as the user of the page (see
`fleetpulse.web.actions`, also for cross-site requests). Here, Airflow's rights only choose between a button and the
command to type.
Rule 3: the facts are loaded on the first request: Airflow runs no start of a mounted application, and every task
loads the plugins.
"""

import asyncio
from collections.abc import Collection
from typing import Any, Final, Protocol
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from fleetpulse.io.home.home import Home
from fleetpulse.orchestration.config import OrchestrationConfig
from fleetpulse.web.access import User, WebRole

PATH: Final = "/ui"  # below `pages.PREFIX`
_USER: Final = "fleet_user"  # key of Airflow's user in the scope of a request


class Login(Protocol):
    """Users of Airflow and their rights."""

    async def user(self, request: Request) -> Any | None:
        """Return the user of a request; None if nobody is logged in."""
        ...

    def name(self, user: Any) -> str:
        """Return the name of a user."""
        ...

    def may_start(self, user: Any, dag: str) -> bool:
        """Whether a user may start runs of a DAG."""
        ...


class AirflowLogin:
    """Users and rights of the auth manager that Airflow is configured with."""

    async def user(self, request: Request) -> Any | None:
        """Return the user of the session, or of the token of a request; None if there is none."""
        from airflow.api_fastapi.core_api.security import get_user
        from fastapi import HTTPException
        from fastapi.security import HTTPBearer

        try:
            return await get_user(request, None, await HTTPBearer(auto_error=False)(request))
        except HTTPException:
            return None

    def name(self, user: Any) -> str:
        """Return the name by which Airflow shows a user."""
        return str(user.get_name())

    def may_start(self, user: Any, dag: str) -> bool:
        """Whether Airflow would accept a run of a DAG from a user."""
        from airflow.api_fastapi.app import get_auth_manager
        from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
        from airflow.models.dag import DagModel

        details = DagDetails(id=dag, team_name=DagModel.get_team_name(dag))
        return get_auth_manager().is_authorized_dag(method="POST", access_entity=DagAccessEntity.RUN, details=details, user=user)


class AirflowStarter:
    """Airflow as the page sees it: its path, and the DAGs that a user may start.

    Args:
        login: users and their rights.
        mounted_at: path of the page below that of Airflow.
    """

    def __init__(self, login: Login, mounted_at: str) -> None:
        self._login, self._mounted_at = login, mounted_at

    def base(self, request: Request) -> str:
        """Return the path of Airflow, without a slash at its end."""
        return str(request.scope.get("root_path", "")).removesuffix(self._mounted_at)

    def startable(self, request: Request, dags: Collection[str]) -> frozenset[str]:
        """Return those of some DAGs of which the user of a request may start runs."""
        user = request.scope[_USER]
        return frozenset(dag for dag in dags if self._login.may_start(user, dag))


class OperationsPage:
    """ASGI application of the page, mounted in Airflow.

    Args:
        place: configuration of the installation.
        mounted_at: path at which it is mounted, below that of Airflow.
        login: users and rights; None for those of Airflow.
    """

    def __init__(self, place: OrchestrationConfig, mounted_at: str, login: Login | None = None) -> None:
        self._place, self._mounted_at = place, mounted_at
        self._login = login or AirflowLogin()
        self._building = asyncio.Lock()
        self.app: Starlette | None = None  # None before the first request of a user

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; without a user, redirect a browser to the login of Airflow."""
        assert scope["type"] == "http", "the page has no other protocol, and a mount passes no lifespan"
        request = Request(scope, receive)
        user = await self._login.user(request)
        if user is None:
            await self._to_login(request)(scope, receive, send)
            return
        async with self._building:
            self.app = self.app or await run_in_threadpool(self._build)
        await self.app({**scope, _USER: user}, receive, send)

    def _build(self) -> Starlette:
        from fleetpulse.web.app import create_app

        def authenticate(request: Request) -> User:
            return User(self._login.name(request.scope[_USER]), WebRole.VIEWER)

        starter = AirflowStarter(self._login, self._mounted_at)
        return create_app(Home(self._place.home), hosts=("*",), authenticate=authenticate, starter=starter)

    def _to_login(self, request: Request) -> Response:
        is_script = "hx-request" in request.headers or "text/html" not in request.headers.get("accept", "")
        if is_script or request.method != "GET":
            return JSONResponse({"error": {"code": "not-authenticated", "message": "log in to Airflow"}}, 401)
        path: bytes = request.scope.get("raw_path") or quote(request.scope["path"]).encode()  # ids may have a slash: `%2F`
        here = path.partition(b"?")[0].decode("latin-1") + (f"?{request.url.query}" if request.url.query else "")
        base = str(request.scope.get("root_path", "")).removesuffix(self._mounted_at)
        return RedirectResponse(
            f"{base}/api/v2/auth/login?next={quote(here, safe='')}", 303, headers={"Cache-Control": "no-store"}
        )
