"""Who makes generations and snapshots, and who maintains: one at a time, since each relies on what the others may remove."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.locks import held, holder

MAINTAIN_LOCK: Final = "maintain.lock"
PATIENCE_S: Final = 600.0


class _Busy(Exception):
    """Another holds it."""


@contextmanager
def exclusive_state_change(home: Home, by: str, say: Callable[[str], None]) -> Iterator[None]:
    """Make a generation or a snapshot: alone, and while nothing is maintained; who comes second waits ten minutes.

    Args:
        home: the home.
        by: who, in words.
        say: told what is waited for.

    Raises:
        FleetError: another still does.
    """
    home.lifecycle.mkdir(parents=True, exist_ok=True)
    with _alone((_making(home), home.path / MAINTAIN_LOCK), by, say, PATIENCE_S):
        yield


@contextmanager
def exclusive_maintenance(home: Home, say: Callable[[str], None], patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Maintain a home: alone, and while no generation and no snapshot is made; who comes second waits.

    Args:
        home: the home.
        say: told what is waited for.
        patience_s: for how long.

    Raises:
        FleetError: another is still at work.
    """
    with _alone((home.path / MAINTAIN_LOCK,), "fleet maintain", say, patience_s):
        yield


@contextmanager
def pause_state_changes(home: Home, by: str) -> Iterator[str]:
    """Let nobody make a generation or a snapshot for a moment, where nobody does; does not wait. For one who maintains.

    Args:
        home: the home.
        by: who, in words.

    Yields:
        Who is at work, so that they are not kept out; empty where nobody is.
    """
    home.lifecycle.mkdir(parents=True, exist_ok=True)
    with ExitStack() as locks:
        other = ""
        try:
            locks.enter_context(held(_making(home), by, _Busy))
        except _Busy as busy:
            other = str(busy)
        yield other


@contextmanager
def _alone(paths: Sequence[Path], by: str, say: Callable[[str], None], patience_s: float) -> Iterator[None]:
    """Hold the locks of some files, taken in order; the operating system lets go of them whatever way the process dies."""
    limit, told = time.monotonic() + patience_s, False
    with ExitStack() as locks:
        for path in paths:
            while True:
                try:
                    locks.enter_context(held(path, by, _Busy))
                    break
                except _Busy as other:
                    if time.monotonic() > limit:
                        raise FleetError(
                            f"{other} is still at work after {patience_s:.0f} s; let it end, and try again",
                            code="work-still-running",
                        ) from None
                    if not told:
                        say(f"waiting for {other}")
                        told = True
                time.sleep(0.5)
        yield


def is_making(home: Home) -> bool:
    """Whether somebody makes a generation or a snapshot now; what is half made and nobody's is left over."""
    return holder(_making(home)) is not None


def is_maintaining(home: Home) -> bool:
    """Whether somebody maintains the home now, or makes a generation or a snapshot meanwhile."""
    return holder(home.path / MAINTAIN_LOCK) is not None


def _making(home: Home) -> Path:
    return home.lifecycle / "making"
