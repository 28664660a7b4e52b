"""Services of a home: its parts run as separate processes, and their locks.

Rule 1: a full run (``./fleet up``, ``replay`` or ``chaos``) holds the home's lock exclusively.
Services share this lock, and each holds a lock of its own as well (ADR 18).
Rule 2: only these locks show whether a service runs: a status file may outlive its process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import PUBLISHER, SERVICES, Home
from fleetpulse.io.system.locks import lock_holder, named_lock, shared_lock


class Service(StrEnum):
    """Part of a home that can run as a separate process; listed in start order."""

    BROKER = "broker"
    LIFECYCLE = "lifecycle"
    LANDING = "landing"
    BRIDGE = "bridge"  # all bridges of the home, and the publisher of verdicts


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
    """Return whether a full run or a service holds a home."""
    return home.owner() is not None or bool(services(home))


def runs(home: Home, job: str) -> bool:
    """Return whether a job is supervised by a full run, or runs as a service.

    Args:
        home: home of the job.
        job: name of the job's process, such as ``bridge-north``.
    """
    service = Service.BRIDGE if job == PUBLISHER else job.partition("-")[0]
    return home.owner() is not None or service in services(home)


def _lock(home: Home, service: Service) -> Path:
    return home.path / "run" / f"{service}.lock"
