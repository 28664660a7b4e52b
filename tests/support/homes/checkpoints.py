"""Checkpoints as Spark writes them: batches and generations of a home."""

import json
from pathlib import Path

from fleetpulse.io.checkpoints.generations import (
    Generation,
    begin_generation,
)
from fleetpulse.io.home.home import Home


def begun(home: Home, key_groups: int = 3) -> Generation:
    return begin_generation(
        home.lifecycle, home.generation(), key_groups=key_groups, form=4, made_by="rescale", made_from={"generation": 1}
    )


def write_batch(checkpoint: Path, batch: int, version: int, watermarks: tuple[int, int], *, committed: bool = True) -> None:
    """Write the files of a batch as Spark does, with its watermark and the next one."""
    for name in ("offsets", "commits"):
        (checkpoint / name).mkdir(parents=True, exist_ok=True)
    conf = {"spark.sql.shuffle.partitions": "2"}
    metadata = json.dumps({"batchWatermarkMs": watermarks[0], "conf": conf})
    (checkpoint / "offsets" / str(batch)).write_text(f"v1\n{metadata}\n" + json.dumps({"version": version}))
    if committed:
        (checkpoint / "commits" / str(batch)).write_text("v1\n" + json.dumps({"nextBatchWatermarkMs": watermarks[1]}))


def write_offsets(checkpoint: Path, number: int, *offsets: object, committed: bool = True) -> None:
    """Write the files of a batch with the offset of each of its sources."""
    for folder in ("offsets", "commits"):
        (checkpoint / folder).mkdir(parents=True, exist_ok=True)
    lines = ["v1", "{}", *(one if isinstance(one, str) else json.dumps(one) for one in offsets)]
    (checkpoint / "offsets" / str(number)).write_text("\n".join(lines))
    if committed:
        (checkpoint / "commits" / str(number)).write_text("v1\n{}")
