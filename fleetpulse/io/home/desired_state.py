"""Desired state of the lifecycle job: running, or stopped by a person or process.

Rule 1: no supervisor starts a job whose desired state is stopped. Only a change of the desired
state starts it again.
Rule 2: a process can stop the job for the duration of its own work. It holds a lock meanwhile; the
stop ends with the process, even if it is killed.
Rule 3: a process that acts on a desired state replaces it only if no other one was set meanwhile.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.system.locks import exclusive_lock, lock_holder, named_lock
from fleetpulse.io.system.wall_clock import wall_clock_ms

RUNNING: Final = "running"
STOPPED: Final = "stopped"


@dataclass(frozen=True, slots=True)
class DesiredState:
    """Desired state of the lifecycle job.

    Attributes:
        state: desired state, `RUNNING` or `STOPPED`.
        by: name of the person or process that set it.
        at_ms: time of the change, epoch milliseconds.
        temporary: whether it is in force only while the process that set it is in
            `temporarily_stopped`.
    """

    state: str = RUNNING
    by: str = "nobody yet"
    at_ms: int = 0
    temporary: bool = False


def get_desired(home: Home) -> DesiredState:
    """Return the desired state; running if none was set.

    Raises:
        FleetError: the file of the desired state is damaged.
    """
    try:
        found = _read(**json.loads((home.path / "desired.json").read_text()))
        if found.state == STOPPED and found.temporary and lock_holder(_at_work(home)) is None:
            return DesiredState(RUNNING, found.by, found.at_ms)
        return found
    except FileNotFoundError:
        return DesiredState()
    except (OSError, ValueError, TypeError) as error:
        raise FleetError(
            f'"{home.path}/desired.json" is damaged ({error}); set it again with: ./fleet stream start --home {home.path}',
            code="desired-state-damaged",
        ) from None


def _read(what: str, meanwhile: bool = False, **others: Any) -> DesiredState:
    """Return the state in a file, whose keys are those of homes of version 1."""
    return DesiredState(what, temporary=meanwhile, **others)


def _entry(state: DesiredState) -> dict[str, Any]:
    return {"what": state.state, "by": state.by, "at_ms": state.at_ms, "meanwhile": state.temporary}


def set_desired(
    home: Home, state: str, by: str, *, temporary: bool = False, only_if: DesiredState | None = None
) -> DesiredState | None:
    """Set the desired state, optionally only if it has not changed since it was read.

    Args:
        home: home of the job.
        state: new state, `RUNNING` or `STOPPED`.
        by: name of the person or process that sets it.
        temporary: whether it is in force only while `temporarily_stopped` runs.
        only_if: desired state that the caller has read. Nothing is written if another one was set
            since. None writes in any case.

    Returns:
        The desired state as written; None if another one was set since ``only_if`` was read.

    Raises:
        FleetError: the file cannot be written.
    """
    try:
        with exclusive_lock(home.path / "desired.lock"):
            if only_if is not None and get_desired(home) != only_if:
                return None
            written = DesiredState(state, by, wall_clock_ms(), temporary)
            atomic_write(home.path / "desired.json", json.dumps(_entry(written)))
            return written
    except OSError as error:
        raise FleetError(
            f'"{home.path}/desired.json" cannot be written ({error.strerror}); fix the cause and try again',
            code="desired-state-unwritable",
        ) from None


@contextmanager
def temporarily_stopped(home: Home, by: str) -> Iterator[None]:
    """Set the desired state to stopped until the context exits or its process dies.

    On exit, the previous state is restored. If another person or process stopped the job before or
    meanwhile, it stays stopped.

    Args:
        home: home of the job.
        by: name of the process that stops it.

    Raises:
        FleetError: another process is in this context, or the file cannot be written.
    """

    def refused(other: str) -> FleetError:
        return FleetError(
            f"{other} has stopped the lifecycle job for its own work; wait until it has ended, and try again",
            code="stream-stopped-by-other",
        )

    with named_lock(_at_work(home), by, refused):
        former, own = get_desired(home), None
        while former.state == RUNNING and own is None:
            own = set_desired(home, STOPPED, f"{by} (process {os.getpid()})", temporary=True, only_if=former)
            former = former if own else get_desired(home)
        try:
            yield
        finally:
            if own is not None:
                set_desired(home, former.state, former.by, only_if=own)


def _at_work(home: Home) -> Path:
    return home.path / "temporary-stop.lock"
