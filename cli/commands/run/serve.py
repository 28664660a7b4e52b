"""``fleet serve``: HTTP server with the API, the metrics and the operations page."""

import ipaddress
from pathlib import Path
from typing import Annotated, Final

import typer

from cli.common.options import DEFAULT_HOME, HomeOption
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.ports import free_port

PORT: Final = 8090
LOOPBACK: Final = "127.0.0.1"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    home: HomeOption = DEFAULT_HOME,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 for any free port.")] = PORT,
    listen: Annotated[str, typer.Option("--listen", help="Address to listen at; beyond the loopback only with TLS.")] = LOOPBACK,
) -> None:
    """Serve the API, the metrics and the operations page of a home.

    Prints a one-time address, which logs the browser in. For programs, grant a token with: fleet access
    grant NAME --role api-reader.
    """
    opened = Home(home)
    opened.record()  # raises if there is no fleet
    run_server(opened, listen, port)


def run_server(home: Home, listen: str, port: int, tls: tuple[Path, Path] | None = None) -> None:
    """Run the server until SIGTERM or Ctrl-C.

    Args:
        home: home to show.
        listen: IP address to listen at.
        port: port; 0 for a free one.
        tls: files of the certificate and of its key; None without TLS.

    Raises:
        FleetError: the port is in use, or TLS is missing beyond the loopback.
    """
    import uvicorn

    from fleetpulse.web.access import login_key
    from fleetpulse.web.app import create_app

    try:
        is_loopback = ipaddress.ip_address(listen).is_loopback
    except ValueError:
        raise Misuse(
            f'--listen must be an IP address; got "{listen}"; write one such as {LOOPBACK}', code="option-invalid"
        ) from None
    if not is_loopback and tls is None:
        raise FleetError(
            f"beyond the loopback, the server needs TLS: tokens and sessions would be readable on the network; set "
            f"serve_certificate and serve_key, or listen at {LOOPBACK} behind a proxy with TLS",
            code="serve-without-tls",
        )

    def refused(why: str) -> FleetError:
        return FleetError(f"cannot bind port {port} ({why}); choose another with --port; 0 takes a free one", code="port-in-use")

    chosen = free_port(listen, port, refused)
    scheme = "http" if tls is None else "https"
    typer.echo(f"page: {scheme}://{listen}:{chosen}/login?key={login_key(home)}", err=True)
    typer.echo("      valid once, for 10 minutes; print a new one with: ./fleet access login", err=True)
    app = create_app(home, hosts=("localhost", "127.0.0.1", "[::1]", listen.lower()))
    config = uvicorn.Config(
        app,
        host=listen,
        port=chosen,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        ssl_certfile=str(tls[0]) if tls else None,
        ssl_keyfile=str(tls[1]) if tls else None,
        h11_max_incomplete_event_size=32_768,
    )
    uvicorn.Server(config).run()
