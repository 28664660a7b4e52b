"""The lifecycle job: bronze in, judgements out. The JVM plans, shuffles blocks, keeps state and commits."""

import os
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import structlog
from py4j.protocol import Py4JNetworkError
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.exclusive import is_maintaining, is_making
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.maintenance.vacuum import shorten_log
from fleetpulse.io.spark.scratch import remains_of, remove_folders
from fleetpulse.io.spark.session import SparkResources, spark_session
from fleetpulse.io.system.kernel_cache import compile_beside
from fleetpulse.io.system.process import Stop, write_status
from fleetpulse.io.tables.adaptive_batching import trigger_ms
from fleetpulse.io.tables.stream_health import StreamHealth

_LOG: Final = structlog.get_logger("lifecycle")
_SPARK: Final = "spark"  # in the home; what lies in `local` and `blocks-*` there is this job's alone
_COMPILED_S: Final = 60.0
_LOOK_S: Final = 1.0  # between two looks at the query: each asks the JVM, and writes the status
_SHORTEN_EVERY_S: Final = 60.0
_JVM_GONE: Final = (Py4JNetworkError, ConnectionError)  # how py4j says that nobody listens any more


@dataclass(frozen=True, slots=True)
class LifecycleOptions:
    """How often the job makes a batch, and for how long it keeps what it has written, in milliseconds.

    Attributes:
        hold_ms: how long rows of a live fleet are held at most, see `adaptive_batching`.
        batch_every_ms: from the begin of one batch to that of the next one at least, also where there is more to be read.
        health_ms: the rows of `stream_health`; None for ever.
        versions_ms: a version of `judgements` in the log, once a checkpoint holds all that it says.
    """

    hold_ms: int
    batch_every_ms: int
    health_ms: int | None
    versions_ms: int


def run_lifecycle(home: Home, stop: Stop, habits: LifecycleOptions, size: SparkResources) -> None:
    """Run the job of a home until stopped.

    Args:
        home: the home.
        stop: when to end.
        habits: how often it makes a batch, and for how long it keeps what it has written.
        size: what it may take of the machine.

    Raises:
        FleetError: the query failed; its own words are in the log.
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
        remove_folders(remains_of(home.path / _SPARK))
        _run(home, stop, habits, size)


def _run(home: Home, stop: Stop, habits: LifecycleOptions, size: SparkResources) -> None:
    compiling = compile_beside()  # while the JVM starts; Spark's daemon of Python workers finds it done
    spark = spark_session("fleetpulse-lifecycle", local_dir=home.path / _SPARK, size=size)
    if compiling:
        with suppress(subprocess.TimeoutExpired):
            compiling.wait(_COMPILED_S)
    health = StreamHealth(home, home.generation().number, habits.health_ms)
    look_ms, held_ms = trigger_ms(habits.hold_ms, habits.batch_every_ms)
    query: StreamingQuery | None = None
    status: Mapping[str, Any] = {}
    next_s = time.monotonic()
    try:
        query = start(spark, home, f"{look_ms} milliseconds", held_ms=held_ms, stopped=stop.is_set)
        health.follow(query)
        while not stop.wait(_LOOK_S):
            if not query.isActive:
                raise FleetError(
                    f"the lifecycle job stopped by itself: {query.exception() or 'no reason given'}", code="job-ended"
                )
            status = _status(home, query, status)
            write_status(home.run("lifecycle"), status)
            if time.monotonic() >= next_s:
                shorten(home, str(query.id), habits.versions_ms)
                next_s = time.monotonic() + _SHORTEN_EVERY_S
    except _JVM_GONE as error:
        raise FleetError(
            "Spark's JVM, which judges, ended by itself: killed, or out of memory (the log says what it said)", code="jvm-ended"
        ) from error
    finally:
        with suppress(*_JVM_GONE):
            if query is not None:
                _finish(query)
        health.stop()
        with suppress(*_JVM_GONE):
            spark.stop()


def shorten(home: Home, query: str, kept_ms: int) -> None:
    """Remove old versions from the log of `judgements`: each reader lists all that is there.

    Not while a generation is made, or the home is maintained: a canary reads what the running one has committed since it began,
    and who joins files what others have committed meanwhile.

    Args:
        home: whose.
        query: the id of the query that writes.
        kept_ms: for how long a version stays once a checkpoint holds all that it says.
    """
    try:
        if is_making(home) or is_maintaining(home):
            return
        shorten_log(home.table(JUDGEMENTS.name), query, kept_ms, time.time())
    except (OSError, ValueError) as error:  # a commit that was cut off is for Spark to name
        _LOG.warning("the log of judgements stays as long as it is", error=str(error))


def _status(home: Home, query: StreamingQuery, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job's status; the JVM is asked for the newest batch only where there is one since ``before``."""
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
    """Stop between two batches where that comes within ten seconds: less is done twice after the next start."""
    limit = time.monotonic() + 10
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < limit:
        time.sleep(0.05)
    query.stop()
    _LOG.info("lifecycle stopped", query=query.name)
