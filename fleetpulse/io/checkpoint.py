"""What a checkpoint says of how far is judged, read from its files: without the job, and without Spark."""

import json
from pathlib import Path
from typing import Final

WATERMARK_DELAY_MS: Final = 1  # the watermark runs so far behind the newest ``received_at``


def judged_up_to(checkpoint: Path) -> tuple[int, int] | None:
    """Return the newest committed batch and the ``received_at`` up to which it judged, in epoch milliseconds.

    Read from the checkpoint itself, so that it is true whether the job runs, stopped or was killed. None before
    the first batch.
    """
    committed = [int(path.name) for path in (checkpoint / "commits").glob("*") if path.name.isdecimal()]
    for batch in sorted(committed, reverse=True):
        try:
            metadata = json.loads((checkpoint / "offsets" / str(batch)).read_text().splitlines()[1])
        except (OSError, ValueError, IndexError):
            continue
        return batch, int(metadata["batchWatermarkMs"]) + WATERMARK_DELAY_MS
    return None
