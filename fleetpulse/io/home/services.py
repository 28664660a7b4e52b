"""Services of a home: its parts run as separate processes, and their locks.

Rule 1: a full run (``./fleet up``, ``replay`` or ``chaos``) holds the home's lock exclusively.
Services share this lock, and each holds a lock of its own as well (ADR 18).
Rule 2: only these locks show whether a service runs: a status file may outlive its process.
Rule 3: the HTTP server of a home holds a lock, whichever command started it: a home has one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import PAGE, PUBLISHER, SERVICES, Home, bridge_job
from fleetpulse.io.system.locks import lock_holder, named_lock, shared_lock


class Service(StrEnum):
    """Part of a home that can run as a separate process; listed in start order."""

    BROKER = "broker"
    LIFECYCLE = "lifecycle"
    LANDING = "landing"
    BRIDGE = "bridge"  # all bridges of the home, and the publisher of verdicts
    PAGE = "page"  # HTTP server, which only reads the home


@contextmanager
def served(home: Home, service: Service) -> Iterator[None]:
    """Hold the locks of one service until the context exits.

    Other services of the home can run at the same time; a full run cannot.

    Args:
        home: home of the service.
        service: service that runs.

    Raises:
        FleetError: a full run holds the home, or the same service is already running.
    """

    def twice(other: str) -> FleetError:
        return FleetError(
            f'{other} is already running in "{home.path}"; stop it, or choose another home with --home',
            code="service-runs-already",
        )

    with (
        shared_lock(home.path / "lock", SERVICES, home.in_use_by),
        named_lock(_lock(home, service), f"the service {service}", twice),
    ):
        yield


def services(home: Home) -> tuple[Service, ...]:
    """Return the services that are running in a home."""
    return tuple(service for service in Service if lock_holder(_lock(home, service)) is not None)


def in_use(home: Home) -> bool:
    """Return whether a full run or a service writes to a home; the HTTP server only reads it."""
    return home.owner() is not None or bool({*services(home)} - {Service.PAGE})


def jobs(home: Home) -> tuple[str, ...]:
    """Return the names of the processes of a home, whether they run or not; without the HTTP server, which only reads."""
    return (*map(bridge_job, home.bridges()), "landing", "lifecycle", "simulator", PUBLISHER)


def runs(home: Home, job: str) -> bool:
    """Return whether a job is supervised by a full run, or runs as a service.

    The HTTP server may also run by itself (``fleet serve``).

    Args:
        home: home of the job.
        job: name of the job's process, such as ``bridge-north``.
    """
    if job == PAGE:
        return page_holder(home) is not None
    service = Service.BRIDGE if job == PUBLISHER else job.partition("-")[0]
    return home.owner() is not None or service in services(home)


@contextmanager
def page_held(home: Home, by: str) -> Iterator[None]:
    """Hold the lock of a home's HTTP server until the context exits.

    Args:
        home: home of the server.
        by: name of the holder, for error messages of other processes.

    Raises:
        FleetError: another server of the home runs.
    """
    path = _page_lock(home)
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with named_lock(path, by, lambda other: page_served_by(home, other)):
        yield


def page_holder(home: Home) -> str | None:
    """Return the description of the process that serves a home over HTTP; None if there is none."""
    return lock_holder(_page_lock(home))


def page_served_by(home: Home, other: str) -> FleetError:
    """Return the error that names the HTTP server of a home."""
    return FleetError(
        f'"{home.path}" is already served over HTTP by {other}; a home has one server; use that one (its address: ./fleet access '
        f"login --home {home.path}), or stop it",
        code="page-runs-already",
    )


def _page_lock(home: Home) -> Path:
    return home.path / "web" / "lock"


def _lock(home: Home, service: Service) -> Path:
    return home.path / "run" / f"{service}.lock"
