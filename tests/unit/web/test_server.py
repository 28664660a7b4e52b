"""Process of the HTTP server: TLS, address, lock, status file, and an end in spite of open streams."""

import http.client
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import trustme
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fleetpulse.core.errors import Misuse
from fleetpulse.core.replay import Deployment
from fleetpulse.io.home.home import PAGE, Home
from fleetpulse.io.home.services import page_holder
from fleetpulse.io.system.process import StopSignal, read_status
from fleetpulse.settings import load_settings
from fleetpulse.web import app
from fleetpulse.web.access import WebRole, grant_token
from fleetpulse.web.server import LOOPBACK, Listener, ServerTls, listener_of, page_port, run_server, server_tls
from tests.support.refusals import refused
from tests.support.wait import await_that

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certified(home: Home, authority: trustme.CA) -> Home:
    """Return the home with settings for TLS, and with files that only their owner can read."""
    (home.path / "tls").mkdir(0o755)
    home.path.chmod(0o755)
    certificate = authority.issue_cert("fleet.example", "127.0.0.1")
    key, chain = home.path / "tls" / "page.key", home.path / "tls" / "page.pem"
    certificate.private_key_pem.write_to_path(key)
    certificate.cert_chain_pems[0].write_to_path(chain)
    key.chmod(0o600)
    (home.path / "settings.toml").write_text('serve_certificate = "tls/page.pem"\nserve_key = "tls/page.key"\n')
    return home


@contextmanager
def serving(home: Home, listener: Listener) -> Iterator[str]:
    """Run a server in a thread; yield its address once it answers, and require that it ends."""
    stop, urls, faults = StopSignal(), list[str](), list[BaseException]()

    def run() -> None:
        try:
            run_server(home, listener, stop, "a test", urls.append)
        except BaseException as fault:  # noqa: BLE001 - reported by the main thread
            faults.append(fault)

    thread = Thread(target=run)
    thread.start()
    try:
        await_that(lambda: urls or faults, limit_s=60, what="the start of the server")
        assert not faults, faults
        yield urls[0]
    finally:
        stop.set()
        thread.join(30)
        stop.close()
    assert not thread.is_alive(), "it has not ended"
    assert not home.run(PAGE).exists()
    assert page_holder(home) is None


def listener(home: Home, **options: Any) -> Listener:
    return listener_of(home, load_settings(home.path), options.pop("host", LOOPBACK), options.pop("port", 0), **options)


def get(at: Listener, path: str, context: ssl.SSLContext | None = None, **headers: str) -> tuple[int, Any]:
    """Return status and content of an answer in JSON."""
    made: Callable[[], http.client.HTTPConnection] = (
        (lambda: http.client.HTTPConnection(LOOPBACK, at.port, timeout=60))
        if context is None
        else (lambda: http.client.HTTPSConnection(LOOPBACK, at.port, timeout=60, context=context))
    )
    with closing(made()) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_a_home_without_tables_is_served_as_an_empty_fleet(home: Home) -> None:
    require_empty_fleet(home)


@pytest.mark.home(tables=Deployment())
def test_a_home_whose_job_has_not_judged_is_served_as_an_empty_fleet(home: Home) -> None:
    require_empty_fleet(home)


def require_empty_fleet(home: Home) -> None:
    at = listener(home)
    token = grant_token(home, "test", WebRole.API_READER, 5)
    with serving(home, at) as url:
        assert url == at.url == f"http://127.0.0.1:{at.port}"
        status = read_status(home.run(PAGE))
        assert (status["url"], status["state"]) == (url, "running")
        assert get(at, "/healthz")[0] == 200
        status, ready = get(at, "/readyz")
        assert status == 200 or ready["error"]["message"]
        status, fleet = get(at, "/api/v1/fleet", Authorization=f"Bearer {token}")
        assert (status, fleet["devices"]) == (200, {})


def test_a_home_has_one_server(home: Home) -> None:
    with serving(home, listener(home)):
        stop = StopSignal()
        with refused("page-runs-already", match="by a test"):
            run_server(home, listener(home), stop, "another", print)
        stop.close()
        assert read_status(home.run(PAGE))["state"] == "running", "the refused server left the status of the other"


def test_a_status_file_that_a_starting_run_removed_is_written_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetpulse.web.server._STATUS_S", 0.0)
    with serving(home, listener(home)):
        home.run(PAGE).unlink()
        await_that(home.run(PAGE).exists, limit_s=30, what="the status file")


def test_a_server_ends_although_a_client_reads_a_stream(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    made = app.create_app

    def with_a_stream(*arguments: Any, **options: Any) -> Any:
        async def parts() -> AsyncIterator[bytes]:
            import asyncio

            while True:
                yield b"x"
                await asyncio.sleep(0.01)

        async def endless(_request: Request) -> Response:
            return StreamingResponse(parts())

        application = made(*arguments, **options)
        application.router.routes.insert(0, Route("/static/endless", endless))
        return application

    monkeypatch.setattr(app, "create_app", with_a_stream)
    monkeypatch.setattr("fleetpulse.web.server._STREAMS_S", 1)
    at = listener(home)
    with socket.socket() as client:
        with serving(home, at):
            client.connect((LOOPBACK, at.port))
            client.sendall(f"GET /static/endless HTTP/1.1\r\nHost: localhost:{at.port}\r\n\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        client.settimeout(30)
        while client.recv(65_536):
            pass  # the server closed the connection


def test_a_client_with_the_authority_reads_over_tls(certified: Home, authority: trustme.CA) -> None:
    at = listener(certified)
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with serving(certified, at) as url:
        assert url == f"https://127.0.0.1:{at.port}"
        assert get(at, "/healthz", context) == (200, {"status": "ok"})
        with pytest.raises((http.client.BadStatusLine, ConnectionError)):
            get(at, "/healthz")  # not without TLS


def test_a_key_that_other_users_can_read_is_refused(certified: Home) -> None:
    (certified.path / "tls" / "page.key").chmod(0o640)
    tls = server_tls(certified, load_settings(certified.path))
    assert tls is not None
    with refused("secret-exposed", match="chmod 600"):
        tls.context()


def test_a_key_within_the_file_of_the_certificate_is_checked_there(home: Home, authority: trustme.CA) -> None:
    home.path.chmod(0o755)
    path = home.path / "page.pem"
    authority.issue_cert("fleet.example").private_key_and_cert_chain_pem.write_to_path(path)
    path.chmod(0o644)
    with refused("secret-exposed"):
        ServerTls(path, None).context()
    path.chmod(0o600)
    ServerTls(path, None).context()


def test_files_that_cannot_be_used_for_tls_are_refused(certified: Home, authority: trustme.CA) -> None:
    folder = certified.path / "tls"
    other = folder / "other.key"
    authority.issue_cert("other.example").private_key_pem.write_to_path(other)
    other.chmod(0o600)
    for certificate, key in (
        (folder / "none.pem", None),
        (folder / "page.pem", other),
        (folder / "page.pem", None),
        (other, None),
    ):
        with refused("serve-certificate-unreadable", match="serve_certificate and serve_key"):
            ServerTls(certificate, key).load()


def test_a_key_without_a_certificate_is_refused(home: Home) -> None:
    (home.path / "settings.toml").write_text('serve_key = "page.key"\n')
    with refused("serve-certificate-missing"):
        server_tls(home, load_settings(home.path))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_unencrypted_server_beyond_the_loopback_is_refused(host: str, home: Home) -> None:
    with refused("serve-without-tls", match="--plain"):
        listener(home, host=host)


def test_a_server_for_trusted_hosts_may_be_unencrypted(home: Home) -> None:
    at = listener(home, host="0.0.0.0", plain=True)
    assert at.url == f"http://127.0.0.1:{at.port}"


@pytest.mark.parametrize("host", ["localhost", "", "fleet.example", "127.0.0.1:80"])
def test_a_listening_address_is_an_ip_address(host: str, home: Home) -> None:
    with refused("option-invalid", Misuse):
        listener(home, host=host)


def test_names_and_address_of_a_listener_are_those_of_a_browser(home: Home) -> None:
    (home.path / "settings.toml").write_text('serve_hosts = ["fleet.example"]\n')
    at = listener(home)
    assert set(at.names) == {"localhost", "127.0.0.1", "[::1]", "fleet.example"}
    tls = ServerTls(Path("page.pem"), None)
    assert Listener("::1", 5).url == "http://[::1]:5"
    assert "[fd00::1]" in Listener("fd00::1", 5, tls).names
    assert Listener("fd00::1", 5, tls, ("fleet.example",)).url == "https://fleet.example:5"


def test_a_port_in_use_is_refused_with_the_option_that_chooses_another(home: Home) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with refused("port-in-use", match="--page-port 0"):
            page_port(port)
        with refused("port-in-use", match="--port 0"):
            listener(home, port=port)
        stop = StopSignal()
        with refused("port-in-use"):  # taken between the choice of the port and the start
            run_server(home, Listener(LOOPBACK, port), stop, "a test", print)
        stop.close()
    assert not home.run(PAGE).exists()
    assert page_port(0) > 0
