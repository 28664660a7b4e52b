"""Finish a batch that the Delta sink committed but Spark's checkpoint did not.

This happens if the process ends between the two commits. Without this step, Spark would run the
batch again and `JudgementSink` would drop its judgements. Until then, the position and watermark of
the checkpoint would be behind the judgements table.

Rule: the commit is written as Spark would have written it. This is safe because the sink commits
after the state of every partition is stored.

Source: docs/adr/0023-finishing-a-half-committed-batch.md
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
    """Commit the last started batch if the table already has all of its judgements.

    Args:
        checkpoint: checkpoint of a query that does not run.
        table: judgements table that the query writes.
        messages: messages table that the query reads by version.
        first: version of ``messages`` at which the first batch started.

    Returns:
        Number of the committed batch; None if there is no such batch.

    Raises:
        FleetError: the checkpoint is damaged, or a version that the batch read is missing.
    """
    batch, query = unfinished(checkpoint), query_id(checkpoint)
    if batch is None or query is None or not is_committed(table):
        return None
    committed = DeltaTable(str(table)).transaction_version(query)
    if committed is None or committed < batch:
        return None
    watermark_ms, end = read_offset(checkpoint, batch)
    start = read_offset(checkpoint, batch - 1)[1] if (checkpoint / "offsets" / str(batch - 1)).exists() else first
    newest_ms = _newest_ms(DeltaLog(messages), start, end)
    after_ms = watermark_ms if newest_ms is None else max(watermark_ms, newest_ms - WATERMARK_DELAY_MS)
    commits = checkpoint / "commits"
    commits.mkdir(exist_ok=True)
    text = "v1\n" + json.dumps({"nextBatchWatermarkMs": after_ms}, separators=(",", ":"))
    atomic_write(commits / str(batch), text, temporary=commits / f".{batch}.{os.getpid()}.tmp")
    _LOG.info("committed the last batch, whose judgements were already in the table", batch=batch)
    return batch


def _newest_ms(log: DeltaLog, start: int, end: int) -> int | None:
    """Return the newest ``received_at`` of versions in epoch ms; None without rows."""
    newest: int | None = None
    while start < end:
        files, start = log.span(start, end)
        for path, _ in files:
            found = pc.max(pq.ParquetFile(path).read(columns=["received_at"])["received_at"]).cast(pa.int64()).as_py()
            newest = newest if found is None else max(newest or 0, found // 1000)
    return newest
