"""Declarations of the metrics that ``/metrics`` answers with: names, kinds, units, labels and meanings.

Rule 1: a fact is a counter if it only grows while the home exists: rows that were ever written. Its value is read from
the home, so a restart of the server does not reset it. Facts about the present and about the newest batch are gauges.
Rule 2: the counters of the server itself, ``fleetpulse_http_*``, start at 0 with the server.
Rule 3: each label has a bounded number of values: members of an enumeration, names from the settings, templates of
routes, or the largest sites and classes.
Rule 4: names follow Prometheus: base units (seconds, bytes) at the end, and ``_total`` for counters.
"""

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

MOST_SITES: Final = 100  # sites with a label of their own, those with the most devices
MOST_CLASSES: Final = 50  # likewise for classes
OTHER: Final = "other"  # label of the sum of all further sites or classes


class MetricKind(StrEnum):
    """Kind of a metric, as in OpenMetrics."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of a metric.

    Attributes:
        name: name of the metric family, without the suffix of its samples.
        meaning: HELP text; one line.
        labels: names of the labels.
        kind: kind of the metric.
        unit: unit, which is the last part of the name; empty for a number of things.
    """

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    kind: MetricKind = MetricKind.GAUGE
    unit: str = ""

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of the samples, as queries name them."""
        suffixes = {MetricKind.GAUGE: ("",), MetricKind.COUNTER: ("_total",), MetricKind.HISTOGRAM: ("_bucket", "_count", "_sum")}
        return tuple(f"{self.name}{suffix}" for suffix in suffixes[self.kind])


def _of_rows(name: str, meaning: str, *labels: str, note: str = "") -> Metric:
    return Metric(name, f"{meaning}, since the home was created{note and f'; {note}'}", labels, MetricKind.COUNTER)


def _seconds(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, meaning, labels, unit="seconds")


_LARGEST: Final = "the {} {} with the most devices, the others summed as " + f'"{OTHER}"'
_COUNTED_ANEW: Final = (
    "decreases only if retention has removed such rows and device_current is then lost or made for other settings"
)

FLEET: Final = (
    Metric("fleetpulse_devices", 'devices by mode; "unjudged": without a mode yet', ("mode",)),
    Metric("fleetpulse_site_devices", f"devices by mode and site: {_LARGEST.format(MOST_SITES, 'sites')}", ("mode", "site")),
    Metric(
        "fleetpulse_class_devices",
        f"devices by mode and class: {_LARGEST.format(MOST_CLASSES, 'classes')}",
        ("mode", "class"),
    ),
    Metric("fleetpulse_sites", "sites with a device"),
    Metric("fleetpulse_devices_never_seen", "offline devices that were never heard"),
    Metric("fleetpulse_devices_wrong_clock", "devices with a wrong clock, by class of the newest signal", ("clock",)),
    _of_rows(
        "fleetpulse_transitions",
        "transitions by the mode that they lead to, those of amendments and those retracted later included",
        "to_mode",
    ),
    _of_rows(
        "fleetpulse_transitions_retracted",
        "transitions that amendments retracted, by the mode that they led to",
        "to_mode",
        note="fleet status shows transitions less these",
    ),
    _of_rows("fleetpulse_judgements", "judgements by kind, without summaries", "kind", note=_COUNTED_ANEW),
    _of_rows("fleetpulse_quarantined", "messages written to quarantine, by reason", "reason", note=_COUNTED_ANEW),
    _seconds("fleetpulse_frontier_timestamp_seconds", "frontier: event time up to which everything has been judged; Unix time"),
    _seconds("fleetpulse_frontier_lag_seconds", "distance of the frontier from the clock of the server; years in a replay"),
)
MESSAGES: Final = (
    _of_rows("fleetpulse_messages_landed", "rows written to the table messages, those of bridges and operators included"),
    Metric("fleetpulse_messages_stored", "rows in the table messages; retention removes old ones"),
    _seconds("fleetpulse_newest_received_timestamp_seconds", "received_at of the newest row of the table messages; Unix time"),
)
BATCH: Final = (
    Metric("fleetpulse_generation", "generation of the lifecycle job that ran the newest batch"),
    Metric("fleetpulse_batch_number", "number of the newest batch in its checkpoint; starts at 0 with a new generation"),
    _seconds("fleetpulse_batch_started_timestamp_seconds", "start of the newest batch; Unix time"),
    _seconds("fleetpulse_batch_duration_seconds", "duration of the newest batch"),
    _seconds("fleetpulse_batch_part_duration_seconds", "duration of a part of the newest batch", "part"),
    Metric("fleetpulse_batch_input_rows", "rows of the table messages that the newest batch read"),
    Metric("fleetpulse_batch_input_rows_per_second", "rows that the newest batch read, a second since the batch before it"),
    Metric("fleetpulse_batch_processed_rows_per_second", "rows that the newest batch read, a second of its duration"),
    Metric("fleetpulse_state_rows", "values in the state of the job: two for each key group, and chunks of pending rows"),
    Metric("fleetpulse_state_bytes", "size of the files of the state store; rated as state size", unit="bytes"),
    Metric("fleetpulse_state_memory_bytes", "memory of the state store; rated as memory", unit="bytes"),
    _seconds("fleetpulse_checkpoint_duration_seconds", "duration of the newest checkpoint; rated as checkpoint"),
    _seconds("fleetpulse_state_update_seconds", "time to read and write one value of the state; rated as state update"),
    _seconds("fleetpulse_state_clean_up_seconds", "duration of clean-up in the newest batch; rated as clean-up"),
)
PROCESSES: Final = (
    Metric("fleetpulse_process_running", "1 if a process of the home runs, otherwise 0", ("process",)),
    _seconds("fleetpulse_process_status_age_seconds", "age of the newest status of a running process", "process"),
    Metric("fleetpulse_bridge_listening", "1 if a bridge runs and is connected to its broker, otherwise 0", ("bridge",)),
    Metric(
        "fleetpulse_bridge_gap_open", "1 if a coverage gap of a bridge is open: silence at its sites does not count", ("bridge",)
    ),
)
STREAMS: Final = (
    Metric("fleetpulse_stream_running", "1 if a stream beside the lifecycle runs, otherwise 0; none if it is off", ("stream",)),
    Metric("fleetpulse_stream_failures", "failures of a stream beside the lifecycle in the present run of the job", ("stream",)),
    Metric("fleetpulse_stream_batch_number", "number of the newest batch of a stream beside the lifecycle", ("stream",)),
    _seconds(
        "fleetpulse_stream_batch_timestamp_seconds",
        "end of the newest batch of a stream beside the lifecycle; Unix time",
        "stream",
    ),
)
SERVER: Final = (
    _seconds(
        "fleetpulse_refresh_age_seconds", "time since the newest complete refresh of the facts in memory; +Inf before the first"
    ),
    Metric("fleetpulse_refresh_failing", "1 if the newest refresh of the facts in memory failed, otherwise 0"),
    Metric("fleetpulse_part_failed", "1 if the metrics of a part cannot be read and are left out, otherwise 0", ("part",)),
    Metric(
        "fleetpulse_http_requests",
        'requests since the start of the server, by template of the route and status; route "other": refused before routing, or '
        "of no route",
        ("route", "status"),
        MetricKind.COUNTER,
    ),
    Metric(
        "fleetpulse_http_request_duration_seconds",
        "time to the first byte of the answer, since the start of the server, by template of the route",
        ("route",),
        MetricKind.HISTOGRAM,
        "seconds",
    ),
)
PARTS: Final = MappingProxyType(
    {"fleet": FLEET, "messages": MESSAGES, "batch": BATCH, "processes": PROCESSES, "streams": STREAMS}
)
METRICS: Final = (*FLEET, *MESSAGES, *BATCH, *PROCESSES, *STREAMS, *SERVER)
