"""Guard of the HTTP server: who is let in, which requests are refused, and the headers of every answer."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route

from fleetpulse.io.home.home import Home
from fleetpulse.paths import ROOT
from fleetpulse.web.access import WebRole, grant_token, login_key, revoke_token
from fleetpulse.web.app import HEADERS, MOST_QUERY_BYTES, OPEN, create_app
from tests.support.asgi import NO_HEADERS, Answer, Client

pytestmark = pytest.mark.unit
NAMES = ("fleet.example", "localhost")
FINE, FAILING, BREAKING = "/api/fine", "/api/failing", "/api/breaking"  # routes that the tests add


def ask(
    application: Starlette,
    address: str,
    headers: Mapping[str, str] = NO_HEADERS,
    method: str = "GET",
    scheme: str = "http",
    host: str = "fleet.example:8090",
) -> Answer:
    """Return the answer to one request, whose path is passed on as it is: a client would normalise it."""
    return Client(application, {"Host": host}, scheme=scheme).get(address, headers, method)


async def _fine(_request: Request) -> Response:
    return PlainTextResponse("fine")


async def _failing(_request: Request) -> Response:
    raise RuntimeError("detail of the fault")


async def _breaking(_request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        yield b"the first half"
        raise RuntimeError("detail of the fault")

    return StreamingResponse(parts())


@pytest.fixture
def application(home: Home) -> Iterator[Starlette]:
    made = create_app(home, hosts=NAMES)
    made.router.routes[:0] = [Route(FINE, _fine), Route(FAILING, _failing), Route(BREAKING, _breaking)]
    yield made
    made.state.live.stop()


@pytest.fixture
def program(home: Home) -> dict[str, str]:
    """Return the header of a program with a token."""
    return {"Authorization": f"Bearer {grant_token(home, 'test', WebRole.API_READER, 5)}"}


def _paths(routes: list[BaseRoute], above: str = "") -> Iterator[str]:
    """Yield a path of each route."""
    for one in routes:
        if isinstance(one, Mount):
            yield from _paths(list(one.routes), above + one.path)
            yield f"{above}{one.path}/x"
        else:
            assert isinstance(one, Route), f"{one} is no HTTP route; extend the guard, and this test"
            yield above + re.sub(r"\{[^}]*\}", "1", one.path)


def require_headers(answer: Answer) -> None:
    """Require the security headers, and that no other site may read the answer."""
    assert {name for name in HEADERS if name.lower() not in answer.headers} == set(), answer.address
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert not [name for name in answer.headers if name.startswith("access-control-")]


def require_refusal(answer: Answer, status: int, code: str) -> None:
    """Require an answer that refuses a request: with its code, in JSON for programs."""
    require_headers(answer)
    assert answer.status == status, answer
    assert code in answer.text
    assert not answer.address.startswith("/api/") or answer.code == code


def test_every_route_but_the_open_ones_refuses_anonymous_requests(application: Starlette) -> None:
    paths = sorted({*_paths(application.routes), "/", "/no/such/page", "//healthz", "/healthz/", "/static", "/login/x"})
    guarded = [path for path in paths if path not in OPEN and not path.startswith("/static/")]
    assert {"/api/v1/fleet", "/api/v1/devices", "/metrics"} <= {*guarded}
    cookie = f"{application.state.access.cookie}=forged"
    forged = ({"Authorization": "Bearer fleet_forged"}, {"Cookie": cookie}, {"Authorization": "Basic YTpi"})
    for path in guarded:
        for credentials in (NO_HEADERS, *forged):
            answer = ask(application, path, credentials)
            require_refusal(answer, 401, "not-authenticated")
            assert answer.headers["www-authenticate"] == "Bearer"
    assert {path for path in paths if path in OPEN} == OPEN


def test_open_routes_name_nothing_of_the_home(home: Home, application: Starlette) -> None:
    assert ask(application, "/healthz").status == 200
    require_refusal(ask(application, "/login?key=forged"), 401, "login-invalid")
    for path in ("/healthz", "/login", "/login?key=forged", "/static/none"):
        answer = ask(application, path)
        require_headers(answer)
        assert str(home.path) not in answer.text


def test_a_token_is_accepted_until_it_is_revoked(home: Home, application: Starlette, program: dict[str, str]) -> None:
    answer = ask(application, FINE, program)
    require_headers(answer)
    assert (answer.status, answer.text) == (200, "fine")
    assert ask(application, FINE, program, "HEAD").status == 200
    assert ask(application, FINE, {"Authorization": program["Authorization"].replace("Bearer", "bearer")}).status == 200
    revoke_token(home, "test")
    require_refusal(ask(application, FINE, program), 401, "not-authenticated")


def test_a_token_of_a_program_reads_no_page(home: Home, application: Starlette, program: dict[str, str]) -> None:
    person = {"Cookie": _logged_in(application, home).headers["set-cookie"].partition(";")[0]}
    for path in ("/help", "/fragments/freshness", "/backtest/none", "/changes.csv", "/no/such/page"):
        require_refusal(ask(application, path, program), 403, "role-insufficient")
        assert ask(application, path, person).status != 403
    assert ask(application, "/api/v1/openapi.json", program).status == 200


def _logged_in(application: Starlette, home: Home, scheme: str = "http") -> Answer:
    return ask(application, f"/login?key={login_key(home)}", scheme=scheme)


def test_a_one_time_address_becomes_a_session_that_scripts_cannot_read(home: Home, application: Starlette) -> None:
    key = login_key(home)
    answer = ask(application, f"/login?key={key}")
    require_headers(answer)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert answer.headers["referrer-policy"] == "no-referrer", "the address has the key"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie and "Secure" not in cookie
    assert ask(application, FINE, {"Cookie": cookie.partition(";")[0]}).text == "fine"
    require_refusal(ask(application, f"/login?key={key}"), 401, "login-invalid")


def test_a_browser_is_logged_in_to_two_homes_of_one_host(home: Home, application: Starlette, tmp_path: Path) -> None:
    other = Home(tmp_path / "other")
    there = create_app(other, hosts=NAMES)
    there.router.routes[:0] = [Route(FINE, _fine)]
    try:
        sessions = [_logged_in(*one).headers["set-cookie"].partition(";")[0] for one in ((application, home), (there, other))]
        assert len({one.partition("=")[0] for one in sessions}) == 2, "a browser keeps one cookie of a name, whatever the port"
        both = {"Cookie": "; ".join(sessions)}
        assert [ask(one, FINE, both).status for one in (application, there)] == [200, 200]
        require_refusal(ask(there, FINE, {"Cookie": sessions[0]}), 401, "not-authenticated")
    finally:
        there.state.live.stop()


def test_a_session_that_began_over_tls_is_sent_over_tls_alone(home: Home, application: Starlette) -> None:
    assert "Secure" in _logged_in(application, home, "https").headers["set-cookie"]


def test_a_session_is_no_token_and_a_token_is_no_session(home: Home, application: Starlette, program: dict[str, str]) -> None:
    session = _logged_in(application, home).headers["set-cookie"].partition(";")[0].partition("=")[2]
    require_refusal(ask(application, FINE, {"Authorization": f"Bearer {session}"}), 401, "not-authenticated")
    token = program["Authorization"].removeprefix("Bearer ")
    require_refusal(ask(application, FINE, {"Cookie": f"{application.state.access.cookie}={token}"}), 401, "not-authenticated")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8090",
        "fleet.example.evil.example",
        "[::1",
        "",
        "fleet.example@evil.example",
        "127.0.0.1",
        "*",
    ],
)
def test_a_host_that_is_not_the_servers_is_refused(host: str, application: Starlette, program: dict[str, str]) -> None:
    """A page of another site whose name leads to the loopback must not read the fleet (DNS rebinding)."""
    for path in (FINE, "/healthz", "/readyz", "/login", "/static/x", "/"):
        require_refusal(ask(application, path, program, host=host), 421, "host-unknown")


@pytest.mark.parametrize("host", ["fleet.example", "FLEET.EXAMPLE:1", "localhost:8090", "localhost"])
def test_a_name_of_the_server_is_accepted_with_any_port(host: str, application: Starlette, program: dict[str, str]) -> None:
    assert ask(application, FINE, program, host=host).text == "fine"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"])
def test_a_method_that_changes_something_is_refused(method: str, application: Starlette, program: dict[str, str]) -> None:
    for path in _paths(application.routes):
        answer = ask(application, path, {**program, "Origin": "https://evil.example"}, method)
        require_refusal(answer, 405, "method-not-allowed")
        assert answer.headers["allow"] == "GET, HEAD"


def test_a_long_address_is_refused(application: Starlette, program: dict[str, str]) -> None:
    for address in (f"{FINE}?q={'x' * 10_000}", f"{FINE}?q={'%2F' * 3_000}", f"/{'x' * 10_000}", f"/login?key={'x' * 10_000}"):
        require_refusal(ask(application, address, program), 414, "address-too-long")
    assert ask(application, f"{FINE}?q={'x' * (MOST_QUERY_BYTES - 100)}", program).text == "fine"


@pytest.mark.parametrize(
    "path",
    [
        "/static/../../home.json",
        "/static/..%2f..%2fhome.json",
        "/static/%2e%2e/%2e%2e/home.json",
        "/static/..%5c..%5chome.json",
        "/static//etc/passwd",
        "/static/%00",
        "/static/../api/v1/fleet",
        "/static/../api/fine",
        "/../home.json",
    ],
)
def test_no_path_leads_to_files_of_the_home_or_past_the_guard(path: str, home: Home, application: Starlette) -> None:
    answer = ask(application, path)
    require_headers(answer)
    assert answer.status in (400, 401, 404), answer
    assert str(home.id()) not in answer.text and "root:" not in answer.text


def test_every_answer_has_the_security_headers(application: Starlette, program: dict[str, str]) -> None:
    for path in (FINE, FAILING, "/no/such/page", "/healthz", "/login", "/static/none", "/api/v1/none", "/"):
        for headers in (NO_HEADERS, program):
            require_headers(ask(application, path, headers))
    require_refusal(ask(application, "/api/v1/none", program), 404, "not-found")


def test_an_unexpected_error_is_a_sentence_without_a_traceback(application: Starlette, program: dict[str, str]) -> None:
    answer = ask(application, FAILING, program)
    require_refusal(answer, 500, "internal-error")
    assert "detail of the fault" not in answer.text and "Traceback" not in answer.text


def test_an_error_within_an_answer_breaks_the_connection(application: Starlette, program: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match="detail of the fault"):
        ask(application, BREAKING, program)


def test_the_log_of_an_unexpected_error_has_its_cause_and_no_token(
    application: Starlette, program: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    ask(application, f"{FAILING}?key=one-time", program)
    output = "".join(capsys.readouterr())
    assert "detail of the fault" in output
    assert program["Authorization"].removeprefix("Bearer ") not in output
    assert "one-time" not in output


def test_damaged_tokens_let_nobody_in_and_name_no_path(home: Home, application: Starlette, program: dict[str, str]) -> None:
    (home.path / "web" / "tokens.json").write_text("{")
    answer = ask(application, FINE, program)
    require_refusal(answer, 500, "internal-error")
    assert str(home.path) not in answer.text


def test_a_connection_that_is_no_request_is_not_passed_on(application: Starlette) -> None:
    async def unused(*_: Any) -> Any:
        raise AssertionError("nothing is read or sent")

    asyncio.run(application({"type": "websocket", "path": FINE, "headers": []}, unused, unused))


def test_the_server_imports_nothing_that_compiles_or_judges() -> None:
    imported = "import sys, fleetpulse.web.app; print(sorted({'numba', 'pandas', 'scipy', 'pyspark'} & set(sys.modules)))"
    command = [sys.executable, "-P", "-c", imported]
    found = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n", "they take 120 MB"
