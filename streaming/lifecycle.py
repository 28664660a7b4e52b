"""The lifecycle job: a Spark query that reads bronze and writes judgements.

The JVM plans the query, shuffles blocks, keeps the state and commits; Python workers judge.
"""

import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from py4j.protocol import Py4JNetworkError
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.core.errors import FleetError
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.exclusive import is_maintaining, is_making
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.maintenance.vacuum import shorten_log
from fleetpulse.io.spark.scratch import leftovers, remove_folders
from fleetpulse.io.spark.session import SparkResources, spark_session
from fleetpulse.io.streams.runner import StreamRunner
from fleetpulse.io.system.kernel_cache import compile_in_background
from fleetpulse.io.system.process import StopSignal, write_status
from fleetpulse.io.tables.adaptive_batching import trigger_ms
from fleetpulse.io.tables.stream_health import StreamHealth

_LOG: Final = structlog.get_logger("lifecycle")
_SPARK: Final = "spark"  # folder in the home; its `local` and `blocks-*` belong to this job only
_COMPILED_S: Final = 60.0
_POLL_S: Final = 1.0  # between two checks of the query: each calls the JVM and writes the status
_SHORTEN_EVERY_S: Final = 60.0
_JVM_GONE: Final = (Py4JNetworkError, ConnectionError)  # exceptions of py4j after the JVM has ended


@dataclass(frozen=True, slots=True)
class LifecycleOptions:
    """Batch intervals and retention times of the job, in milliseconds.

    Attributes:
        hold_ms: longest time that rows of a live fleet wait for their batch, see
            `adaptive_batching`.
        batch_every_ms: minimum time from the start of one batch to the start of the next, even if
            rows are waiting.
        health_ms: retention of `stream_health`; None for ever.
        versions_ms: retention of a version in the log of `judgements` after a checkpoint of the log
            includes it.
        streams: streams beside the lifecycle.
    """

    hold_ms: int
    batch_every_ms: int
    health_ms: int | None
    versions_ms: int
    streams: StreamOptions = field(default_factory=StreamOptions)


def run_lifecycle(home: Home, stop: StopSignal, options: LifecycleOptions, size: SparkResources) -> None:
    """Run the lifecycle job of a home until stopped.

    Args:
        home: home of the tables and the checkpoint.
        stop: signal to end.
        options: batch intervals and retention times.
        size: cores and memory of the Spark session.

    Raises:
        FleetError: the query failed, or the JVM ended; the log contains the details.
    """
    write_status(home.run("lifecycle"), {"pid": os.getpid(), "state": "starting"})
    while not holds_table(home.table(MESSAGES.name)):
        if stop.wait(0.1):
            return
    while holder := home.state_holder():
        write_status(home.run("lifecycle"), {"pid": os.getpid(), "state": f"waiting for {holder}"})
        if stop.wait(0.5):
            return
    with home.state_held("the lifecycle job"):
        remove_folders(leftovers(home.path / _SPARK))
        _run(home, stop, options, size)


def _run(home: Home, stop: StopSignal, options: LifecycleOptions, size: SparkResources) -> None:
    compiling = compile_in_background()  # in parallel to the start of the JVM, before Spark forks Python workers
    spark = spark_session("fleetpulse-lifecycle", local_dir=home.path / _SPARK, size=size)
    if compiling:
        with suppress(subprocess.TimeoutExpired):
            compiling.wait(_COMPILED_S)
    health = StreamHealth(home, home.generation().number, options.health_ms)
    trigger_interval_ms, held_ms = trigger_ms(options.hold_ms, options.batch_every_ms)
    query: StreamingQuery | None = None
    streams = StreamRunner(spark, home, options.streams)
    status: dict[str, Any] = {}
    next_s = time.monotonic()
    try:
        query = start(spark, home, f"{trigger_interval_ms} milliseconds", held_ms=held_ms, stopped=stop.is_set)
        health.follow(query)
        streams.check()
        while not stop.wait(_POLL_S):
            if not query.isActive:
                raise FleetError(
                    f"the Spark query of the lifecycle job failed: {query.exception() or 'no reason given'}", code="job-ended"
                )
            status = _status(home, query, status)
            if options.streams.names:
                streams.check()
                streams.forward_alarms()
                status["streams"] = streams.status()
            write_status(home.run("lifecycle"), status)
            if time.monotonic() >= next_s:
                trim_judgements_log(home, str(query.id), options.versions_ms)
                next_s = time.monotonic() + _SHORTEN_EVERY_S
    except _JVM_GONE as error:
        raise FleetError(
            "Spark's JVM ended unexpectedly: it was killed, or ran out of memory; see the log of the lifecycle job",
            code="jvm-ended",
        ) from error
    finally:
        with suppress(*_JVM_GONE):
            if query is not None:
                _finish(query)
        with suppress(*_JVM_GONE):
            streams.stop()
        health.stop()
        with suppress(*_JVM_GONE):
            spark.stop()


def trim_judgements_log(home: Home, query: str, kept_ms: int) -> None:
    """Remove old versions from the log of `judgements`, which every reader lists.

    Nothing is removed while a generation is created or the home is maintained. A canary reads the
    commits of the running generation since the canary began. Compaction reads the commits of other
    writers since the compaction began.

    Args:
        home: home of the table.
        query: id of the query that writes the table.
        kept_ms: retention of a version after a checkpoint of the log includes it.
    """
    try:
        if is_making(home) or is_maintaining(home):
            return
        shorten_log(home.table(JUDGEMENTS.name), query, kept_ms, time.time())
    except (OSError, ValueError) as error:  # Spark reports a truncated commit itself
        _LOG.warning("cannot shorten the log of judgements; it stays as it is", error=str(error))


def _status(home: Home, query: StreamingQuery, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status of the job.

    The JVM is queried for the newest batch only if a batch was committed since ``before``.
    """
    reached = judged_up_to(home.checkpoint)
    batch, batch_ms = reached[0] if reached else None, before.get("batch_ms")
    if batch_ms is None or batch != before.get("batch"):
        progress = query.lastProgress
        batch_ms = progress["durationMs"].get("triggerExecution") if progress else None
    return {
        "pid": os.getpid(),
        "state": "running",
        "batch": batch,
        "received_at_ms": reached[1] if reached else None,
        "batch_ms": batch_ms,
        "at": time.time(),
    }


def _finish(query: StreamingQuery) -> None:
    """Stop the query, between two batches if a batch ends within ten seconds.

    A batch that is interrupted is repeated after the next start.
    """
    limit = time.monotonic() + 10
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < limit:
        time.sleep(0.05)
    query.stop()
    _LOG.info("lifecycle stopped", query=query.name)
