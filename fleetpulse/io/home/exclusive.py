"""Mutual exclusion of state changes (generations, snapshots) and maintenance.

Each relies on files that the others may remove, so they run one at a time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.locks import lock_holder, named_lock

MAINTAIN_LOCK: Final = "maintain.lock"
PATIENCE_S: Final = 600.0
RELEASE_S: Final = 120.0  # longest wait for a job that stops


class _Busy(Exception):
    """Another process holds the lock; the text is its name."""


@contextmanager
def exclusive_state_change(home: Home, by: str, report: Callable[[str], None]) -> Iterator[None]:
    """Hold the locks for making a generation or a snapshot until the context exits.

    Waits up to ten minutes for another state change or for maintenance.

    Args:
        home: home whose state changes.
        by: name of the holder, for messages of other processes.
        report: callback that reports the process being waited for.

    Raises:
        FleetError: another process still holds a lock after the wait.
    """
    home.lifecycle.mkdir(parents=True, exist_ok=True)
    with _locked((_making(home), home.path / MAINTAIN_LOCK), by, report, PATIENCE_S):
        yield


@contextmanager
def exclusive_maintenance(home: Home, report: Callable[[str], None], patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the lock for maintenance of a home until the context exits.

    Waits for other maintenance, and for a process that makes a generation or a snapshot.

    Args:
        home: home to be maintained.
        report: callback that reports the process being waited for.
        patience_s: longest wait, seconds.

    Raises:
        FleetError: another process still holds the lock after the wait.
    """
    with _locked((home.path / MAINTAIN_LOCK,), "fleet maintain", report, patience_s):
        yield


@contextmanager
def pause_state_changes(home: Home, by: str) -> Iterator[str]:
    """Prevent new generations and snapshots during a short step of maintenance.

    Does not wait: a process that is already making one continues, and the lock is not held.

    Args:
        home: home that is being maintained.
        by: name of the holder, for messages of other processes.

    Yields:
        Name of the process that is making a generation or snapshot; empty if there is none, and the
        lock is held.
    """
    home.lifecycle.mkdir(parents=True, exist_ok=True)
    with ExitStack() as locks:
        other = ""
        try:
            locks.enter_context(named_lock(_making(home), by, _Busy))
        except _Busy as busy:
            other = str(busy)
        yield other


@contextmanager
def _locked(paths: Sequence[Path], by: str, report: Callable[[str], None], patience_s: float) -> Iterator[None]:
    """Hold locks of files, acquired in order, until the context or the process ends."""
    limit, reported = time.monotonic() + patience_s, False
    with ExitStack() as locks:
        for path in paths:
            while True:
                try:
                    locks.enter_context(named_lock(path, by, _Busy))
                    break
                except _Busy as other:
                    if time.monotonic() > limit:
                        raise FleetError(
                            f"{other} is still running after {patience_s:.0f} s; wait until it has ended, and try again",
                            code="work-still-running",
                        ) from None
                    if not reported:
                        report(f"waiting for {other}")
                        reported = True
                time.sleep(0.5)
        yield


def await_state_free(home: Home) -> None:
    """Wait until no process holds the lock of the lifecycle job's checkpoints.

    The desired state of the job must be stopped.

    Raises:
        FleetError: a process still holds the lock after `RELEASE_S`.
    """
    limit = time.monotonic() + RELEASE_S
    while holder := home.state_holder():
        if time.monotonic() > limit:
            raise FleetError(
                f"{holder} has not released the state within {RELEASE_S:.0f} s; see the logs in {home.logs}",
                code="state-still-held",
            )
        time.sleep(0.1)


def is_making(home: Home) -> bool:
    """Return whether a process is making a generation or a snapshot.

    If not, a half-made generation is left over from a process that was killed.
    """
    return lock_holder(_making(home)) is not None


def is_maintaining(home: Home) -> bool:
    """Return whether a process maintains the home, or makes a generation or snapshot."""
    return lock_holder(home.path / MAINTAIN_LOCK) is not None


def _making(home: Home) -> Path:
    return home.lifecycle / "making"
