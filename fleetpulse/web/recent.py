"""Values that are slow to compute, shared by requests: for some seconds, or for a version of the facts.

Rule: a request waits for another one that computes its value, but not for longer than `WAIT_S`. Otherwise a slow
disk would stop all threads of the server.
"""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any, Final

import structlog

from fleetpulse.core.errors import FleetError

WAIT_S: Final = 10.0
LEAD_S: Final = 2.0  # before a value expires, it may be renewed, so that no request waits for it


def _busy() -> FleetError:
    return FleetError(f"another request has been reading the same for {WAIT_S:g} s; try again later", code="value-being-read")


@contextmanager
def _held(lock: Lock) -> Iterator[None]:
    """Hold a lock.

    Raises:
        FleetError: another request has held it for too long.
    """
    if not lock.acquire(timeout=WAIT_S):
        raise _busy()
    try:
        yield
    finally:
        lock.release()


class RecentValues:
    """Values by name, each read again after an interval, by a request or shortly before by `renew`.

    Args:
        clock: function that returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._locks: dict[str, Lock] = {}
        self._known: dict[str, tuple[float, Any]] = {}
        self._expiring: dict[str, Callable[[], Any]] = {}  # values that were requested shortly before they expire

    def get(self, name: str, every_s: float, read: Callable[[], Any]) -> Any:
        """Return a value.

        While one request reads the value again, other requests get the previous value, if it is younger than
        twice the interval.

        Args:
            name: name of the value.
            every_s: age from which the value is read again, seconds.
            read: function that reads it; if it raises, the next request reads again.

        Raises:
            FleetError: another request has been reading it for too long.
        """
        before = self._known.get(name)
        if before is not None and (age_s := self._clock() - before[0]) < every_s:
            if age_s >= every_s - min(LEAD_S, every_s / 2):
                self._expiring[name] = read
            return before[1]
        with self._lock:
            lock = self._locks.setdefault(name, Lock())
        before = self._known.get(name)
        if before is not None and self._clock() - before[0] >= 2 * every_s:
            before = None
        if not lock.acquire(timeout=0 if before else WAIT_S):
            if before is None:
                raise _busy()
            return before[1]
        try:
            known = self._known.get(name)
            if known is None or self._clock() - known[0] >= every_s:
                known = self._clock(), read()
                self._known[name] = known
            return known[1]
        finally:
            lock.release()

    @property
    def is_expiring(self) -> bool:
        """Whether `renew` has values to read."""
        return bool(self._expiring)

    def renew(self) -> None:
        """Read the values again that were requested shortly before they expire.

        A value that cannot be read stays until it expires; then a request gets the error.
        """
        while self._expiring:
            name, read = self._expiring.popitem()
            try:
                self._known[name] = self._clock(), read()
            except Exception as error:  # noqa: BLE001 - see above
                structlog.get_logger().warning("value cannot be read", name=name, error=str(error) or type(error).__name__)


class VersionedValues:
    """Values by key of one version of the facts; those of the version before are dropped.

    Args:
        most: size of all values that are kept; before one would exceed it, all others are dropped.
        size: function that returns the size of a value; by default, each has the size 1.
        one_at_a_time: whether requests wait while any value is computed; otherwise only those for the same value.
    """

    def __init__(self, most: int, size: Callable[[Any], int] = lambda _: 1, *, one_at_a_time: bool = False) -> None:
        self._most, self._size = most, size
        self._computing = Lock() if one_at_a_time else None
        self._lock = Lock()
        self._tag = ""
        self._known: dict[Hashable, Any] = {}
        self._pending: dict[Hashable, Lock] = {}  # held while a value is computed

    def get(self, tag: str, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return a value; compute it if it is not known for a version.

        Args:
            tag: version of the facts.
            key: key of the value.
            compute: function that computes it.

        Raises:
            FleetError: another request has been computing one for too long.
        """
        with _held(self._computing) if self._computing else nullcontext():
            with self._lock:
                if self._tag != tag:
                    self._tag, self._known, self._pending = tag, {}, {}
                if key in self._known:
                    return self._known[key]
                pending = self._pending.setdefault(key, Lock())
            with _held(pending):
                with self._lock:
                    if self._tag == tag and key in self._known:
                        return self._known[key]
                value = compute()
                with self._lock:
                    if self._tag == tag:
                        if sum(map(self._size, self._known.values())) + self._size(value) > self._most:
                            self._known, self._pending = {}, {}
                        self._known[key] = value
            return value
