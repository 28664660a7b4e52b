"""Kafka receiver on Spark Structured Streaming, with the interface of `Receiver`.

`Receiver` is the MQTT receiver. Each batch waits until its rows are acknowledged.

Rule 1: a batch is committed after its last row was passed to `KafkaReceiver.ack`. Any other batch
is delivered again as a whole.
Rule 2: the receiver never writes to Kafka. A canary returns after a later poll of the topics left
no unread records.
Rule 3: every wait of the caller is bounded. A separate thread starts, polls and stops Spark.
Rule 4: if Kafka deleted unread records, the connection counts as lost. The loss is reported, and
reading continues after the deleted records.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import structlog
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.decode import MAX_PAYLOAD_BYTES
from fleetpulse.core.times import parse_instant_ms
from fleetpulse.io.kafka.config import Canaries, KafkaOptions, Record, in_order, is_loss, is_silence, topic_of
from fleetpulse.io.mqtt.sockets import Backoff
from fleetpulse.io.mqtt.subscriber import POLL_BYTES, POLL_MESSAGES, AckToken, Arrived
from fleetpulse.io.spark.jars import JARS, KAFKA_JARS, resolve_jars
from fleetpulse.io.spark.scratch import leftovers, remove_folders
from fleetpulse.io.spark.session import JAVA_OPTIONS_KEY, SparkResources, settings, spark_session
from fleetpulse.io.system.wall_clock import wall_clock_ms

_LOG: Final = structlog.get_logger("kafka")
BATCH: Final = 4_000  # records of a batch, which are all in memory
TASK: Final = 250  # records of a task, which the JVM holds several times; 64 MB at the maximum record size
HEAP: Final = "512m"  # Spark requires 450 MB
EVERY: Final = "250 milliseconds"  # interval between polls of Kafka
CLOSE_S: Final = 5.0
_STEP_S: Final = 1
_COMMIT_S: Final = 2.0
_START_S: Final = 60.0
# Timeouts short enough to detect an unreachable Kafka before the canaries of the bridge time out.
_PATIENCE: Final = {
    "kafka.default.api.timeout.ms": "5000",
    "kafka.request.timeout.ms": "4000",
    "kafkaConsumer.pollTimeoutMs": "10000",
    "fetchOffset.numRetries": "1",
}
_COLUMNS: Final = ("timestamp", "topic", "partition", "offset", "key", "value")


class _BatchAborted(Exception):
    """Abort of a batch.

    Its text must be short: Spark searches it for a stack trace with a regular expression, which
    overflows the stack of the JVM on a long text.
    """


class _PollListener(StreamingQueryListener):
    """Listener that reports each poll of Kafka to the receiver, including idle polls."""

    def __init__(self, receiver: "KafkaReceiver") -> None:
        self.receiver = receiver

    def onQueryStarted(self, event: Any) -> None:
        """Do nothing: Kafka was not polled yet."""

    def onQueryProgress(self, event: Any) -> None:
        """Report a committed batch."""
        progress = json.loads(event.progress.json)
        whole = all(source["endOffset"] == source["latestOffset"] for source in progress["sources"])
        self.receiver.polled(str(progress["runId"]), progress["timestamp"] if whole else None, committed=True)

    def onQueryIdle(self, event: Any) -> None:
        """Report a poll without new records."""
        self.receiver.polled(str(event.runId), event.timestamp)

    def onQueryTerminated(self, event: Any) -> None:
        """Do nothing: the thread that awaits the query detects its end."""


class KafkaReceiver:
    """Receiver of Kafka records.

    It starts after the last batch committed to the checkpoint, or without one at the oldest record.

    Args:
        options: servers, topics and client options.
        checkpoint: checkpoint of the query.
        local_dir: folder for files that Spark can lose.

    Attributes:
        connected: whether Kafka answered, as of the last `poll`.
        connections: number of connections so far; after a new one, all unacknowledged messages are
            delivered again.
        problem: reason for the missing connection; None if connected.
        cause: cause of the newest connection failure: ``broker`` or ``network``, see `is_silence`.
    """

    def __init__(self, options: KafkaOptions, checkpoint: Path, local_dir: Path) -> None:
        self.connected = False
        self.connections = 0
        self.problem: str | None = None
        self.cause = "broker"
        self._options = options
        self._checkpoint = checkpoint
        self._local_dir = local_dir
        self._changed = threading.Condition()  # guards the attributes below
        self._run_id: str | None = None  # run id of the query while it runs
        self._up = False
        self._count = 0
        self._why: str | None = "Spark, which reads from Kafka, is starting"
        self._rows: deque[Arrived] = deque()
        self._unacknowledged: set[int] = set()
        self._number = 0
        self._batch_open = False  # a batch was delivered and is not committed yet
        self._canaries = Canaries()
        self._returned: list[Arrived] = []
        self._must_restart = False  # the query must be restarted
        self._batch_error = ""
        self._past_loss = False  # the query continues after deleted records
        self._ended = False
        self._fatal: str | None = None
        self._thread: threading.Thread | None = None

    def __str__(self) -> str:
        """Return topics and servers."""
        return str(self._options)

    # ---- methods for the caller

    def poll(self, timeout_s: float) -> list[Arrived]:
        """Return the messages that arrived; wait for them at most ``timeout_s``.

        One call returns about `POLL_MESSAGES` messages or `POLL_BYTES` bytes.

        Raises:
            FleetError: Spark's JVM ended.
        """
        if self._thread is None:
            self._ended = False
            self._thread = threading.Thread(target=self._read, name="kafka", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._returned or self._fatal, timeout_s)
            if self._fatal:
                raise FleetError(self._fatal, code="kafka-source-failed")
            self.connected, self.connections, self.problem = self._up, self._count, self._why
            arrived: list[Arrived] = []
            size = 0
            while self._rows and len(arrived) < POLL_MESSAGES and size < POLL_BYTES:
                arrived.append(self._rows.popleft())
                size += len(arrived[-1].payload)
            if not self._rows:
                arrived, self._returned = arrived + self._returned, []
            return arrived

    def idle(self, timeout_s: float) -> None:
        """Sleep ``timeout_s`` without receiving."""
        time.sleep(timeout_s)

    def ack(self, tokens: Iterable[AckToken | None]) -> None:
        """Acknowledge messages; skip those of earlier connections, which are redelivered."""
        with self._changed:
            self._unacknowledged.difference_update(token[1] for token in tokens if token and token[0] == self._count)
            self._changed.notify_all()

    def publish(self, topic: str, payload: bytes) -> bool:
        """Accept a canary, which returns after all records that are in Kafka now.

        Nothing else can be published.
        """
        with self._changed:
            if self._up:
                self._canaries.send(topic, payload, wall_clock_ms())
            return self._up

    def reconnect(self, why: str, cause: str = "broker") -> None:
        """Restart the query, so that unacknowledged messages are delivered again."""
        self.cause = cause
        with self._changed:
            self._lose(why)
            self._must_restart = True

    def close(self, *, forget: bool = False) -> None:
        """Stop the query and its session; the next start rereads unacknowledged records.

        Args:
            forget: no effect, because retention in Kafka does not depend on readers.
        """
        del forget
        with self._changed:
            if not self._unacknowledged:  # without a commit, the last batch would be delivered again
                self._changed.wait_for(lambda: not self._batch_open, _COMMIT_S)
            self._lose("closed")
            self._ended = True
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(CLOSE_S)

    # ---- calls from the query

    def polled(self, run_id: str, began: str | None, *, committed: bool = False) -> None:
        """Record a poll of Kafka.

        Args:
            run_id: run id of the query.
            began: start of the poll if it left no unread records; otherwise None.
            committed: whether the poll resulted in a batch, which is committed.
        """
        with self._changed:
            if run_id != self._run_id:
                return
            self._answered()
            self._batch_open &= not committed
            if committed and self._past_loss:
                self._past_loss, self._must_restart = False, True  # restart, so that a further loss is reported
            if began is not None:
                self._returned += [Arrived(*one, False, None) for one in self._canaries.take_returned(parse_instant_ms(began))]
            self._changed.notify_all()

    def _answered(self) -> None:
        if not self._up:
            self._up, self._why = True, None
            self._count += 1

    def _take(self, batch: DataFrame, run_id: str) -> None:
        """Deliver a batch and wait until all of its rows are acknowledged."""
        try:
            records = in_order(_records(batch.select(*_COLUMNS).toArrow()))
        except (PySparkException, Py4JError, OSError, EOFError) as error:
            self._batch_error = str(error)
            raise _BatchAborted("reading a batch failed") from None
        with self._changed:
            if run_id != self._run_id:
                raise _BatchAborted("the query is over")
            self._answered()
            for record in records:
                self._number += 1
                self._rows.append(Arrived(topic_of(record), record.value or b"", False, (self._count, self._number)))
                self._unacknowledged.add(self._number)
            self._batch_open = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._unacknowledged or run_id != self._run_id)
            if run_id != self._run_id:
                raise _BatchAborted("the query is over")

    def _lose(self, why: str) -> None:
        """Invalidate all rows of the query and abort the waiting batch."""
        self._run_id, self._up, self._why, self._batch_open = None, False, why, False
        self._rows.clear()
        self._unacknowledged.clear()
        self._returned.clear()
        self._canaries.clear()
        self._changed.notify_all()

    # ---- the thread

    def _read(self) -> None:
        pauses, spark = Backoff(), None
        remove_folders(leftovers(self._local_dir))
        while not self._ended:
            if not pauses.wait(_STEP_S):
                continue
            pauses.tried()
            try:
                spark = spark or self._session()
                self._follow(spark, pauses)
            except (PySparkException, Py4JError, FleetError, OSError) as error:
                self._failed(error)
                if "stopped" in str(error):  # an earlier user of the process's session stopped it
                    spark = None
        if spark is not None:
            try:
                spark.stop()
            except (PySparkException, Py4JError, OSError) as error:
                _LOG.warning("stopping the Spark session failed", why=type(error).__name__)

    def _session(self) -> SparkSession:
        jars = os.pathsep.join(str(jar) for jar in resolve_jars(jars=(*JARS, *KAFKA_JARS)))
        default = settings(self._local_dir, SparkResources(1, HEAP))[JAVA_OPTIONS_KEY]
        extra = {
            "spark.driver.extraClassPath": jars,
            "spark.sql.extensions": "",  # Delta's extension slows the start and is not needed
            # The query mostly waits, so full compilation would cost more than it saves. The JVM
            # exits if it is out of memory, so that the bridge is restarted.
            JAVA_OPTIONS_KEY: f"{default} -XX:TieredStopAtLevel=1 -XX:+ExitOnOutOfMemoryError",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "50",  # limits the memory of a transfer
            "spark.sql.streaming.noDataProgressEventInterval": "0",  # report each idle poll
            "spark.sql.streaming.stopTimeout": str(int(CLOSE_S * 500)),
            "spark.sql.pyspark.jvmStacktrace.enabled": "true",  # contains the cause of an error
        }
        spark = spark_session("fleet kafka", local_dir=self._local_dir, size=SparkResources(1, HEAP), extra=extra)
        spark.sparkContext.setLogLevel("OFF")  # Spark would log a trace at each attempt; `_failed` logs the cause
        spark.streams.addListener(_PollListener(self))
        return spark

    def _follow(self, spark: SparkSession, pauses: Backoff) -> None:
        """Run the query until it fails, or until a restart or the end is requested."""
        query = self._start(spark)
        try:
            while not self._ended and not self._must_restart and not query.awaitTermination(_STEP_S):
                if self._up:
                    pauses.reset()
        finally:
            with self._changed:
                self._lose(self._why or "reconnecting to Kafka")
            query.stop()

    def _start(self, spark: SparkSession) -> StreamingQuery:
        """Start the query; its batches wait until the receiver has its run id."""
        options = {
            "kafka.bootstrap.servers": self._options.servers,
            "subscribe": ",".join(self._options.topics),
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": str(BATCH),
            "maxRecordsPerPartition": str(TASK),
            "failOnDataLoss": str(not self._past_loss).lower(),
            **_PATIENCE,
            **{f"kafka.{name}": value for name, value in self._options.client.items()},
        }
        started = threading.Event()
        found = spark.readStream.format("kafka").options(**options).load()
        shortened = found.withColumn("value", sf.substring("value", 1, MAX_PAYLOAD_BYTES + 1))  # one byte too many: refused

        def each(batch: DataFrame, _: int) -> None:
            started.wait(_START_S)
            self._take(batch, str(query.runId))

        writer = shortened.writeStream.foreachBatch(each).trigger(processingTime=EVERY)
        query = writer.option("checkpointLocation", str(self._checkpoint)).start()
        with self._changed:
            self._must_restart, self._run_id = False, str(query.runId)
        started.set()
        return query

    def _failed(self, error: Exception) -> None:
        message = str(error)
        if _BatchAborted.__name__ in message:
            message, self._batch_error = self._batch_error, ""
        jvm_exited = isinstance(error, Py4JNetworkError | OSError)
        if isinstance(error, FleetError) or (not message and self._why):
            meaning = message or str(self._why)
        elif is_loss(message):
            self._past_loss = True
            meaning = f"records of {self._options} were deleted before the bridge read them; reading continues after them"
        elif jvm_exited:
            meaning = f"Spark's JVM, which reads from Kafka, exited unexpectedly ({message[:80]}); restart the bridge"
        else:
            meaning = self._options.explain(message)
        with self._changed:
            if meaning != self._why and not self._ended:
                _LOG.warning("not reading from Kafka", why=meaning)
            self._lose(meaning)
            self._fatal = meaning if jvm_exited else None
            self.cause = "network" if is_silence(message) else "broker"


def _records(table: pa.Table) -> list[Record]:
    columns = (table["timestamp"].cast("int64"), *(table[name] for name in _COLUMNS[1:]))
    return [Record(*row) for row in zip(*(column.to_pylist() for column in columns), strict=True)]
