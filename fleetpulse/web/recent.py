"""Values that are slow to read, shared by requests for some seconds."""

import time
from collections.abc import Callable
from threading import Lock
from typing import Any


class RecentValues:
    """Values by name, each read at most once in an interval.

    Args:
        clock: function that returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._locks: dict[str, Lock] = {}
        self._known: dict[str, tuple[float, Any]] = {}

    def get(self, name: str, every_s: float, read: Callable[[], Any]) -> Any:
        """Return a value; requests for it at one time wait for one reading.

        Args:
            name: name of the value.
            every_s: age from which the value is read again, seconds.
            read: function that reads it; if it raises, the next request reads again.
        """
        with self._lock:
            lock = self._locks.setdefault(name, Lock())
        with lock:
            known = self._known.get(name)
            if known is None or self._clock() - known[0] >= every_s:
                known = self._clock(), read()
                self._known[name] = known
            return known[1]
