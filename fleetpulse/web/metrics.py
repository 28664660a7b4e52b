"""Metrics of a fleet for Prometheus: ``/metrics`` in OpenMetrics, or in the older text format.

Rule 1: the values are those of `fleet status`. Nothing is counted here but requests: devices and judgements come from
the facts in memory, batches from `reports.judgements.health`, the rest from logs and status files.
Rule 2: a scrape reads no history. Devices are counted again only if the facts differ, and a table is read at most
every `SLOW_S` seconds, if it has a new version.
Rule 3: a part that cannot be read is left out, and ``fleetpulse_part_failed`` reports it. The other parts are answered.
Rule 4: there is no state of the process: each application has its own registry.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from threading import Lock
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.rows import REASONS, Trust
from fleetpulse.core.tables import COVERAGE, JUDGEMENTS, MESSAGES, STREAM_HEALTH, Table
from fleetpulse.core.times import parse_instant_ms
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import bridge_job
from fleetpulse.io.home.services import jobs
from fleetpulse.io.system.process import NOT_RESTARTED, status_age_s
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.row_accounting import removed_in
from fleetpulse.reports.judgements import health
from fleetpulse.reports.messages import span
from fleetpulse.reports.operations.stream import statuses, streams_beside
from fleetpulse.reports.present.mirror import Reached
from fleetpulse.reports.present.parts import UNJUDGED
from fleetpulse.web import queries
from fleetpulse.web.live import LiveFleet
from fleetpulse.web.metric_table import METRICS, MOST_CLASSES, MOST_SITES, OTHER, PARTS, Metric, MetricKind

SLOW_S: Final = 10.0  # a table is read at most once in this time
BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0)

Samples = dict[str, dict[tuple[str, ...], float]]  # values by name of the metric and by values of its labels
_Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily

_MODES: Final = (*(mode.value for mode in Mode), UNJUDGED)
_WRONG: Final = tuple(trust.value for trust in Trust if trust is not Trust.ON_TIME)
_KINDS: Final = tuple(kind.value for kind in JudgementKind if kind is not JudgementKind.SUMMARY)
_BY_LARGEST: Final = f"""
    WITH counted AS MATERIALIZED (SELECT mode, coalesce({{column}}, '') AS name, sum(n) AS n FROM live.counted GROUP BY ALL
                                  HAVING sum(n) > 0),
    largest AS (SELECT name FROM counted GROUP BY name ORDER BY sum(n) DESC, name LIMIT {{most}})
    SELECT mode, CASE WHEN name IN (FROM largest) THEN name ELSE '{OTHER}' END AS label, sum(n)::BIGINT
    FROM counted GROUP BY mode, label"""
_SITES: Final = "SELECT count(site) FROM (SELECT site FROM live.counted GROUP BY site HAVING sum(n) > 0)"
_RETRACTED: Final = "SELECT to_mode, count(*) AS n FROM judgements WHERE to_mode IS NOT NULL GROUP BY to_mode"
_OPEN: Final = """SELECT bridge, arg_max(op, (received_at, "at")) = 'open' AS is_open FROM coverage GROUP BY bridge"""
_BATCH: Final = (  # metric, column of `stream_health`, number of the column's units in one unit of the metric
    ("fleetpulse_generation", "generation", 1),
    ("fleetpulse_batch_number", "batch_id", 1),
    ("fleetpulse_batch_duration_seconds", "batch_ms", 1_000),
    ("fleetpulse_batch_input_rows", "input_rows", 1),
    ("fleetpulse_batch_input_rows_per_second", "input_rows_per_s", 1),
    ("fleetpulse_batch_processed_rows_per_second", "processed_rows_per_s", 1),
    ("fleetpulse_state_rows", "state_rows", 1),
    ("fleetpulse_state_bytes", "state_bytes", 1),
    ("fleetpulse_state_memory_bytes", "state_memory_bytes", 1),
    ("fleetpulse_checkpoint_duration_seconds", "checkpoint_ms", 1_000),
    ("fleetpulse_state_update_seconds", "state_update_us", 1_000_000),
    ("fleetpulse_state_clean_up_seconds", "clean_up_ms", 1_000),
)
_BATCH_PARTS: Final = ("latest_offset", "get_batch", "query_planning", "wal_commit", "add_batch", "commit_offsets")


class Requests:
    """Counts and durations of the requests to a server, by template of the route."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._buckets: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}

    def add(self, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        with self._lock:
            self._counts[route, str(status)] += 1
            self._buckets.setdefault(route, [0] * (len(BUCKETS_S) + 1))[bisect_left(BUCKETS_S, seconds)] += 1
            self._seconds[route] = self._seconds.get(route, 0.0) + seconds

    def counts(self) -> dict[tuple[str, ...], float]:
        """Return the number of requests by route and status."""
        with self._lock:
            return {**self._counts}

    def durations(self) -> dict[str, tuple[list[tuple[str, float]], float]]:
        """Return the cumulative buckets and the sum of the durations in seconds, by route."""
        ends = (*map(str, BUCKETS_S), "+Inf")
        with self._lock:
            return {
                route: (list(zip(ends, accumulate(counts), strict=True)), self._seconds[route])
                for route, counts in self._buckets.items()
            }


class Measured:
    """Middleware that counts requests, also those that are refused.

    Args:
        app: application behind it.
        requests: counts of the requests.
    """

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app = app
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, is_answered = time.perf_counter(), False

        def count(status: int) -> None:
            self._requests.add(getattr(scope.get("route"), "path", OTHER), status, time.perf_counter() - began_s)

        async def send_counted(message: Message) -> None:
            nonlocal is_answered
            if message["type"] == "http.response.start":
                is_answered = True
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception:
            if not is_answered:
                count(500)
            raise


class _Slow:
    """Values that are read at most every `SLOW_S` seconds, and only if a table has a new version.

    Args:
        log: log of the table.
        read: function that reads the values.
    """

    def __init__(self, log: DeltaLog, read: Callable[[], Samples]) -> None:
        self._log, self._read = log, read
        self._version: int | None = None
        self._until_s = float("-inf")
        self._values: Samples = {}

    def __call__(self) -> Samples:
        """Return the values."""
        if time.monotonic() >= self._until_s:
            version = self._log.latest()
            if version != self._version:
                self._values = self._read()
                self._version = version
            self._until_s = time.monotonic() + SLOW_S
        return self._values


class FleetCollector:
    """Collector of the metrics of `metric_table`, from a fleet and its server.

    Args:
        live: facts of the fleet.
        requests: counts of the server's requests.
    """

    def __init__(self, live: LiveFleet, requests: Requests) -> None:
        self._live, self._home, self._requests = live, live.home, requests
        self._lock = Lock()  # several scrapes share what one of them has read
        self._counted: tuple[tuple[str, int] | None, Samples] = None, {}  # by version and load of the facts
        self._retracted: tuple[int, dict[str, int]] = 0, {}
        self._gaps = _Slow(self._log_of(COVERAGE), self._read_gaps)
        self._parts: Mapping[str, Callable[[], Samples]] = {
            "fleet": self._fleet,
            "messages": _Slow(self._log_of(MESSAGES), self._read_messages),
            "batch": _Slow(self._log_of(STREAM_HEALTH), self._read_batch),
            "processes": self._processes,
            "streams": self._streams,
        }
        assert self._parts.keys() == PARTS.keys()

    def _log_of(self, table: Table) -> DeltaLog:
        return DeltaLog(self._home.table(table.name))

    def describe(self) -> Iterable[_Family]:
        """Return the families without values, so that registering the collector reads nothing."""
        return map(_family, METRICS)

    def collect(self) -> Iterable[_Family]:
        """Yield the families with the values of now."""
        with self._lock:
            values = self._read()
        for metric in METRICS:
            family = _family(metric)
            if isinstance(family, HistogramMetricFamily):
                for route, (buckets, seconds) in self._requests.durations().items():
                    family.add_metric([route], buckets, seconds)
            else:
                for labels, value in values.get(metric.name, {}).items():
                    family.add_metric(labels, value)
            yield family

    def _read(self) -> Samples:
        values: Samples = {"fleetpulse_part_failed": {}}
        for part, read in self._parts.items():
            try:
                values |= read()
            except Exception as error:  # noqa: BLE001 - the other parts are answered
                structlog.get_logger().warning("metrics cannot be read", part=part, error=str(error) or type(error).__name__)
                values["fleetpulse_part_failed"][part,] = 1
            else:
                values["fleetpulse_part_failed"][part,] = 0
        values["fleetpulse_refresh_age_seconds"] = {(): self._live.age_s}
        values["fleetpulse_refresh_failing"] = {(): bool(self._live.fault)}
        values["fleetpulse_http_requests"] = self._requests.counts()
        return values

    def _fleet(self) -> Samples:
        reached = self._live.reached(watching=False)
        version = reached.tag, self._live.mirror.loaded_ms
        if version != self._counted[0]:
            self._counted = version, self._count_devices() | self._count_judgements(reached)
        values = dict(self._counted[1])
        if reached.frontier_ms is not None:
            values["fleetpulse_frontier_timestamp_seconds"] = {(): reached.frontier_ms / 1000}
            values["fleetpulse_frontier_lag_seconds"] = {(): (wall_clock_ms() - reached.frontier_ms) / 1000}
        return values

    def _count_devices(self) -> Samples:
        with self._live.reading() as cursor:
            modes = cursor.execute(queries.MODES).fetchall()
            clocks = dict(cursor.execute(queries.WRONG_CLOCKS).fetchall())
            sites = cursor.execute(_BY_LARGEST.format(column="site", most=MOST_SITES)).fetchall()
            classes = cursor.execute(_BY_LARGEST.format(column="device_class", most=MOST_CLASSES)).fetchall()
            [(site_count,)] = cursor.execute(_SITES).fetchall()
        return {
            "fleetpulse_devices": _of_all(_MODES, {mode: count for mode, count, _ in modes}),
            "fleetpulse_devices_never_seen": {(): sum(never_seen for *_, never_seen in modes)},
            "fleetpulse_devices_wrong_clock": _of_all(_WRONG, clocks),
            "fleetpulse_sites": {(): site_count},
            "fleetpulse_site_devices": _by_mode_and_name(sites),
            "fleetpulse_class_devices": _by_mode_and_name(classes),
        }

    def _count_judgements(self, reached: Reached) -> Samples:
        retracted = self._retracted_through(reached)
        emitted = Counter(reached.modes) + Counter(retracted)
        refused = Counter[str]()
        for reason, count in reached.refused.items():
            refused[reason if reason in REASONS else OTHER] += count
        return {
            "fleetpulse_transitions": _of_all(_MODES[:-1], emitted),
            "fleetpulse_transitions_retracted": _of_all(_MODES[:-1], retracted),
            "fleetpulse_judgements": _of_all(_KINDS, reached.kinds),
            "fleetpulse_quarantined": _of_all((*REASONS, OTHER), refused),
        }

    def _retracted_through(self, reached: Reached) -> dict[str, int]:
        """Return the number of retracted transitions by mode; they are read again only after an amendment."""
        count = reached.kinds.get(JudgementKind.RETRACT.value, 0)
        if count != self._retracted[0]:
            folder = f"kind={JudgementKind.RETRACT}"
            files = tables.files_of_version(self._home, JUDGEMENTS, reached.versions[JUDGEMENTS.name])
            found = tables.query_files(JUDGEMENTS, [file for file in files if folder in file.parts], _RETRACTED)
            self._retracted = count, {row["to_mode"]: row["n"] for row in found.to_pylist()}
        return self._retracted[1]

    def _read_messages(self) -> Samples:
        stored = sum(file.rows or 0 for file in tables.files_of(self._home, MESSAGES, "received_at"))
        received_span = span(self._home)
        return {
            "fleetpulse_messages_landed": {(): stored + removed_in(tables.newest(self._home, MESSAGES))},
            "fleetpulse_messages_stored": {(): stored},
            "fleetpulse_newest_received_timestamp_seconds": {} if received_span is None else {(): received_span[1] / 1000},
        }

    def _read_batch(self) -> Samples:
        found = health(self._home, batches=1)
        if found is None:
            return {}
        newest: Mapping[str, Any] = found["newest"]
        values: Samples = {name: {} if newest[column] is None else {(): newest[column] / units} for name, column, units in _BATCH}
        values["fleetpulse_batch_started_timestamp_seconds"] = {(): parse_instant_ms(newest["began_at"]) / 1000}
        values["fleetpulse_batch_part_duration_seconds"] = {
            (part,): newest[f"{part}_ms"] / 1000 for part in _BATCH_PARTS if newest[f"{part}_ms"] is not None
        }
        return values

    def _processes(self) -> Samples:
        bridges = {bridge: bridge_job(bridge) for bridge in self._home.bridges()}
        names = jobs(self._home)
        running = {
            name: status
            for name, status in statuses(self._home).items()
            if name in names and status.get("state") != NOT_RESTARTED
        }
        now_s = wall_clock_ms() / 1000
        ages = {name: status_age_s(self._home.run(name), now_s) for name in running}
        gaps = self._gaps().get("fleetpulse_bridge_gap_open", {})
        open_now = {bridge: job in running and bool(running[job].get("gap_open")) for bridge, job in bridges.items()}
        return {
            "fleetpulse_process_running": {(name,): name in running for name in names},
            "fleetpulse_process_status_age_seconds": {(name,): age for name, age in ages.items() if age is not None},
            "fleetpulse_bridge_listening": {
                (bridge,): job in running and bool(running[job].get("subscribed")) for bridge, job in bridges.items()
            },
            "fleetpulse_bridge_gap_open": {(bridge,): open_now[bridge] or bool(gaps.get((bridge,))) for bridge in bridges},
        }

    def _streams(self) -> Samples:
        found = [one for one in streams_beside(self._home) if one.is_on]
        return {
            "fleetpulse_stream_running": {(one.name,): one.state == "running" for one in found},
            "fleetpulse_stream_failures": {(one.name,): one.failures for one in found},
            "fleetpulse_stream_batch_number": {(one.name,): one.batch for one in found if one.batch is not None},
            "fleetpulse_stream_batch_timestamp_seconds": {
                (one.name,): one.batch_at_ms / 1000 for one in found if one.batch_at_ms is not None
            },
        }

    def _read_gaps(self) -> Samples:
        found = tables.query(self._home, _OPEN, tables=[COVERAGE.name])
        return {"fleetpulse_bridge_gap_open": {(row["bridge"],): row["is_open"] for row in found}}


def _of_all(names: Iterable[str], counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    """Return a number for each name, 0 if there is none: a series that is there from the start has no gaps."""
    return {(name,): counts.get(name, 0) for name in names}


def _by_mode_and_name(rows: Iterable[tuple[Any, ...]]) -> dict[tuple[str, ...], float]:
    """Return numbers by mode and name, with all modes of the fleet for each name."""
    found = Counter[tuple[str, str]]()
    for mode, name, count in rows:
        found[mode, label_text(name)] += count
    modes, names = sorted({mode for mode, _ in found}), sorted({name for _, name in found})
    return {(mode, name): found[mode, name] for name in names for mode in modes}


def label_text(name: str) -> str:
    r"""Return a name as the value of a label.

    Characters that are not printable become escapes such as ``\u202e``. The exposition escapes quotes and backslashes.
    """
    if name.isprintable():
        return name
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in name)


def _family(metric: Metric) -> _Family:
    if metric.kind is MetricKind.HISTOGRAM:
        return HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels, unit=metric.unit)
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    return kind(metric.name, metric.meaning, labels=metric.labels, unit=metric.unit)


class Metrics:
    """Metrics of one application, in a registry of its own.

    Attributes:
        requests: counts of the requests to the server.

    Args:
        live: facts of the fleet.
    """

    def __init__(self, live: LiveFleet) -> None:
        self.requests = Requests()
        self._registry = CollectorRegistry()
        self._registry.register(FleetCollector(live, self.requests))

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics in the format that a client accepts, and its media type.

        Args:
            accept: header Accept of the request. Without OpenMetrics in it, the format is Prometheus' text.
        """
        if _accepts_openmetrics(accept):
            return openmetrics.generate_latest(self._registry), openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4


def _accepts_openmetrics(accept: str) -> bool:
    for one in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in one.split(";"))
        weights = [part.removeprefix("q=") for part in parameters if part.startswith("q=")]
        if kind == "application/openmetrics-text" and all(weight.strip("0.") for weight in weights):
            return True
    return False


async def answer(request: Request) -> Response:
    """Answer with the metrics."""
    metrics: Metrics = request.app.state.metrics
    content, media_type = await run_in_threadpool(metrics.exposition, request.headers.get("accept", ""))
    return Response(content, media_type=media_type)
