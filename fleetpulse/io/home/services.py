"""The services of a home: its parts, supervised one by one, and the locks that keep them and a run of everything apart.

Rule 1: who runs everything holds the home's lock alone; services hold it together, and each one a lock of its own.
Rule 2: whether something runs is asked of these locks: a status file may outlive its process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import SERVICES, Home
from fleetpulse.io.system.locks import held, holder, shared


class Service(StrEnum):
    """A part that runs by itself, in the order in which they start."""

    BROKER = "broker"
    LIFECYCLE = "lifecycle"
    LANDING = "landing"
    BRIDGE = "bridge"  # all bridges of a home


@contextmanager
def served(home: Home, service: Service) -> Iterator[None]:
    """Hold a home for one of its services; others may run beside it, and a run of everything may not.

    Raises:
        FleetError: a run of everything holds the home, or the same service runs already.
    """

    def twice(other: str) -> FleetError:
        return FleetError(
            f'{other} runs already in "{home.path}"; stop that one, or name another home with --home', code="service-runs-already"
        )

    with shared(home.path / "lock", SERVICES, home.in_use_by), held(_lock(home, service), f"the service {service}", twice):
        yield


def services(home: Home) -> tuple[Service, ...]:
    """Return the services that run in a home."""
    return tuple(service for service in Service if holder(_lock(home, service)) is not None)


def in_use(home: Home) -> bool:
    """Whether a run of everything, or a service, holds a home."""
    return home.owner() is not None or bool(services(home))


def runs(home: Home, job: str) -> bool:
    """Whether a job of a home is looked after: by a run of everything, or by its service.

    Args:
        home: the home.
        job: the name of its process, such as ``bridge-north``.
    """
    return home.owner() is not None or job.partition("-")[0] in services(home)


def _lock(home: Home, service: Service) -> Path:
    return home.path / "run" / f"{service}.lock"
