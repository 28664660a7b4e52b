"""Query of the stream ``sessions``: blocks of bronze to rows of the table ``sessions``.

Rule: the number of key groups is fixed when a checkpoint first starts, and recorded in it. A rescale of the lifecycle
job does not change it. A rebuilt checkpoint has the number of the lifecycle job.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from fleetpulse.core.errors import FleetError
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.options import StreamOptions
from fleetpulse.core.streams.sessions import SNAPSHOT_MS
from fleetpulse.core.streams.tables import SESSIONS
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.stream_rebuild import initial_state, write_span
from fleetpulse.io.checkpoints.streams import has_begun, versions_after
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import OF_A_BLOCK_QUERY, block_stream, start_with_retries
from fleetpulse.io.spark.session import changed_settings
from fleetpulse.io.streams.session_processor import OUTPUT, InitialState, SessionProcessor
from fleetpulse.io.streams.session_snapshot import begins_before, write_snapshot
from fleetpulse.io.streams.sink import TableSink
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.tables import tables

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

_RECORD: Final = "key-groups.json"


class SessionSink(TableSink):
    """Sink of the rows of `SessionProcessor`, each of which has the changes of a key group, and its state if due.

    Args:
        home: home of the table.
        checkpoint: checkpoint of the query.
        key_groups: number of its key groups.
    """

    def __init__(self, home: Home, checkpoint: Path, key_groups: int) -> None:
        super().__init__(home.table(SESSIONS.name), SESSIONS, checkpoint)
        self._home, self._of_query, self._key_groups = home, checkpoint, key_groups

    def __call__(self, batch: "DataFrame", batch_id: int) -> None:
        """Append the changes of a batch; then write a snapshot if the batch has the states of all key groups."""
        import pyarrow as pa

        from fleetpulse.columnar.codec.arrow import from_bytes
        from fleetpulse.columnar.streams.sessions import CHANGE_SCHEMA

        found = batch.select("changes", "state").toArrow()
        changes = [from_bytes(row) for row in found["changes"].to_pylist()]
        self.append(to_rows(pa.Table.from_batches(changes, CHANGE_SCHEMA)), batch_id)
        states = found["state"].drop_null().to_pylist()
        if len(states) == self._key_groups:
            write_snapshot(self._home, states, max(versions_after(self._of_query, batch_id)))

    def is_known(self) -> str:
        """Return the condition of a row that the table has: a session has one start and one end, by whatever limit."""
        same = " AND ".join(f"known.{name} = batch.{name}" for name in SESSIONS.key if name != "ended_at")
        return f"{same} AND (known.ended_at IS NULL) = (batch.ended_at IS NULL)"


def to_rows(changes: "pa.Table") -> "pa.Table":
    """Return changes, columns of `CHANGE_SCHEMA`, as rows of the table ``sessions``."""
    import pyarrow as pa

    from fleetpulse.columnar.compute import pc

    columns = {name: changes[name] for name in changes.column_names}
    for name in ("started_at", "last_seen", "ended_at"):
        columns[name] = changes[f"{name}_ms"].cast(pa.timestamp("ms", tz="UTC"))
    columns["duration_ms"] = pc.subtract(changes["ended_at_ms"], changes["started_at_ms"])
    schema = tables.arrow_schema(SESSIONS)
    return pa.Table.from_arrays([columns[name].cast(schema.field(name).type) for name in schema.names], schema=schema)


def start_query(spark: SparkSession, home: Home, options: StreamOptions, begin: int) -> StreamingQuery:
    """Start the query from its checkpoint, or without one at a version of bronze.

    Args:
        spark: Spark session.
        home: home of the tables and the checkpoint.
        options: options of the streams.
        begin: first version to read with a new checkpoint.

    Raises:
        FleetError: the record of the number of key groups is damaged or missing.
    """
    checkpoint = home.stream_checkpoint(StreamName.SESSIONS)
    key_groups = fixed_key_groups(checkpoint, home.generation().key_groups)
    blocks = block_stream(spark, home.table(MESSAGES.name), key_groups, {"begin": begin})
    write_span(checkpoint, SNAPSHOT_MS)  # a rebuild reads bronze again from the newest snapshot on
    path = initial_state(checkpoint)
    initial = None if path is None else InitialState(path, key_groups, begins_before(checkpoint, path))
    processor = SessionProcessor(options.silence_ms, initial)
    rows = blocks.groupBy("key_group").transformWithState(processor, OUTPUT, "append", "none")
    writer = (
        rows.writeStream.outputMode("append")
        .option("checkpointLocation", str(checkpoint))
        .foreachBatch(SessionSink(home, checkpoint, key_groups))
        .queryName(StreamName.SESSIONS)
        .trigger(**options.trigger)  # pyright: ignore[reportArgumentType, reportCallIssue] - one of its keyword arguments
    )
    with changed_settings(spark, OF_A_BLOCK_QUERY):
        return start_with_retries(writer.start, bounded=not options.every_ms)


def fixed_key_groups(checkpoint: Path, present: int) -> int:
    """Return the number of key groups of a checkpoint; record a number in a checkpoint without a batch.

    Args:
        checkpoint: folder of the checkpoint.
        present: number of key groups of the lifecycle job.

    Raises:
        FleetError: the record is damaged or missing.
    """
    record = checkpoint / _RECORD
    if not has_begun(checkpoint):
        checkpoint.mkdir(parents=True, exist_ok=True)
        atomic_write(record, json.dumps({"key_groups": present}))
    try:
        return int(json.loads(record.read_text())["key_groups"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f'the number of key groups in "{record}" cannot be read ({error!r}); restore the checkpoint, or rebuild it with the '
            f"session snapshot: ./fleet stream rebuild sessions",
            code="checkpoint-damaged",
        ) from None
