"""Reports on the stream: batches of the lifecycle job, processes, and the streams beside the lifecycle."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from fleetpulse.core.monitoring.health import problems_of
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.tables import STREAM_HEALTH
from fleetpulse.io.home.home import PAGE, Home
from fleetpulse.io.home.services import Service, jobs, runs, services
from fleetpulse.io.mqtt.embedded import broker_log
from fleetpulse.io.mqtt.embedded.takeovers import FREQUENT, read_takeovers
from fleetpulse.io.system.process import read_status
from fleetpulse.io.tables.tables import query

PARTS: Final[Mapping[str, tuple[str, ...]]] = {  # part of a batch -> columns of `stream_health`, milliseconds
    "finding new rows": ("latest_offset_ms", "get_batch_ms"),
    "planning": ("query_planning_ms",),
    "judging and writing": ("add_batch_ms",),
    "commits": ("wal_commit_ms", "commit_offsets_ms"),
}


def batches(home: Home, since_ms: int, bucket_ms: int) -> list[dict[str, Any]]:
    """Return the batches since an instant, averaged over spans of equal length, oldest first.

    Args:
        home: home to read.
        since_ms: start of the first batch, epoch milliseconds.
        bucket_ms: length of a span, milliseconds.

    Returns:
        Rows with ``from_ms``, the start of the span; ``batches``, their number; ``batch_ms``, their mean time, with
        its parts (`PARTS`) and ``other``; ``longest_ms``; ``input_rows`` and ``rows_late``, summed. A span without
        batches has no row.
    """
    parts = ", ".join(
        f'avg({" + ".join(f"coalesce({column}, 0)" for column in columns)}) AS "{name}"' for name, columns in PARTS.items()
    )
    sql = f"""SELECT epoch_ms(began_at) // {int(bucket_ms)} * {int(bucket_ms)} AS from_ms, count(*) AS batches,
              avg(batch_ms) AS batch_ms, max(batch_ms) AS longest_ms, sum(input_rows)::BIGINT AS input_rows,
              sum(rows_late)::BIGINT AS rows_late, {parts}
              FROM stream_health WHERE epoch_ms(began_at) >= ? GROUP BY 1 ORDER BY 1"""
    found = query(home, sql, [since_ms], tables=[STREAM_HEALTH.name])
    return [{**row, "other": max(0.0, row["batch_ms"] - sum(row[name] for name in PARTS))} for row in found]


def statuses(home: Home) -> dict[str, dict[str, Any]]:
    """Return the status of each running process of a home by name, the HTTP server last."""
    return {name: status for name in (*jobs(home), PAGE) if (status := read_status(home.run(name))) and runs(home, name)}


def troubles(found: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the problems of processes by name, from their statuses; a process without one is left out."""
    return {name: problems for name, status in found.items() if (problems := problems_of(status))}


def running(home: Home) -> dict[str, Any]:
    """Return the processes of a home, and the refusals and takeovers of its broker.

    Returns:
        ``processes``, state by name; ``troubles``, problems by name; ``broker``, counts of the broker's log;
        ``services``, the parts that run as services; ``takeovers``, client ids that were taken over often within
        an hour.
    """
    found = statuses(home)
    recent = read_takeovers(home.broker_log, datetime.now(UTC) - timedelta(hours=1))
    return {
        "processes": {name: status.get("state", "running") for name, status in found.items()},
        "troubles": troubles(found),
        "broker": read_status(home.run(broker_log.STATUS)) if runs(home, Service.BROKER) else {},
        "services": list(services(home)),
        "takeovers": [asdict(one) for one in recent if one.times >= FREQUENT],
    }


@dataclass(frozen=True, slots=True)
class StreamState:
    """State of a stream beside the lifecycle.

    Attributes:
        name: the stream.
        state: ``running``; ``failed``, and started again after a pause; ``stopped`` with the job; ``off`` if the newest
            run of the job has no such stream.
        batch: number of its newest batch; None before the first.
        batch_at_ms: end of that batch, epoch milliseconds; None if it is unknown.
        failures: number of its failures in the newest run of the job.
        error: fault of a failed stream.
    """

    name: StreamName
    state: str = "off"
    batch: int | None = None
    batch_at_ms: int | None = None
    failures: int = 0
    error: str | None = None

    @property
    def is_on(self) -> bool:
        """Whether the newest run of the job has the stream."""
        return self.state != "off"


def streams_beside(home: Home) -> list[StreamState]:
    """Return the state of each stream beside the lifecycle, from the newest status of the lifecycle job."""
    known: Mapping[str, Mapping[str, Any]] = read_status(home.run("lifecycle")).get("streams", {})
    runs_now = "lifecycle" in statuses(home)
    return [_state_of(home, name, known[name], runs_now=runs_now) if name in known else StreamState(name) for name in StreamName]


def _state_of(home: Home, name: StreamName, found: Mapping[str, Any], *, runs_now: bool) -> StreamState:
    at_ms = None
    with suppress(FileNotFoundError):  # the job removes old commits
        at_ms = round((home.stream_checkpoint(name) / "commits" / str(found["batch"])).stat().st_mtime * 1000)
    return StreamState(name, found["state"] if runs_now else "stopped", found["batch"], at_ms, found["failures"], found["error"])
