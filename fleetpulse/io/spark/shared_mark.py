"""Mark in the folder of a session on a cluster, which each executor looks for before its first task.

The session checks the executors that have registered at its start (`cluster.require_shared`). An
executor that joins later could miss the mount of the home: it would read an empty folder. So its
daemon of Python workers does not start without the mark.

Rule: an executor without the mark runs no Python task. The error reaches the driver.
"""

import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError

_MARK: Final = "mark"
_PATH: Final = "FLEET_SHARED_MARK"
_TOKEN: Final = "FLEET_SHARED_TOKEN"  # noqa: S105 - the name of a variable; its value is no secret


def mark_shared(folder: Path) -> Mapping[str, str]:
    """Write a new mark; return the variables of an executor's environment that name it.

    Args:
        folder: folder of the session, below the home.
    """
    path, token = folder / _MARK, secrets.token_hex(16)
    path.write_text(token)
    return {_PATH: str(path), _TOKEN: token}


def require_mark(environment: Mapping[str, str]) -> None:
    """Check that this process finds the mark that its environment names, if any.

    Raises:
        FleetError: the mark is missing, or is that of another session.
    """
    if (named := environment.get(_PATH)) is None:
        return
    try:
        found = "" if Path(named).read_text() == environment.get(_TOKEN) else "it is that of another session"
    except OSError as error:
        found = str(error.strerror)
    if found:
        raise FleetError(
            f'the executor on {socket.gethostname()} does not share the home with the driver: "{named}" ({found}); mount the '
            f"file system of the home on this host at the same path, and run the worker as the owner of the home",
            code="home-not-shared",
        )
