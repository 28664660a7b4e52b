"""Runner of the streams beside the lifecycle: starts their queries, and restarts those that fail.

Rule 1: a stream never fails or stops the lifecycle query. A failed stream is restarted after a pause, which grows
with each failure; its checkpoint loses nothing meanwhile.
Rule 2: a stream that the settings do not name costs nothing: none of its code is imported.
Rule 3: the checkpoint of a stream that is switched off is set aside, since it would keep versions of bronze for ever.
Rule 4: the begins are recorded before the lifecycle query starts. Otherwise the rows of its first batches would be
missing in a stream of a new home whenever that stream starts after them.

`rebuilds` has the version at which a stream begins without a checkpoint.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from itertools import takewhile
from typing import Any, Final

import structlog
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.core.errors import FleetError
from fleetpulse.core.streams.names import StreamName, StreamRestart
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.io.checkpoints.checkpoint import committed_batches, relocate
from fleetpulse.io.checkpoints.stream_rebuild import finish as finish_rebuild
from fleetpulse.io.checkpoints.stream_rebuild import read_begin, set_aside
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.scratch import remove_temporary_files
from fleetpulse.io.spark.session import changed_settings
from fleetpulse.io.streams.alarm_forwarder import AlarmForwarder
from fleetpulse.io.streams.rebuilds import begin_of, end_finished_rebuild

_LOG: Final = structlog.get_logger("streams")
_FIRST_PAUSE_S: Final = 5.0
_LONGEST_PAUSE_S: Final = 600.0
_STOP_S: Final = 10.0  # wait for the end of a batch
_OF_THE_QUERY: Final = {  # bronze has ticks, so each batch has rows, and one without rows has no work
    "spark.sql.streaming.noDataMicroBatches.enabled": "false"
}
_MODULES: Final[Mapping[StreamName, str]] = {  # each has `start_query(spark, home, options, begin)`
    StreamName.SESSIONS: "fleetpulse.io.streams.sessions",
    StreamName.VITALS: "fleetpulse.io.streams.vitals",
    StreamName.COMMANDS: "fleetpulse.io.streams.commands",
}


class _Running:
    """One stream: its query, its newest committed batch, its failures, and the time of its next start."""

    def __init__(self) -> None:
        self.query: StreamingQuery | None = None
        self.batch: int | None = None
        self.failures = 0
        self.failures_since_batch = 0
        self.next_s = 0.0
        self.fault: str | None = None


class StreamRunner:
    """Runner of the streams of a home in one Spark session; create it before the lifecycle query starts.

    Args:
        spark: Spark session of the lifecycle job.
        home: home of the tables and the checkpoints.
        options: streams and their options.
    """

    def __init__(self, spark: SparkSession, home: Home, options: StreamOptions) -> None:
        self._spark, self._home, self._options = spark, home, options
        for name in {*StreamName} - {*options.names}:
            finish_rebuild(home.stream_checkpoint(name))
            set_aside(home.stream_checkpoint(name))
        for name in options.names:
            with suppress(FleetError, OSError):  # `check` tries again, and reports it
                begin_of(home, name)
        self._running = {name: _Running() for name in options.names}
        self._alarms = AlarmForwarder(home) if StreamName.VITALS in options.names else None

    def check(self) -> None:
        """Start each stream that does not run and whose pause is over; call it every few seconds."""
        for name, one in self._running.items():
            batch = max(committed_batches(self._home.stream_checkpoint(name)), default=None)
            if batch != one.batch:
                one.batch, one.failures_since_batch = batch, 0
            if one.query is not None and one.query.isActive:
                self._end_rebuild(name, one)
                continue
            if one.query is not None:
                why = str(one.query.exception() or "the query ended")
                if StreamRestart.__name__ not in why:
                    self._failed(name, one, why)
            if time.monotonic() >= one.next_s:
                try:
                    one.query = start_stream(self._spark, self._home, name, self._options)
                    one.fault = None
                except (FleetError, PySparkException, OSError) as error:
                    self._failed(name, one, str(error))

    def _end_rebuild(self, name: StreamName, one: _Running) -> None:
        """End a finished rebuild; if its record or the log cannot be read, the next call tries again."""
        try:
            end_finished_rebuild(self._home, name)
        except (FleetError, OSError) as error:
            if one.fault != str(error):
                _LOG.error("the end of a rebuild cannot be determined; trying again", stream=str(name), error=str(error))
            one.fault = str(error)
        else:
            one.fault = None

    def forward_alarms(self) -> None:
        """Forward new alarms to the lifecycle; a failure is logged, and the next call tries again."""
        if self._alarms is None:
            return
        try:
            if count := self._alarms.forward():
                _LOG.info("alarms count as errors of their devices", alarms=count)
        except (FleetError, OSError) as error:
            _LOG.error("alarms cannot be forwarded; they wait in their table", error=str(error))

    def _failed(self, name: StreamName, one: _Running, why: str) -> None:
        one.query, one.fault = None, cause_of(why)
        pause_s = min(_FIRST_PAUSE_S * 2**one.failures_since_batch, _LONGEST_PAUSE_S)
        one.failures += 1
        one.failures_since_batch += 1
        one.next_s = time.monotonic() + pause_s
        _LOG.error("a stream failed; it starts again", stream=str(name), error=one.fault, pause_s=pause_s)

    def status(self) -> dict[str, dict[str, Any]]:
        """Return the state, the newest batch, the last fault and the number of missed rows of each stream."""
        return {name.value: self._status_of(name, one) for name, one in self._running.items()}

    def _status_of(self, name: StreamName, one: _Running) -> dict[str, Any]:
        begun = None
        with suppress(FleetError):  # a stream whose record is damaged cannot start, which is its fault
            begun = read_begin(self._home.stream_checkpoint(name))
        return {
            "state": "failed" if one.query is None and one.fault else "running",
            "batch": one.batch,
            "failures": one.failures,
            "error": one.fault,
            "missed": 0 if begun is None else begun.missed,
        }

    def stop(self) -> None:
        """Stop all streams, each between two batches if its batch ends within ten seconds."""
        limit = time.monotonic() + _STOP_S
        for one in self._running.values():
            if one.query is None:
                continue
            while one.query.isActive and one.query.status["isTriggerActive"] and time.monotonic() < limit:
                time.sleep(0.05)
            with suppress(PySparkException):
                one.query.stop()


def cause_of(failure: str) -> str:
    """Return the line of Spark's description of a failure that names its cause.

    If Python code failed, the description has its traceback, whose last line at the margin is the cause. The frames of
    the JVM follow it.
    """
    lines = failure.splitlines()
    if not any("Traceback (most recent call last)" in line for line in lines):
        return lines[0] if lines else ""
    python = takewhile(lambda line: not line.startswith(("\tat ", "===")), lines)
    return [line for line in python if line and not line[0].isspace()][-1]


def start_stream(spark: SparkSession, home: Home, name: StreamName, options: StreamOptions) -> StreamingQuery:
    """Start the query of a stream from its checkpoint, or without one as `begin_of` decides.

    Args:
        spark: Spark session.
        home: home of the tables and the checkpoint.
        name: the stream.
        options: options of the stream.

    Raises:
        FleetError: a checkpoint or a snapshot is damaged.
    """
    checkpoint, begin = home.stream_checkpoint(name), begin_of(home, name)
    relocate(checkpoint)
    remove_temporary_files(checkpoint)
    with changed_settings(spark, _OF_THE_QUERY):
        return import_module(_MODULES[name]).start_query(spark, home, options, begin)
