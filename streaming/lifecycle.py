"""The lifecycle job: bronze in, judgements out. The JVM plans, shuffles blocks, keeps state and commits."""

import os
import threading
import time
from typing import Any, Final

import structlog
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.columnar.warm import warm
from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoint import judged_up_to
from fleetpulse.io.home import Home
from fleetpulse.io.lifecycle_query import start
from fleetpulse.io.process import Stop, write_status
from fleetpulse.io.spark import Size, spark_session
from fleetpulse.io.stream_health import StreamHealth

_LOG: Final = structlog.get_logger("lifecycle")
_WARM_LIMIT_S: Final = 60.0


def run_lifecycle(home: Home, stop: Stop, health_kept_ms: int | None, size: Size) -> None:
    """Run the job of a home until stopped.

    Args:
        home: the home.
        stop: when to end.
        health_kept_ms: how long the rows of `stream_health` are kept; None for ever.
        size: what it may take of the machine.

    Raises:
        FleetError: the query failed; its own words are in the log.
    """
    write_status(home.run("lifecycle"), {"pid": os.getpid(), "state": "starting"})
    while not (home.table(MESSAGES.name) / "_delta_log").exists():
        if stop.wait(0.1):
            return
    while holder := home.state_holder():
        write_status(home.run("lifecycle"), {"pid": os.getpid(), "state": f"waiting for {holder}"})
        if stop.wait(0.5):
            return
    with home.state_held("the lifecycle job"):
        _run(home, stop, health_kept_ms, size)


def _run(home: Home, stop: Stop, health_kept_ms: int | None, size: Size) -> None:
    warming = threading.Thread(target=warm, name="warm", daemon=True)
    warming.start()  # while the JVM starts; the first batch's workers find it done instead of each doing it
    spark = spark_session("fleetpulse-lifecycle", local_dir=home.path / "spark", size=size)
    warming.join(_WARM_LIMIT_S)
    health = StreamHealth(home, home.generation().number, health_kept_ms)
    query = start(spark, home)
    health.follow(spark, query)
    try:
        while not stop.wait(0.3):
            if not query.isActive:
                raise FleetError(f"the lifecycle job stopped by itself: {query.exception() or 'no reason given'}")
            write_status(home.run("lifecycle"), _status(home, query))
    finally:
        _finish(query)
        health.stop()
        spark.stop()


def _status(home: Home, query: StreamingQuery) -> dict[str, Any]:
    progress = query.lastProgress
    reached = judged_up_to(home.checkpoint)
    return {
        "pid": os.getpid(),
        "state": "running",
        "batch": reached[0] if reached else None,
        "received_at_ms": reached[1] if reached else None,
        "batch_ms": progress["durationMs"].get("triggerExecution") if progress else None,
        "at": time.time(),
    }


def _finish(query: StreamingQuery) -> None:
    """Stop between two batches where that comes within ten seconds: less is done twice after the next start."""
    limit = time.monotonic() + 10
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < limit:
        time.sleep(0.05)
    query.stop()
    _LOG.info("lifecycle stopped", query=query.name)
