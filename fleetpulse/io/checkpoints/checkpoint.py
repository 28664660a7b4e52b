"""Position of a checkpoint, read from its files without Spark; its move to another path."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.system.fsync import atomic_write

_SCHEMAS: Final = "/_stateSchema/"
_BEGIN: Final = "begun-with.json"
WATERMARK_DELAY_MS: Final = 1  # delay of the watermark behind the newest ``received_at``


@dataclass(frozen=True, slots=True)
class CheckpointPosition:
    """Position of a checkpoint after a batch.

    Attributes:
        batch: number of the batch.
        version: next version of bronze to be read.
        newest_ms: ``received_at`` of the newest row read, epoch milliseconds; None if no row was
            read.
        partitions: number of partitions of the state.
    """

    batch: int
    version: int
    newest_ms: int | None
    partitions: int


def judged_up_to(checkpoint: Path) -> tuple[int, int] | None:
    """Return the newest committed batch and the ``received_at`` up to which it judged.

    A batch judges all key groups up to the newest row that it read; its watermark is
    `WATERMARK_DELAY_MS` behind that row. The result is valid whether or not the job runs.

    Returns:
        Number of the batch, and instant in epoch milliseconds; None before the first batch.

    Raises:
        FleetError: the record of the checkpoint's start is damaged, see `write_start_position`.
    """
    for batch in reversed(committed_batches(checkpoint)):
        try:
            watermark_ms = watermark_after(checkpoint, batch) or 0
        except FleetError:  # the commit was just removed, or is truncated: use the previous one
            continue
        return batch, watermark_ms + WATERMARK_DELAY_MS if watermark_ms else read_start_position(checkpoint) or WATERMARK_DELAY_MS
    return None


def judged_ms(checkpoint: Path) -> int | None:
    """Return the ``received_at`` up to which rows are judged; None before the first judged row."""
    reached = judged_up_to(checkpoint)
    return reached[1] if reached and reached[1] > 1 else None


def write_start_position(checkpoint: Path, newest_ms: int | None) -> None:
    """Record up to which ``received_at`` the initial state of a checkpoint was judged.

    A new checkpoint has no watermark before its first batch with rows.

    Args:
        checkpoint: folder of the checkpoint.
        newest_ms: instant, epoch milliseconds; None if nothing was judged.
    """
    atomic_write(checkpoint / _BEGIN, json.dumps({"newest_ms": newest_ms}))


def read_start_position(checkpoint: Path) -> int | None:
    """Return the instant that `write_start_position` has recorded.

    Returns:
        Instant, epoch milliseconds; None if none was recorded.

    Raises:
        FleetError: the record is damaged.
    """
    try:
        newest_ms = json.loads((checkpoint / _BEGIN).read_text())["newest_ms"]
        return None if newest_ms is None else int(newest_ms)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, f'"{_BEGIN}"', error) from None


def is_settled(checkpoint: Path) -> bool:
    """Return whether a checkpoint has a batch, and all batches are committed."""
    return unfinished(checkpoint) is None and bool(committed_batches(checkpoint))


def committed_batches(checkpoint: Path) -> list[int]:
    """Return the numbers of the committed batches in a checkpoint, in order."""
    return _numbers(checkpoint / "commits")


def started_batches(checkpoint: Path) -> list[int]:
    """Return the numbers of all started batches in a checkpoint, in order."""
    return _numbers(checkpoint / "offsets")


def unfinished(checkpoint: Path) -> int | None:
    """Return the batch that was started but not committed; None if there is none.

    The job repeats this batch when it starts.
    """
    started, done = started_batches(checkpoint), committed_batches(checkpoint)
    return started[-1] if started and (not done or started[-1] > done[-1]) else None


def newest_begun(checkpoint: Path) -> int:
    """Return the version of bronze at which the newest started batch ends."""
    return read_offset(checkpoint, started_batches(checkpoint)[-1])[1]


def read_offset(checkpoint: Path, batch: int) -> tuple[int, int]:
    """Return the start watermark of a batch, and the version of bronze at its end.

    Args:
        checkpoint: folder of the checkpoint.
        batch: number of the batch.

    Returns:
        Watermark in epoch milliseconds (0 if there was none), and version.

    Raises:
        FleetError: the offsets of the batch are damaged, or were not written by the lifecycle job.
    """
    try:
        _, metadata, offset = (checkpoint / "offsets" / str(batch)).read_text().splitlines()[:3]
        return int(json.loads(metadata)["batchWatermarkMs"]), int(json.loads(offset)["version"])
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, f"batch {batch}", error) from None


def _damaged(checkpoint: Path, part: str, error: Exception) -> FleetError:
    return FleetError(
        f'{part} of the checkpoint "{checkpoint}" was not written by the lifecycle job, or is damaged ({error!r}); '
        f"restore the checkpoint, or, if it is the current generation's, create a generation from a snapshot: "
        f"./fleet state bootstrap --damaged",
        code="checkpoint-damaged",
    )


def relocate(checkpoint: Path) -> None:
    """Update absolute paths of state schemas in a checkpoint that was copied or moved.

    Spark stores the absolute paths of the schema files. No effect if the paths are correct.

    Args:
        checkpoint: folder of the checkpoint.

    Raises:
        FleetError: a metadata file of the state is damaged. All other files are updated.
    """
    damaged: list[str] = []
    for path in (checkpoint.resolve() / "state").glob("*/_metadata/v2/*"):
        try:
            if path.name.isdecimal():
                _relocate_schemas(path)
        except FileNotFoundError:
            continue  # a running job has removed the file meanwhile
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damaged.append(f'"{path}" is not metadata of a Spark state store, or is damaged ({error!r})')
    if damaged:
        raise FleetError(
            f"{damaged[0]}; restore the checkpoint, or, if it is the current generation's, create a generation from a "
            f"snapshot: ./fleet state bootstrap --damaged",
            code="checkpoint-damaged",
        )


def relocate_each(lifecycle: Path) -> None:
    """Apply `relocate` to all checkpoints of a folder, and ignore damaged ones.

    A damaged checkpoint raises its error when it is opened.
    """
    for checkpoint in lifecycle.glob("gen-*"):
        with suppress(FleetError):
            relocate(checkpoint)


def _relocate_schemas(path: Path) -> None:
    version, content = path.read_text().split("\n", 1)
    known = json.loads(content)
    moved = False
    for store in known["stateStoreInfo"]:
        stored_paths = store.get("stateSchemaFilePaths", [])
        local_paths = [f"file:{path.parents[2]}{_SCHEMAS}{name.rpartition(_SCHEMAS)[2]}" for name in stored_paths]
        moved |= local_paths != stored_paths
        store["stateSchemaFilePaths"] = local_paths
    if moved:
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)  # Hadoop's checksum of the old content
        moved_text = f"{version}\n{json.dumps(known, separators=(',', ':'))}"
        atomic_write(path, moved_text, sync=False, temporary=path.with_name(f".{path.name}.new"))


def query_id(checkpoint: Path) -> str | None:
    """Return the id of the checkpoint's query; None if no query was started.

    Raises:
        FleetError: the file with the id is damaged.
    """
    try:
        return str(json.loads((checkpoint / "metadata").read_text())["id"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise FleetError(
            f'"{checkpoint / "metadata"}" does not contain the id of a query; restore the checkpoint, or choose another home',
            code="checkpoint-damaged",
        ) from None


def position_after(checkpoint: Path, batch: int | None = None) -> CheckpointPosition:
    """Return the position of a checkpoint after a batch.

    Args:
        checkpoint: folder of the checkpoint.
        batch: number of a committed batch; None for the newest one.

    Raises:
        FleetError: the checkpoint has no committed batch, no longer has this batch, or is damaged.
    """
    batches = committed_batches(checkpoint)
    if not batches:
        raise FleetError(
            f'the checkpoint "{checkpoint}" has no batch yet; run the job first: ./fleet up',
            code="checkpoint-empty",
        )
    if batch is not None and batch not in batches:
        raise FleetError(
            f"batch {batch} is not in the checkpoint, which keeps {batches[0]} to {batches[-1]}; choose one of these, "
            f"or an older snapshot with --version or --at",
            code="checkpoint-batch-missing",
        )
    chosen = batches[-1] if batch is None else batch
    try:
        _, metadata, offset = (checkpoint / "offsets" / str(chosen)).read_text().splitlines()[:3]
        version = int(json.loads(offset)["version"])
        partitions = int(json.loads(metadata)["conf"]["spark.sql.shuffle.partitions"])
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, f"batch {chosen}", error) from None
    watermark_ms = watermark_after(checkpoint, chosen)
    newest_ms = watermark_ms + WATERMARK_DELAY_MS if watermark_ms else read_start_position(checkpoint)
    return CheckpointPosition(chosen, version, newest_ms, partitions)


def partitions_of(checkpoint: Path) -> int | None:
    """Return the number of state partitions, counted by folder; None if none exist.

    The folders are used because the checkpoint's other files may be damaged.
    """
    return len(_numbers(checkpoint / "state" / "0")) or None


def watermark_after(checkpoint: Path, batch: int) -> int | None:
    """Return Spark's watermark after a committed batch.

    Returns:
        Watermark, epoch milliseconds; None if no row has moved it yet.

    Raises:
        FleetError: the commit is damaged, or was not written by the lifecycle job.
    """
    try:
        return int(json.loads((checkpoint / "commits" / str(batch)).read_text().splitlines()[1])["nextBatchWatermarkMs"]) or None
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, f"batch {batch}", error) from None


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())
