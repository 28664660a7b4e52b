"""Process of the HTTP server: its address, TLS, lock, status file and end.

Rule 1: a home has one server, which holds a lock. Its status file has the address, and is written again every few
seconds: a run of everything that starts removes the files of earlier processes.
Rule 2: beyond the loopback interface, the server needs TLS, or the explicit request for an unencrypted listener.
Rule 3: the server ends within seconds after a stop request, even while a client reads a stream.
"""

import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final

from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.operations.secret_files import exposed_secret
from fleetpulse.io.home.home import PAGE, Home
from fleetpulse.io.home.services import page_held
from fleetpulse.io.system.ports import free_port
from fleetpulse.io.system.process import StopSignal, write_status
from fleetpulse.settings import Settings

if TYPE_CHECKING:
    import uvicorn

PORT: Final = 8090
LOOPBACK: Final = "127.0.0.1"
_OWN_NAMES: Final = ("localhost", LOOPBACK, "[::1]")
_STREAMS_S: Final = 5  # time for open answers to end after a stop request
_START_S: Final = 30.0
_STATUS_S: Final = 5.0
_TICK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS files of the server.

    Attributes:
        certificate: PEM file of its certificate, followed by intermediate ones.
        key: PEM file of the key, unencrypted; None if the first file contains it.
    """

    certificate: Path
    key: Path | None

    @property
    def secret(self) -> Path:
        """File that contains the key."""
        return self.key or self.certificate

    def load(self) -> ssl.SSLContext:
        """Return the TLS context of the server.

        Raises:
            FleetError: a file is missing, or cannot be read or used.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate, self.key, password="")  # instead of a prompt for an encrypted key
        except OSError as error:
            raise FleetError(
                f"the HTTP server cannot use the files of serve_certificate and serve_key ({error.strerror or error}); name PEM "
                f"files that fleetpulse may read, with an unencrypted key that belongs to the certificate",
                code="serve-certificate-unreadable",
            ) from None
        return context

    def context(self) -> ssl.SSLContext:
        """Do as `load`, and check that other users cannot read the key.

        Raises:
            FleetError: see `load`; or other users can read the key.
        """
        context = self.load()
        file, folder = self.secret.stat(), self.secret.absolute().parent.stat()
        if (exposed := exposed_secret(self.secret, "the key of the HTTP server", file, folder, os.geteuid())) is not None:
            raise exposed
        return context


def server_tls(home: Home, settings: Settings) -> ServerTls | None:
    """Return the TLS files that the settings name; None without a certificate.

    Raises:
        FleetError: the settings name a key without a certificate.
    """
    if not settings.serve_certificate:
        if settings.serve_key:
            raise FleetError(
                "serve_key names a key without a certificate; set serve_certificate as well, or remove serve_key",
                code="serve-certificate-missing",
            )
        return None
    key = home.path / Path(settings.serve_key).expanduser() if settings.serve_key else None
    return ServerTls(home.path / Path(settings.serve_certificate).expanduser(), key)


@dataclass(frozen=True, slots=True)
class Listener:
    """Address of a server, and the names by which clients may address it.

    Attributes:
        host: IP address to listen at.
        port: port.
        tls: TLS files; None without TLS.
        hosts: further names.
    """

    host: str
    port: int
    tls: ServerTls | None = None
    hosts: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Hosts that a request may name, as they stand in addresses."""
        return (*_OWN_NAMES, _in_url(self.host), *self.hosts)

    @property
    def url(self) -> str:
        """Address for a browser on this machine."""
        host = LOOPBACK if ipaddress.ip_address(self.host).is_unspecified else _in_url(self.host)
        if self.tls is not None and self.hosts:
            host = self.hosts[0]  # a certificate names a host, seldom an address
        return f"{'http' if self.tls is None else 'https'}://{host}:{self.port}"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def listener_of(home: Home, settings: Settings, host: str, port: int, *, plain: bool = False) -> Listener:
    """Return the listener of a server, whose port is free.

    Args:
        home: home of the server.
        settings: settings of the home.
        host: IP address to listen at.
        port: port; 0 for a free one.
        plain: whether an unencrypted listener beyond the loopback interface is requested.

    Raises:
        FleetError: the port is in use, or TLS is missing beyond the loopback interface, or its settings are wrong.
        Misuse: the host is no IP address.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise Misuse(
            f'--listen must be an IP address; got "{host}"; write one such as {LOOPBACK}', code="option-invalid"
        ) from None
    tls = server_tls(home, settings)
    if not is_loopback and tls is None and not plain:
        raise FleetError(
            f"beyond the loopback interface, the HTTP server needs TLS: tokens and sessions would be readable on the network; "
            f"set serve_certificate and serve_key, listen at {LOOPBACK}, or pass --plain if only trusted hosts reach the address",
            code="serve-without-tls",
        )
    return Listener(host, page_port(port, host, "--port"), tls, settings.serve_hosts)


def page_port(port: int, host: str = LOOPBACK, option: str = "--page-port", alternative: str = "") -> int:
    """Return a free port for the HTTP server.

    Args:
        port: requested port; 0 for any free one.
        host: address to listen at.
        option: option that chooses the port, for the error.
        alternative: further advice for the error.

    Raises:
        FleetError: the port is in use.
    """

    def refused(why: str) -> FleetError:
        return FleetError(
            f"cannot bind port {port} for the HTTP server ({why}); choose another ({option} 0 takes a free one){alternative}",
            code="port-in-use",
        )

    return free_port(host, port, refused)


def run_server(home: Home, listener: Listener, stop: StopSignal, by: str, on_start: Callable[[str], None]) -> None:
    """Run the server until stopped.

    Args:
        home: home to show.
        listener: its address.
        stop: signal to end.
        by: name of this process, for error messages of others.
        on_start: function that is called with the address once the server answers.

    Raises:
        FleetError: another server of the home runs, a file of TLS cannot be used, the port is in use, or the server ended.
    """
    import uvicorn

    from fleetpulse.web.app import create_app
    from fleetpulse.web.live import QUERY_S

    context = None if listener.tls is None else listener.tls.context()
    with page_held(home, by), _bound(listener) as accepting:
        app = create_app(home, hosts=listener.names)
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_level="warning",
            access_log=False,  # addresses of logins have keys
            server_header=False,
            timeout_graceful_shutdown=_STREAMS_S,
            h11_max_incomplete_event_size=32_768,
            ssl_context_factory=None if context is None else lambda *_: context,
        )
        server = uvicorn.Server(config)
        # Only the main thread receives signals: the thread of the server leaves them to `StopSignal`.
        thread = Thread(target=server.run, args=([accepting],), name="http", daemon=True)
        thread.start()
        try:
            _watch(home, listener.url, server, thread, stop, on_start)
        finally:
            app.state.streams.close()  # a server waits for open streams
            server.should_exit = True
            thread.join(_STREAMS_S + QUERY_S + 1)
            home.run(PAGE).unlink(missing_ok=True)


def _bound(listener: Listener) -> socket.socket:
    try:
        return socket.create_server(
            (listener.host, listener.port), family=socket.AF_INET6 if ":" in listener.host else socket.AF_INET, backlog=512
        )
    except OSError as error:
        raise FleetError(
            f"cannot bind port {listener.port} for the HTTP server ({error.strerror}); choose another, or stop its user",
            code="port-in-use",
        ) from None


def _watch(
    home: Home, url: str, server: "uvicorn.Server", thread: Thread, stop: StopSignal, on_start: Callable[[str], None]
) -> None:
    """Write the status until a stop request; raise an error if the server ended."""
    began_s = written_s = time.monotonic()
    state = "starting"
    write_status(home.run(PAGE), {"pid": os.getpid(), "state": state, "url": url})
    while not stop.wait(_TICK_S):
        now_s = time.monotonic()
        if not thread.is_alive() or (not server.started and now_s - began_s > _START_S):
            raise FleetError(f"the HTTP server at {url} did not start, or ended; see its output", code="serve-ended")
        is_new = server.started and state == "starting"
        if is_new or now_s - written_s >= _STATUS_S:
            state, written_s = "running" if server.started else state, now_s
            write_status(home.run(PAGE), {"pid": os.getpid(), "state": state, "url": url})
        if is_new:
            on_start(url)
