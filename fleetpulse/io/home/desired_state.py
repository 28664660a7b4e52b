"""Whether the lifecycle job is to run: written down, so that whoever supervises it obeys the same word.

Rule: a job that is to be stopped is started by nobody, however often it is looked after; only the word is changed. A process
that stops it for as long as it works holds a lock meanwhile: with the process its word is gone. Who acts on a word that was
read writes only while that is still the word.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.system.locks import briefly, held, holder
from fleetpulse.io.system.wall_clock import wall_clock_ms

RUNNING: Final = "running"
STOPPED: Final = "stopped"


@dataclass(frozen=True, slots=True)
class Desired:
    """The word.

    Attributes:
        what: running or stopped.
        by: who said so.
        at_ms: when, epoch milliseconds.
        meanwhile: whether it holds only while who said so is at work.
    """

    what: str = RUNNING
    by: str = "nobody yet"
    at_ms: int = 0
    meanwhile: bool = False


def get_desired(home: Home) -> Desired:
    """Return what is written down; running where nothing is."""
    try:
        found = Desired(**json.loads((home.path / "desired.json").read_text()))
        if found.what == STOPPED and found.meanwhile and holder(_at_work(home)) is None:
            return Desired(RUNNING, found.by, found.at_ms)
        return found
    except FileNotFoundError:
        return Desired()
    except (OSError, ValueError, TypeError) as error:
        raise FleetError(
            f'"{home.path}/desired.json" is damaged ({error}); say it again: ./fleet stream start --home {home.path}',
            code="desired-state-damaged",
        ) from None


def set_desired(home: Home, what: str, by: str, *, meanwhile: bool = False, only_if: Desired | None = None) -> Desired | None:
    """Write down what is wanted.

    Args:
        home: the home.
        what: running or stopped.
        by: who says so.
        meanwhile: whether it holds only while `stopped_meanwhile` is at work.
        only_if: the word that was read; where another has been said since, nothing is written. None writes whatever there is.

    Returns:
        The word as it is written down; None where another had been said.

    Raises:
        FleetError: the system refuses.
    """
    try:
        with briefly(home.path / "word.lock"):
            if only_if is not None and get_desired(home) != only_if:
                return None
            written = Desired(what, by, wall_clock_ms(), meanwhile)
            atomic_write(home.path / "desired.json", json.dumps(asdict(written)))
            return written
    except OSError as error:
        raise FleetError(
            f'"{home.path}/desired.json" cannot be written ({error.strerror}); see to it and try again',
            code="desired-state-unwritable",
        ) from None


@contextmanager
def stopped_meanwhile(home: Home, by: str) -> Iterator[None]:
    """Want the job stopped for as long as the block runs; with its process the word is gone.

    Afterwards the former word is said again. Where somebody else wants it stopped, before or meanwhile, it stays so.

    Raises:
        FleetError: another does so, or the system refuses.
    """

    def refused(other: str) -> FleetError:
        return FleetError(
            f"{other} has stopped the lifecycle job for its own work; let it end, and try again", code="stream-stopped-by-other"
        )

    with held(_at_work(home), by, refused):
        former, ours = get_desired(home), None
        while former.what == RUNNING and ours is None:
            ours = set_desired(home, STOPPED, f"{by} (process {os.getpid()})", meanwhile=True, only_if=former)
            former = former if ours else get_desired(home)
        try:
            yield
        finally:
            if ours is not None:
                set_desired(home, former.what, former.by, only_if=ours)


def _at_work(home: Home) -> Path:
    return home.path / "desired.lock"
