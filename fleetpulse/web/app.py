"""Application of the HTTP server: routes, authentication, limits and security headers.

Rule 1: every route but `OPEN` needs a user, and the pages need a person. The routes are read-only: they answer GET and HEAD.
Rule 2: an answer never has what a browser may take for a script of another kind: see `HEADERS`. Content of devices
is data in JSON, or escaped text in HTML.
Rule 3: errors are sentences with a code, in JSON below ``/api``, otherwise in HTML. An unexpected error is written to
the log with its traceback, without values of variables: they may contain tokens.
"""

import os
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import anyio
import structlog
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.web import metrics, readiness
from fleetpulse.web.access import SESSION_S, Access, User, WebRole
from fleetpulse.web.actions import Starter
from fleetpulse.web.api.events import Streams
from fleetpulse.web.api.modes import known_modes
from fleetpulse.web.api.routes import routes as api_routes
from fleetpulse.web.live import LiveFleet, QueryTooLong
from fleetpulse.web.pages.rendering import error_page, is_for_people
from fleetpulse.web.pages.routes import routes as page_routes

OPEN: Final = frozenset({"/healthz", "/readyz", "/login"})  # and all below /static
MOST_QUERY_BYTES: Final = 8_192
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_STATUS: Final = {
    "parameter-invalid": 400, "instant-invalid": 400, "page-unknown": 404, "device-unknown": 404, "why-without-mode": 404,
    "device-not-judged": 404, "busy": 503, "query-too-long": 503, "facts-not-loaded": 503, "cursor-expired": 410,
    "file-damaged": 503, "instant-not-past": 400, "instant-before-history": 400, "home-without-history": 404,
    "rollout-unknown": 404, "rollout-record-damaged": 503, "value-being-read": 503,
}  # fmt: skip

Authenticate = Callable[[Request], User | None]


def create_app(
    home: Home, *, hosts: tuple[str, ...], authenticate: Authenticate | None = None, starter: Starter | None = None
) -> Starlette:
    """Build the application.

    Args:
        home: home to show.
        hosts: names by which clients may address the server; others are refused, so that no other site can
            reach a server on the loopback by a name of its own.
        authenticate: function that returns the user of a request; None: tokens and sessions of the home.
        starter: Airflow, if the application is mounted in it; None shows commands instead of actions.
    """
    live, access = LiveFleet(home), Access(home)
    measured = metrics.Metrics(live)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        live.start()
        try:
            yield
        finally:
            app.state.streams.close()
            await run_in_threadpool(live.stop)

    routes = [
        Route("/healthz", _healthz),
        Route("/readyz", readiness.answer),
        Route("/metrics", metrics.answer),
        Route("/login", _login),
        *api_routes(),
        *page_routes(),
    ]
    handlers: dict[Any, Any] = {FleetError: _refused, HTTPException: _http_error}
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers=handlers,
        middleware=[
            Middleware(metrics.Measured, requests=measured.requests),
            Middleware(_Guard, hosts=hosts, authenticate=authenticate or _of_home(access)),
        ],
    )
    app.router.redirect_slashes = False  # an address has one form
    app.state.home, app.state.live, app.state.access, app.state.metrics = home, live, access, measured
    app.state.streams, app.state.readings = Streams(), anyio.CapacityLimiter(os.cpu_count() or 1)
    app.state.starter, app.state.modes = starter, known_modes()
    app.state.waiting = anyio.CapacityLimiter(readiness.MOST_WAITING)
    return app


def _of_home(access: Access) -> Authenticate:
    def authenticate(request: Request) -> User | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return access.by_token(token.strip())
        cookie = request.cookies.get(access.cookie)
        return access.by_session(cookie) if cookie else None

    return authenticate


class _Guard:
    """Checks of every request before its route, and headers of every answer.

    Args:
        app: application behind it.
        hosts: names by which the server may be addressed.
        authenticate: function that returns the user of a request.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], authenticate: Authenticate) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._authenticate = authenticate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        if scope["type"] != "http":
            return
        is_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                given = {name.lower() for name, _ in message["headers"]}
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(one for one in more if one[0] not in given)]
            await send(message)

        request = Request(scope, receive)
        try:
            answer = await self._fault(request) or self._app
            await answer(scope, receive, send_with_headers)
        except Exception as found:
            structlog.get_logger().error(
                "a request failed", path=scope["path"], traceback="".join(traceback.format_exception(found))
            )
            if is_started:
                raise  # the client must not take the part that it has for the whole
            failed = error(request, 500, "internal-error", "the server failed to answer; see its log")
            await failed(scope, receive, send_with_headers)

    async def _fault(self, request: Request) -> Response | None:
        """Return the answer to a request that is not passed on; None if it is."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        host = _host_of(request.headers.get("host", ""))
        if "*" not in self._hosts and host not in self._hosts:
            return error(request, 421, "host-unknown", f'this server is not named "{host[:100]}"; see the setting serve_hosts')
        if len(request.scope.get("raw_path", b"")) + len(request.url.query) > MOST_QUERY_BYTES:
            return error(request, 414, "address-too-long", f"an address has at most {MOST_QUERY_BYTES:,} bytes")
        if request.method not in ("GET", "HEAD"):
            return error(request, 405, "method-not-allowed", "this server is read-only; use GET", {"Allow": "GET, HEAD"})
        if path in OPEN or path.startswith("/static/"):
            return None
        user = await run_in_threadpool(self._authenticate, request)
        if user is None:
            return error(
                request,
                401,
                "not-authenticated",
                "log in with the address that ./fleet serve prints (./fleet access login prints a new one), or send a token of "
                "./fleet access grant NAME --role api-reader as: Authorization: Bearer TOKEN",
                {"WWW-Authenticate": "Bearer"},
            )
        if user.role is WebRole.API_READER and is_for_people(request):
            text = "a token of the role api-reader reads the API and the metrics; for the page, log in: ./fleet access login"
            return error(request, 403, "role-insufficient", text)
        request.scope["user"], request.scope["user_now"] = user, partial(self._authenticate, request)
        return None


def _host_of(header: str) -> str:
    """Return the host of a Host header, without the port."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()


def error(request: Request, status: int, code: str, text: str, headers: dict[str, str] | None = None) -> Response:
    """Return the answer to a request that failed."""
    if is_for_people(request):
        return error_page(request, status, code, text, headers)
    return JSONResponse({"error": {"code": code, "message": text}}, status, headers)


async def _refused(request: Request, found: Exception) -> Response:
    assert isinstance(found, FleetError)
    status = 503 if isinstance(found, QueryTooLong) else _STATUS.get(found.code, 500)
    return error(request, status, found.code, str(found))


async def _http_error(request: Request, found: Exception) -> Response:
    assert isinstance(found, HTTPException)
    if found.status_code == 404:
        return error(request, 404, "not-found", "nothing has this address; check it for a typing error")
    return error(request, found.status_code, "http-error", found.detail)


async def _healthz(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _login(request: Request) -> Response:
    """Exchange a one-time key for a session."""
    access: Access = request.app.state.access
    session = await run_in_threadpool(access.log_in, request.query_params.get("key", ""))
    if session is None:
        text = "the address was used, or has expired; print a new one with: ./fleet access login"
        return error(request, 401, "login-invalid", text)
    answer = RedirectResponse(f"{request.scope.get('root_path', '')}/", 303, headers={"Referrer-Policy": "no-referrer"})
    is_secure = request.url.scheme == "https"
    # Lax, not strict: an address that somebody shares opens from another site, and no GET changes anything.
    answer.set_cookie(access.cookie, session, max_age=SESSION_S, httponly=True, samesite="lax", secure=is_secure)
    return answer
