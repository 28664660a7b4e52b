"""A batch that was said to its end, and not committed: the process died, or was stopped, between Delta's commit and Spark's.

Spark begins such a batch again, Delta says that it has it, and nothing is run: right for what is said, but nobody sees the
batch's rows, and the watermark stays where it was before them until other rows come. What became due by them is not said, and
the state seems to stand where it does not.

Rule: the commit is written as Spark would have written it. All that belongs to it is there: Delta's commit comes after the
state of every partition.
"""

import json
import os
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import structlog
from deltalake import DeltaTable

from fleetpulse.columnar.compute import pc
from fleetpulse.io.checkpoints.checkpoint import WATERMARK_DELAY_MS, query_id, read_offset, unfinished
from fleetpulse.io.delta.log import DeltaLog, is_committed
from fleetpulse.io.system.fsync import atomic_write

_LOG: Final = structlog.get_logger("lifecycle")


def finish_sink_committed_batch(checkpoint: Path, table: Path, messages: Path, first: int = 0) -> int | None:
    """Commit the batch that was begun last, if all that it says is in the table already.

    Args:
        checkpoint: of a query that does not run.
        table: the table that it writes to.
        messages: the table that it reads, by version.
        first: the version of that which its first batch began with.

    Returns:
        The batch; None where there is none such.

    Raises:
        FleetError: the checkpoint is damaged, or the versions that the batch has read are gone.
    """
    batch, query = unfinished(checkpoint), query_id(checkpoint)
    if batch is None or query is None or not is_committed(table):
        return None
    committed = DeltaTable(str(table)).transaction_version(query)
    if committed is None or committed < batch:
        return None
    watermark_ms, end = read_offset(checkpoint, batch)
    begin = read_offset(checkpoint, batch - 1)[1] if (checkpoint / "offsets" / str(batch - 1)).exists() else first
    newest_ms = _newest_ms(DeltaLog(messages), begin, end)
    after_ms = watermark_ms if newest_ms is None else max(watermark_ms, newest_ms - WATERMARK_DELAY_MS)
    commits = checkpoint / "commits"
    commits.mkdir(exist_ok=True)
    text = "v1\n" + json.dumps({"nextBatchWatermarkMs": after_ms}, separators=(",", ":"))
    atomic_write(commits / str(batch), text, aside=commits / f".{batch}.{os.getpid()}.tmp")
    _LOG.info("the last batch had been said, and is committed", batch=batch)
    return batch


def _newest_ms(log: DeltaLog, begin: int, end: int) -> int | None:
    """Return the newest ``received_at`` of some versions, epoch milliseconds; None where they have no rows."""
    newest: int | None = None
    while begin < end:
        files, begin = log.span(begin, end)
        for path, _ in files:
            found = pc.max(pq.ParquetFile(path).read(columns=["received_at"])["received_at"]).cast(pa.int64()).as_py()
            newest = newest if found is None else max(newest or 0, found // 1000)
    return newest
