"""``fleet down``: stop the run that uses a home, from another process."""

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
    """Stop the run that uses a home, and wait until it has ended.

    Raises:
        FleetError: the home runs services, or the run did not end in time.
    """
    home.record()
    if running := services(home):
        raise FleetError(
            f'services run in "{home.path}" ({", ".join(running)}), and their supervisor would restart them; stop them there: '
            f"systemctl stop fleetpulse.target, or docker compose stop",
            code="home-runs-services",
        )
    owner = home.owner()
    if owner is None:
        typer.echo(f'no process runs in "{home.path}"')
        return
    try:
        process = psutil.Process(owner)
        os.kill(owner, signal.SIGTERM)
        limit = time.monotonic() + _DOWN_S
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:  # its parent may never reap it
            if time.monotonic() > limit:
                raise FleetError(
                    f"process {owner} has not ended; see the logs in {home.logs}, then: kill -9 {owner}",
                    code="process-not-ending",
                )
            time.sleep(0.1)
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass
    typer.echo(f'stopped the run in "{home.path}"')
