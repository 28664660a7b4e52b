"""``fleet serve``: HTTP server with the API, the metrics and the operations page."""

import os
from typing import Annotated, Final

import typer

from cli.common.options import DEFAULT_HOME, HomeOption
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.process import StopSignal, block_imports

PORT: Final = 8090
LOOPBACK: Final = "127.0.0.1"
NICENESS: Final = 10  # the server yields to the processes that receive and judge


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    home: HomeOption = DEFAULT_HOME,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 for any free port.")] = PORT,
    listen: Annotated[str, typer.Option("--listen", help="Address to listen at; beyond the loopback only with TLS.")] = LOOPBACK,
    plain: Annotated[bool, typer.Option("--plain", help="Allow --listen beyond the loopback interface without TLS.")] = False,
) -> None:
    """Serve the API, the metrics and the operations page of a home.

    Prints a one-time address, which logs the browser in. For programs, grant a token with: fleet access
    grant NAME --role api-reader.
    """
    opened = Home(home)
    opened.record()  # raises if there is no fleet
    block_imports("pandas")
    from fleetpulse.settings import load_settings
    from fleetpulse.web.access import login_address
    from fleetpulse.web.server import listener_of, run_server

    def invite(url: str) -> None:
        typer.echo(f"page: {login_address(opened, url)}", err=True)
        typer.echo(f"      valid once, for 10 minutes; print a new one with: ./fleet access login --home {opened.path}", err=True)

    os.nice(NICENESS)
    listener = listener_of(opened, load_settings(home), listen, port, plain=plain)
    run_server(opened, listener, StopSignal().on_signals(), "fleet serve", invite)
