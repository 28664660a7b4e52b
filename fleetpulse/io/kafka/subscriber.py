"""Receiving from Kafka, by the interface of `Receiver`: a stream of Spark whose batches wait until their rows are acknowledged.

Rule 1: a batch is committed after its last row was given to `KafkaReceiver.ack`; any other comes again, whole.
Rule 2: Kafka is only read. A canary comes back when a look at its topics that began later found nothing that we have not.
Rule 3: every wait of the caller is bounded; Spark is started, asked and stopped by a thread of our own.
Rule 4: what Kafka deleted before we read it is a connection lost: it is said, and reading goes on behind it.
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
from fleetpulse.io.mqtt.subscriber import POLL_BYTES, POLL_MESSAGES, Arrived, Token
from fleetpulse.io.spark.jars import JARS, KAFKA_JARS, resolve_jars
from fleetpulse.io.spark.scratch import remains_of, remove_folders
from fleetpulse.io.spark.session import OPTIONS, SparkResources, settings, spark_session
from fleetpulse.io.system.wall_clock import wall_clock_ms

_LOG: Final = structlog.get_logger("kafka")
BATCH: Final = 4_000  # records: all of a batch are in memory at once
TASK: Final = 250  # records: of a task, which are in the JVM's several times over; 64 MB if each is as large as it may be
HEAP: Final = "512m"  # Spark takes no less than 450 MB
EVERY: Final = "250 milliseconds"  # a look at Kafka
CLOSE_S: Final = 5.0
_STEP_S: Final = 1
_COMMIT_S: Final = 2.0
_START_S: Final = 60.0
# Kafka that does not answer is to be known before the bridge's own patience with its canaries is at its end.
_PATIENCE: Final = {
    "kafka.default.api.timeout.ms": "5000",
    "kafka.request.timeout.ms": "4000",
    "kafkaConsumer.pollTimeoutMs": "10000",
    "fetchOffset.numRetries": "1",
}
_COLUMNS: Final = ("timestamp", "topic", "partition", "offset", "key", "value")


class _LetGo(Exception):
    """A batch is given up; its text is short, since Spark looks for a trace in it, and a long one costs it its stack."""


class _Looks(StreamingQueryListener):
    """Tells the receiver of each look at Kafka: of those that found nothing too."""

    def __init__(self, receiver: "KafkaReceiver") -> None:
        self.receiver = receiver

    def onQueryStarted(self, event: Any) -> None:
        """Nothing: Kafka was not asked yet."""

    def onQueryProgress(self, event: Any) -> None:
        """A batch is committed."""
        said = json.loads(event.progress.json)
        whole = all(source["endOffset"] == source["latestOffset"] for source in said["sources"])
        self.receiver.looked(str(said["runId"]), said["timestamp"] if whole else None, committed=True)

    def onQueryIdle(self, event: Any) -> None:
        """There was nothing new."""
        self.receiver.looked(str(event.runId), event.timestamp)

    def onQueryTerminated(self, event: Any) -> None:
        """Nothing: the thread that awaits it learns of it."""


class KafkaReceiver:
    """Receives from topics of Kafka; what no batch of an earlier life has committed comes first, from the oldest on.

    Args:
        options: which topics of which Kafka.
        checkpoint: where the query keeps how far it is.
        local_dir: where Spark may write what it can lose.

    Attributes:
        connected: whether Kafka answered, as of the last `poll`.
        connections: how often it did after it had not; when it grows, all that was not acknowledged comes again.
        problem: why there is no connection; None where there is one.
        cause: what the newest loss lies with: ``broker`` or ``network``, see `is_silence`.
    """

    def __init__(self, options: KafkaOptions, checkpoint: Path, local_dir: Path) -> None:
        self.connected = False
        self.connections = 0
        self.problem: str | None = None
        self.cause = "broker"
        self._options = options
        self._checkpoint = checkpoint
        self._local_dir = local_dir
        self._changed = threading.Condition()  # guards all that follows
        self._run_id: str | None = None  # of the query, while it runs
        self._up = False
        self._count = 0
        self._why: str | None = "Spark, which reads from Kafka, is starting"
        self._rows: deque[Arrived] = deque()
        self._unacknowledged: set[int] = set()
        self._number = 0
        self._in_hand = False  # a batch was handed over and is not committed yet
        self._canaries = Canaries()
        self._back: list[Arrived] = []
        self._again = False  # the query is to be started again
        self._batch_error = ""
        self._past_loss = False  # it goes on behind what Kafka deleted
        self._ended = False
        self._fatal: str | None = None
        self._thread: threading.Thread | None = None

    def __str__(self) -> str:
        """Return what it reads."""
        return str(self._options)

    # ---- what the caller asks for

    def poll(self, timeout_s: float) -> list[Arrived]:
        """Return what arrived; wait for it at most ``timeout_s``. About `POLL_MESSAGES` or `POLL_BYTES` at a time.

        Raises:
            FleetError: Spark's JVM ended.
        """
        if self._thread is None:
            self._ended = False
            self._thread = threading.Thread(target=self._read, name="kafka", daemon=True)
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._rows or self._back or self._fatal, timeout_s)
            if self._fatal:
                raise FleetError(self._fatal, code="kafka-source-failed")
            self.connected, self.connections, self.problem = self._up, self._count, self._why
            arrived: list[Arrived] = []
            size = 0
            while self._rows and len(arrived) < POLL_MESSAGES and size < POLL_BYTES:
                arrived.append(self._rows.popleft())
                size += len(arrived[-1].payload)
            if not self._rows:
                arrived, self._back = arrived + self._back, []
            return arrived

    def idle(self, timeout_s: float) -> None:
        """Take nothing in; takes ``timeout_s``."""
        time.sleep(timeout_s)

    def ack(self, tokens: Iterable[Token | None]) -> None:
        """Acknowledge messages; those of an earlier connection are left out, since they come again."""
        with self._changed:
            self._unacknowledged.difference_update(token[1] for token in tokens if token and token[0] == self._count)
            self._changed.notify_all()

    def publish(self, topic: str, payload: bytes) -> bool:
        """Take a canary, which comes back behind all that is in Kafka by now; nothing else can be published."""
        with self._changed:
            if self._up:
                self._canaries.send(topic, payload, wall_clock_ms())
            return self._up

    def reconnect(self, why: str, cause: str = "broker") -> None:
        """Read anew what was not acknowledged."""
        self.cause = cause
        with self._changed:
            self._lose(why)
            self._again = True

    def close(self, *, forget: bool = False) -> None:
        """End the query and its session; what was not acknowledged stays in Kafka.

        Args:
            forget: no effect: Kafka keeps what it keeps, whoever reads.
        """
        del forget
        with self._changed:
            if not self._unacknowledged:  # the last batch would come again
                self._changed.wait_for(lambda: not self._in_hand, _COMMIT_S)
            self._lose("closed")
            self._ended = True
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(CLOSE_S)

    # ---- what the query says

    def looked(self, run_id: str, began: str | None, *, committed: bool = False) -> None:
        """Take note of a look at Kafka.

        Args:
            run_id: whose.
            began: when it began, where it found nothing that we have not.
            committed: whether it made a batch.
        """
        with self._changed:
            if run_id != self._run_id:
                return
            self._answered()
            self._in_hand &= not committed
            if committed and self._past_loss:
                self._past_loss, self._again = False, True  # a further loss is to be said again
            if began is not None:
                self._back += [Arrived(*one, False, None) for one in self._canaries.returned(parse_instant_ms(began))]
            self._changed.notify_all()

    def _answered(self) -> None:
        if not self._up:
            self._up, self._why = True, None
            self._count += 1

    def _take(self, batch: DataFrame, run_id: str) -> None:
        """Hand a batch over, and wait until all of its rows are acknowledged."""
        try:
            records = in_order(_records(batch.select(*_COLUMNS).toArrow()))
        except (PySparkException, Py4JError, OSError, EOFError) as error:
            self._batch_error = str(error)
            raise _LetGo("a batch could not be read") from None
        with self._changed:
            if run_id != self._run_id:
                raise _LetGo("the query is over")
            self._answered()
            for record in records:
                self._number += 1
                self._rows.append(Arrived(topic_of(record), record.value or b"", False, (self._count, self._number)))
                self._unacknowledged.add(self._number)
            self._in_hand = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._unacknowledged or run_id != self._run_id)
            if run_id != self._run_id:
                raise _LetGo("the query is over")

    def _lose(self, why: str) -> None:
        """No row of the query counts any longer; whoever waits for its acknowledgement gives up."""
        self._run_id, self._up, self._why, self._in_hand = None, False, why, False
        self._rows.clear()
        self._unacknowledged.clear()
        self._back.clear()
        self._canaries.clear()
        self._changed.notify_all()

    # ---- the thread

    def _read(self) -> None:
        pauses, spark = Backoff(), None
        remove_folders(remains_of(self._local_dir))
        while not self._ended:
            if not pauses.over(_STEP_S):
                continue
            pauses.tried()
            try:
                spark = spark or self._session()
                self._follow(spark, pauses)
            except (PySparkException, Py4JError, FleetError, OSError) as error:
                self._failed(error)
                if "stopped" in str(error):  # Spark's session was ended by whoever had it before us
                    spark = None
        if spark is not None:
            try:
                spark.stop()
            except (PySparkException, Py4JError, OSError) as error:
                _LOG.warning("the session did not end in order", why=type(error).__name__)

    def _session(self) -> SparkSession:
        jars = os.pathsep.join(str(jar) for jar in resolve_jars(jars=(*JARS, *KAFKA_JARS)))
        usual = settings(self._local_dir, SparkResources(1, HEAP))[OPTIONS]
        extra = {
            "spark.driver.extraClassPath": jars,
            "spark.sql.extensions": "",  # Delta's cost a start, and nothing here is a table
            # It reads and waits: compiling it well would cost more than it spares. Without memory it is to start anew.
            OPTIONS: f"{usual} -XX:TieredStopAtLevel=1 -XX:+ExitOnOutOfMemoryError",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "50",  # it is written and sent piece by piece
            "spark.sql.streaming.noDataProgressEventInterval": "0",  # each look tells
            "spark.sql.streaming.stopTimeout": str(int(CLOSE_S * 500)),
            "spark.sql.pyspark.jvmStacktrace.enabled": "true",  # the cause of an error is in it
        }
        spark = spark_session("fleet kafka", local_dir=self._local_dir, size=SparkResources(1, HEAP), extra=extra)
        spark.sparkContext.setLogLevel("OFF")  # a trace at each try, for hours; what it means is said by us
        spark.streams.addListener(_Looks(self))
        return spark

    def _follow(self, spark: SparkSession, pauses: Backoff) -> None:
        """Run the query until it fails, or until it is to end."""
        query = self._start(spark)
        try:
            while not self._ended and not self._again and not query.awaitTermination(_STEP_S):
                if self._up:
                    pauses.held()
        finally:
            with self._changed:
                self._lose(self._why or "the connection to Kafka is being made anew")
            query.stop()

    def _start(self, spark: SparkSession) -> StreamingQuery:
        """Start the query; it cannot hand over a batch before its id is known to us."""
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
        begun = threading.Event()
        found = spark.readStream.format("kafka").options(**options).load()
        shortened = found.withColumn("value", sf.substring("value", 1, MAX_PAYLOAD_BYTES + 1))  # enough to be refused for it

        def each(batch: DataFrame, _: int) -> None:
            begun.wait(_START_S)
            self._take(batch, str(query.runId))

        writer = shortened.writeStream.foreachBatch(each).trigger(processingTime=EVERY)
        query = writer.option("checkpointLocation", str(self._checkpoint)).start()
        with self._changed:
            self._again, self._run_id = False, str(query.runId)
        begun.set()
        return query

    def _failed(self, error: Exception) -> None:
        words = str(error)
        if _LetGo.__name__ in words:
            words, self._batch_error = self._batch_error, ""
        gone = isinstance(error, Py4JNetworkError | OSError)
        if isinstance(error, FleetError) or (not words and self._why):
            meaning = words or str(self._why)
        elif is_loss(words):
            self._past_loss = True
            meaning = f"records of {self._options} were deleted before we had read them; what is left is read"
        elif gone:
            meaning = f"Spark's JVM, which reads from Kafka, ended by itself ({words[:80]}); the bridge is to be started again"
        else:
            meaning = self._options.meaning(words)
        with self._changed:
            if meaning != self._why and not self._ended:
                _LOG.warning("not reading from Kafka", why=meaning)
            self._lose(meaning)
            self._fatal = meaning if gone else None
            self.cause = "network" if is_silence(words) else "broker"


def _records(table: pa.Table) -> list[Record]:
    columns = (table["timestamp"].cast("int64"), *(table[name] for name in _COLUMNS[1:]))
    return [Record(*row) for row in zip(*(column.to_pylist() for column in columns), strict=True)]
