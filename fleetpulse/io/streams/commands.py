"""Stream of commands and their answers: Spark's full outer join of two streams, both over bronze.

Rule 1: a command and an answer meet if device and command id are equal, and the answer was received within the
timeout: that of the command, and at most that of the home. When the watermark has passed the timeout of the home, Spark
drops their state: a command without an answer has then timed out, and an answer without a command is unmatched.
Rule 2: the time is ``received_at``, so no row is late, and the result depends on bronze alone. An answer may precede
its command by `CLOCK_LEAD_MS`, since two bridges stamp them by two clocks.
Rule 3: a command has one row more, ``pending``, when it is read. Reports derive its state from all of its rows.
Rule 4: a rebuild can read an answer without its command, or a command without its answer, if the other one was received
before its span. Such an answer is not unmatched, and such a command has not timed out, if the table has both together.
"""

from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.core.rows import Kind
from fleetpulse.core.streams.commands import ACCEPTED, COMMAND, CommandStatus
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.core.streams.tables import COMMANDS
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.stream_rebuild import write_span
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.session import changed_settings
from fleetpulse.io.streams.bronze import bronze_stream, by_receipt, of_kinds
from fleetpulse.io.streams.sink import TableSink

CLOCK_LEAD_MS: Final = 10_000
_OF_THE_QUERY: Final = {
    "spark.sql.shuffle.partitions": "1",  # few rows, and each partition has four state stores
    "spark.sql.streaming.stateStore.encodingFormat": "unsaferow",  # a join supports no other one
}
_SENT: Final = "op STRING, id STRING, name STRING, payload STRING, timeout_ms LONG"  # of the body of a command
_ANSWER: Final = "id STRING, status STRING, reason STRING, reported STRING"  # of the body of an answer


def start_query(spark: SparkSession, home: Home, options: StreamOptions, begin: int) -> StreamingQuery:
    """Start the query that appends to the table ``commands``.

    Args:
        spark: Spark session.
        home: home of bronze, the table and the checkpoint.
        options: options of the streams.
        begin: first version of bronze to read with a new checkpoint.
    """
    checkpoint = home.stream_checkpoint(StreamName.COMMANDS)
    write_span(checkpoint, options.answer_ms + CLOCK_LEAD_MS)
    rows = by_receipt(bronze_stream(spark, home.table(MESSAGES.name), begin))
    found = resolved(rows, options.answer_ms).unionByName(pending(rows))
    with changed_settings(spark, _OF_THE_QUERY):
        return (
            found.writeStream.queryName(StreamName.COMMANDS)
            .foreachBatch(CommandSink(home, checkpoint))
            .option("checkpointLocation", str(checkpoint))
            .outputMode("append")
            .trigger(**options.trigger)  # pyright: ignore[reportCallIssue, reportArgumentType]
            .start()
        )


class CommandSink(TableSink):
    """Sink of commands and answers, for which a rebuild can read one of the two rows alone.

    Args:
        home: home of the table.
        checkpoint: checkpoint of the query.
    """

    def __init__(self, home: Home, checkpoint: Path) -> None:
        super().__init__(home.table(COMMANDS.name), COMMANDS, checkpoint)

    def is_known(self) -> str:
        """Return the condition of a row that the table has, or whose command and answer have met before, see rule 4."""
        equal = " AND ".join(f"known.{name} IS NOT DISTINCT FROM batch.{name}" for name in COMMANDS.key[2:])
        answered = "known.answered_at = batch.answered_at AND known.answer_position IS NOT DISTINCT FROM batch.answer_position"
        met = "known.sent_at = batch.sent_at AND known.answered_at IS NOT NULL"
        return f"""known.device_id = batch.device_id AND known.command_id = batch.command_id AND (({equal})
            OR (batch.status = '{CommandStatus.UNMATCHED}' AND {answered})
            OR (batch.status = '{CommandStatus.TIMED_OUT}' AND {met}))"""


def pending(rows: DataFrame) -> DataFrame:
    """Return the row ``pending`` of each command."""
    sent = _commands(rows)
    nothing = F.lit(None)
    return sent.select(
        F.col("sent_to").alias("device_id"),
        "sent_at",
        nothing.cast("timestamp").alias("answered_at"),
        F.col("sent_id").alias("command_id"),
        F.lit(CommandStatus.PENDING.value).alias("status"),
        F.col("name"),
        F.col("payload"),
        nothing.cast("long").alias("latency_ms"),
        nothing.cast("string").alias("reason"),
        nothing.cast("string").alias("reported"),
        nothing.cast("long").alias("answer_position"),
        F.col("sent_site").alias("site"),
        "timeout_ms",
    )


def resolved(rows: DataFrame, answer_ms: int) -> DataFrame:
    """Return the row of each answer, and of each command that has timed out.

    Args:
        rows: rows of bronze, with a watermark on ``received_at``.
        answer_ms: time after which a command has timed out, milliseconds; a command may have a shorter one of its own.
    """
    meet = (
        (F.col("device_id") == F.col("sent_to"))
        & (F.col("command_id") == F.col("sent_id"))
        & (F.col("answered_at") >= F.expr(f"sent_at - INTERVAL {CLOCK_LEAD_MS} MILLISECONDS"))
        & (F.col("answered_at") <= F.expr(f"sent_at + INTERVAL {answer_ms} MILLISECONDS"))
        & (F.unix_millis("answered_at") - F.unix_millis("sent_at") <= F.coalesce("timeout_ms", F.lit(answer_ms)))
    )
    return (
        _commands(rows)
        .join(_answers(rows), meet, "full_outer")
        .select(
            F.coalesce("sent_to", "device_id").alias("device_id"),
            "sent_at",
            "answered_at",
            F.coalesce("sent_id", "command_id").alias("command_id"),
            _status().alias("status"),
            "name",
            "payload",
            (F.unix_millis("answered_at") - F.unix_millis("sent_at")).alias("latency_ms"),
            "reason",
            "reported",
            "answer_position",
            F.coalesce("sent_site", "site").alias("site"),
            "timeout_ms",
        )
    )


def _status() -> Column:
    return (
        F.when(F.col("sent_at").isNull(), CommandStatus.UNMATCHED.value)
        .when(F.col("answered_at").isNull(), CommandStatus.TIMED_OUT.value)
        .when(F.col("answer") == ACCEPTED, CommandStatus.ACKNOWLEDGED.value)
        .otherwise(CommandStatus.REJECTED.value)
    )


def _commands(rows: DataFrame) -> DataFrame:
    body = F.from_json("body", _SENT)
    columns = {"sent_at": "received_at", "sent_to": "device_id", "sent_site": "site"}
    return of_kinds(
        rows,
        [Kind.CONTROL.value],
        [
            *(F.col(name).alias(new) for new, name in columns.items()),
            body["id"].alias("sent_id"),
            body["name"].alias("name"),
            body["payload"].alias("payload"),
            body["timeout_ms"].alias("timeout_ms"),
        ],
        also=body["op"] == COMMAND,
    )


def _answers(rows: DataFrame) -> DataFrame:
    body = F.from_json("body", _ANSWER)
    return of_kinds(
        rows,
        [Kind.ACK.value],
        [
            F.col("received_at").alias("answered_at"),
            F.col("position").alias("answer_position"),
            "device_id",
            "site",
            body["id"].alias("command_id"),
            body["status"].alias("answer"),
            body["reason"].alias("reason"),
            body["reported"].alias("reported"),
        ],
        also=body["id"].isNotNull(),
    )
