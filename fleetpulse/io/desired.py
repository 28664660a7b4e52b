"""Whether the lifecycle job is to run: written down, so that whoever supervises it obeys the same word.

Rule: a job that is to be stopped is started by nobody, however often it is looked after; only the word is changed. A process
that stops it for as long as it works says so by its number: with the process its word is gone.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Final

import psutil

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home import Home

RUNNING: Final = "running"
STOPPED: Final = "stopped"


@dataclass(frozen=True, slots=True)
class Desired:
    """The word.

    Attributes:
        what: running or stopped.
        by: who said so.
        at_ms: when, epoch milliseconds.
    """

    what: str = RUNNING
    by: str = "nobody yet"
    at_ms: int = 0


def desired(home: Home) -> Desired:
    """Return what is written down; running where nothing is."""
    try:
        found = Desired(**json.loads((home.path / "desired.json").read_text()))
        _, for_itself, process = found.by.rpartition(" (process ")
        if found.what == STOPPED and for_itself and not psutil.pid_exists(int(process.rstrip(")"))):
            return Desired(RUNNING, found.by, found.at_ms)
        return found
    except FileNotFoundError:
        return Desired()
    except (OSError, ValueError, TypeError) as error:
        raise FleetError(f'"{home.path}/desired.json" is damaged ({error}); say it again: ./fleet stream start --home {home.path}'
                         ) from None  # fmt: skip


def desire(home: Home, what: str, by: str) -> None:
    """Write down what is wanted.

    Raises:
        FleetError: the system refuses.
    """
    fresh = home.path / f".desired.{os.getpid()}"
    try:
        fresh.write_text(json.dumps(asdict(Desired(what, by, int(time.time() * 1000)))))
        fresh.replace(home.path / "desired.json")
    except OSError as error:
        raise FleetError(f'"{home.path}/desired.json" cannot be written ({error.strerror}); see to it and try again') from None
