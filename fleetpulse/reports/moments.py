"""Instants at which history can be shown, and the fleet at such an instant, a page at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.times import END_OF_TIME_MS, format_instant
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables.tables import fetch, reading
from fleetpulse.reports import frontiers
from fleetpulse.reports.history.time_travel import READ, Moment, first_instant_ms, fleet_in, judged_between
from fleetpulse.reports.plain import instant_ms

_SHOWN: Final = ("device_id", "mode", "trigger", "site", "device_class", "gateway", "never_seen")


def moment_of(
    home: Home, at_ms: int, known_ms: int = END_OF_TIME_MS, names: tuple[str, str] = ("at", "known"), first_ms: int | None = None
) -> Moment:
    """Check the requested instants; return them with the event time up to which rows were judged.

    Args:
        home: home to read.
        at_ms: event time of the result, epoch milliseconds.
        known_ms: time by which verdicts had been judged, epoch milliseconds; the end of time: all verdicts.
        names: names of the two instants in errors.
        first_ms: first instant of the history, see `began_ms`; None: it is read.

    Raises:
        FleetError: the home has no history, or its history begins later.
        Misuse: an instant lies in the future.
    """
    now_ms = wall_clock_ms()
    for name, asked_ms in zip(names, (at_ms, known_ms), strict=True):
        if now_ms < asked_ms != END_OF_TIME_MS:
            raise Misuse(
                f"{name} must be an instant in the past; got {format_instant(asked_ms)}; name an earlier instant",
                code="instant-not-past",
            )
    if at_ms < (first_ms := began_ms(home) if first_ms is None else first_ms):
        began = format_instant(first_ms)
        raise FleetError(
            f'the history of "{home.path}" begins at {began}; got {names[0]} {format_instant(at_ms)}; use {began} or later',
            code="instant-before-history",
        )
    return Moment(at_ms, known_ms, _judged_to(home, known_ms))


def began_ms(home: Home) -> int:
    """Return the first instant of the history, epoch milliseconds.

    Raises:
        FleetError: the home has no history.
    """
    shards = frontiers.shards(home, None)
    if shards is None:
        raise FleetError(
            f'the home "{home.path}" has no history; replay a recording: ./fleet replay RECORDING --home {home.path}',
            code="home-without-history",
        )
    return first_instant_ms(home, shards.start_ms)


def _judged_to(home: Home, known_ms: int) -> int:
    """Return the event time up to which rows were judged at ``known_ms``; -1 if there is none."""
    deployment = home.deployment()
    frontier_ms = frontiers.frontier_ms(home, judged_ms(home.checkpoint))
    now_ms = None if frontier_ms is None else deployment.emitted_through_ms(frontier_ms)
    if now_ms is None or known_ms == END_OF_TIME_MS:
        return -1 if now_ms is None else now_ms
    first, _ = judged_between(home)
    by_then = frontiers.shards(home, known_ms) if first is not None and instant_ms(first) <= known_ms else None
    return (
        -1 if by_then is None or by_then.frontier_ms is None else min(deployment.emitted_through_ms(by_then.frontier_ms), now_ms)
    )


@dataclass(frozen=True, slots=True)
class FleetPage:
    """Devices at a moment.

    Attributes:
        modes: number of all devices by mode, most frequent first.
        count: number of devices that match.
        rows: devices of the page that match, by id, with ``since_ms`` and ``last_seen_ms``.
    """

    modes: dict[str, int]
    count: int
    rows: list[dict[str, Any]]


def fleet_page(home: Home, moment: Moment, where: str, values: Sequence[Any], *, after: str, limit: int) -> FleetPage:
    """Return devices that had a mode at a moment, ordered by id; see `time_travel.fleet`.

    Args:
        home: home to read.
        moment: instants of the query.
        where: SQL condition on the columns `_SHOWN`.
        values: its parameters.
        after: id of the last device of the page before; empty for the first page.
        limit: maximum number of devices.
    """
    sql, of_moment = fleet_in(moment)
    columns = ", ".join(f'"{name}"' for name in _SHOWN)
    with reading(home, READ) as tables:
        tables.execute(f"CREATE TEMP TABLE past AS SELECT {columns}, since, last_seen FROM ({sql})", of_moment)
        modes = fetch(tables, "SELECT mode, count(*) AS n FROM past GROUP BY mode ORDER BY n DESC, mode")
        [matching] = fetch(tables, f"SELECT count(*) AS n FROM past WHERE {where}", values)
        rows = fetch(
            tables,
            f"""SELECT {columns}, epoch_ms(since) AS since_ms, epoch_ms(last_seen) AS last_seen_ms FROM past
                WHERE {where} AND device_id > ? ORDER BY device_id LIMIT {int(limit)}""",
            [*values, after],
        )
    return FleetPage({one["mode"]: one["n"] for one in modes}, matching["n"], rows)
