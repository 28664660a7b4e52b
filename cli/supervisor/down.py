"""``fleet down``: the run that uses a home, stopped from outside."""

import os
import signal
import time
from typing import Final

import psutil
import typer

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import services

_DOWN_S: Final = 300.0


def down(home: Home) -> None:
    """Stop the run that uses a home, and wait for it.

    Raises:
        FleetError: it does not come to an end.
    """
    home.record()
    if here := services(home):
        raise FleetError(
            f'in "{home.path}" run services ({", ".join(here)}), which would be started again; stop them where they are '
            f"supervised: systemctl stop fleetpulse.target, or docker compose stop",
            code="home-runs-services",
        )
    owner = home.owner()
    if owner is None:
        typer.echo(f'nothing runs in "{home.path}"')
        return
    try:
        process = psutil.Process(owner)
        os.kill(owner, signal.SIGTERM)
        limit = time.monotonic() + _DOWN_S
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # its parent may not ask how it ended
            if time.monotonic() > limit:
                raise FleetError(
                    f"process {owner} does not come to an end; see the logs in {home.logs}, then: kill -9 {owner}",
                    code="process-not-ending",
                )
            time.sleep(0.1)
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass
    typer.echo(f'stopped what ran in "{home.path}"')
