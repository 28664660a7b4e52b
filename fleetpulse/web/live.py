"""Facts of a fleet in memory, refreshed while somebody asks, and queries over them with limits.

Rule 1: while nobody asks, nothing is read. The first request after a pause refreshes the facts itself.
Rule 2: a query that takes longer than `QUERY_S` is interrupted, and the answer is an error.
Rule 3: the thread that refreshes ends before the interpreter does: a thread of DuckDB that Python ends aborts the process.
Rule 4: at most as many queries run at once as there are cores; others wait, at most `QUERY_S`.
"""

import atexit
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition, Event, Lock, Semaphore, Thread, Timer
from typing import TYPE_CHECKING, Any, Final

import structlog

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables.tables import fetch, one_instance
from fleetpulse.reports.judgements import require_known
from fleetpulse.reports.present.id_index import IdIndex
from fleetpulse.reports.present.mirror import PresentMirror, Reached
from fleetpulse.web.queries import device_sql
from fleetpulse.web.recent import RecentValues

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

QUERY_S: Final = 10.0
REFRESH_S: Final = 1.0  # interval of refreshes while somebody asks
STALE_S: Final = 15.0  # age of the newest refresh from which the facts are stale
_WATCHED_S: Final = 20.0  # after the newest request, refreshes stop
_FIRST_S: Final = 60.0  # limit of the first load


class QueryTooLong(FleetError):
    """A query was interrupted."""


class LiveFleet:
    """Facts of a fleet in memory; see `PresentMirror` for the tables.

    Args:
        home: home to read.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self.mirror = PresentMirror(home)
        self.recent = RecentValues()  # facts that are not in memory
        self.fault = ""  # why the newest refresh failed; empty if it did not
        self._cores = Semaphore(os.cpu_count() or 1)
        self._asked_s = float("-inf")
        self._once = False  # whether one refresh is wanted although nobody watches
        self._refreshed_s = float("-inf")
        self._changed = Condition()
        self._wanted, self._stopping = Event(), Event()
        self._starting = Lock()
        self._thread = Thread(target=self._refresh_while_watched, name="refresh", daemon=True)

    def start(self) -> None:
        """Start the thread that refreshes, once; the first use also does, since a mounted application has no start."""
        with self._starting:
            if self._thread.ident is None and not self._stopping.is_set():
                self._thread.start()
                atexit.register(self.stop)  # a mounted application is not stopped

    def stop(self) -> None:
        """Stop the thread, within `QUERY_S`."""
        self._stopping.set()
        self._wanted.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self.mirror.interrupt()
            self._thread.join(QUERY_S)
        atexit.unregister(self.stop)

    @property
    def age_s(self) -> float:
        """Seconds since the newest complete refresh."""
        return time.monotonic() - self._refreshed_s

    def reached(self, *, watching: bool = True) -> Reached:
        """Return the version of the facts, at most a few seconds old.

        Args:
            watching: whether to refresh again each second for a while; otherwise once, if the facts are older.

        Raises:
            FleetError: the facts cannot be read.
        """
        self.start()
        pause_s = time.monotonic() - self._asked_s
        is_old = self.age_s > max(2 * REFRESH_S, 3.0)
        self._want(watching=watching, once=is_old)
        if is_old and (pause_s > REFRESH_S or self.age_s == float("inf")):
            self._await_refresh(_FIRST_S if self.age_s == float("inf") else QUERY_S)
        if self.age_s == float("inf"):
            raise FleetError(
                f"the facts of the fleet are not loaded yet{f': {self.fault}' if self.fault else ''}; try again later",
                code="facts-not-loaded",
            )
        return self.mirror.reached

    def _want(self, *, watching: bool, once: bool) -> None:
        if watching:
            self._asked_s = time.monotonic()
        elif once:
            self._once = True
        if watching or once:
            self._wanted.set()

    def _is_wanted(self) -> bool:
        return self._once or time.monotonic() - self._asked_s <= _WATCHED_S

    def _await_refresh(self, limit_s: float) -> None:
        until_s, before_s = time.monotonic() + limit_s, self._refreshed_s
        with self._changed:
            self._changed.wait_for(
                lambda: self._refreshed_s > before_s or bool(self.fault) or self._stopping.is_set(), until_s - time.monotonic()
            )

    def await_fresh(self, limit_s: float) -> bool:
        """Wait until the newest refresh succeeded less than `STALE_S` ago; return whether it did.

        Args:
            limit_s: limit of the wait, seconds.
        """
        self._want(watching=False, once=not self.is_fresh)
        with self._changed:
            self._changed.wait_for(lambda: self.is_fresh or self._stopping.is_set(), limit_s)
        return self.is_fresh

    @property
    def is_fresh(self) -> bool:
        """Whether the newest refresh succeeded less than `STALE_S` ago."""
        return not self.fault and self.age_s < STALE_S

    def reached_tag(self) -> str:
        """Return the tag of the facts in memory; empty before the first load.

        Facts that are loaded again have another tag: they may have further devices and newer clocks in the same version.
        """
        return "" if self.age_s == float("inf") else f"{self.mirror.reached.tag}-{self.mirror.loaded_ms:x}"

    @contextmanager
    def reading(self) -> "Iterator[DuckDBPyConnection]":
        """Open the facts for queries of one request, with the limits of this module.

        Raises:
            QueryTooLong: the queries took too long.
        """
        with self.searching() as (cursor, _):
            yield cursor

    @contextmanager
    def searching(self) -> "Iterator[tuple[DuckDBPyConnection, IdIndex]]":
        """Do as `reading`, and return the index of the ids with the connection.

        Raises:
            QueryTooLong: the queries took too long.
        """
        import duckdb

        if not self._cores.acquire(timeout=QUERY_S):
            raise QueryTooLong(f"the server answers other requests; no core was free for {QUERY_S:g} s; try again", code="busy")
        with ExitStack() as held:
            held.callback(self._cores.release)
            cursor, ids = self.mirror.searchable()
            held.callback(cursor.close)
            timer = Timer(QUERY_S, cursor.interrupt)
            timer.daemon = True
            timer.start()
            held.callback(timer.cancel)
            try:
                yield cursor, ids
            except duckdb.InterruptException:
                raise QueryTooLong(
                    f"the query took longer than {QUERY_S:g} s and was interrupted; ask for less", code="query-too-long"
                ) from None

    def query(self, sql: str, parameters: Iterable[Any] = ()) -> list[dict[str, Any]]:
        """Run SQL over the facts in memory; return rows by column name."""
        with self.reading() as cursor:
            return fetch(cursor, sql, parameters)

    def require_device(self, device_id: str) -> None:
        """Refuse an unknown device; tables are read only for a device that is not in memory.

        It does not wait for facts: old ones are enough, and without any the tables are read.

        Raises:
            FleetError: the device was never registered or heard.
        """
        self.start()
        self._want(watching=True, once=False)
        if self.age_s == float("inf") or not self.query(*device_sql(device_id)):
            require_known(self.home, device_id)  # heard since the facts were loaded

    def _refresh_while_watched(self) -> None:
        while not self._stopping.is_set():
            self._wanted.wait()
            if not self._is_wanted():
                self._wanted.clear()
                if self._is_wanted() or self._stopping.is_set():  # the flag was set again before it was cleared
                    self._wanted.set()
                continue
            self._once = False
            self._refresh()
            if self.recent.is_expiring and not self._stopping.is_set():
                with one_instance():
                    self.recent.renew()
            self._stopping.wait(REFRESH_S)

    def _refresh(self) -> None:
        try:
            self.mirror.refresh(wall_clock_ms())
        except Exception as error:  # noqa: BLE001 - shown on the page; the next refresh tries again
            if self._stopping.is_set():
                return  # `stop` interrupted it
            self.fault = str(error) or type(error).__name__
            structlog.get_logger().warning("refresh failed", error=self.fault)
        else:
            self.fault = ""
            self._refreshed_s = time.monotonic()
        with self._changed:
            self._changed.notify_all()
