"""What a checkpoint says of how far it has come, read from its files: without the job, and without Spark."""

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.system.fsync import atomic_write

_SCHEMAS: Final = "/_stateSchema/"
_BEGIN: Final = "begun-with.json"
WATERMARK_DELAY_MS: Final = 1  # the watermark runs so far behind the newest ``received_at``


@dataclass(frozen=True, slots=True)
class CheckpointPosition:
    """Where a checkpoint stands after a batch.

    Attributes:
        batch: its number.
        version: of bronze, the next one to be read.
        newest_ms: ``received_at`` of the newest row read, epoch milliseconds; None where none was.
        partitions: of the state.
    """

    batch: int
    version: int
    newest_ms: int | None
    partitions: int


def judged_up_to(checkpoint: Path) -> tuple[int, int] | None:
    """Return the newest committed batch and the ``received_at`` up to which it judged, in epoch milliseconds.

    A batch judges all key groups at the newest row that it read, so that is where its watermark goes. Read from the checkpoint
    itself, so that it is true whether the job runs, stopped or was killed. None before the first batch.

    Raises:
        FleetError: what it was begun with is damaged.
    """
    for batch in reversed(committed(checkpoint)):
        try:
            watermark_ms = watermark_after(checkpoint, batch) or 0
        except FleetError:  # it was just removed, or is cut off: the one before it is whole
            continue
        return batch, watermark_ms + WATERMARK_DELAY_MS if watermark_ms else begun_with(checkpoint) or WATERMARK_DELAY_MS
    return None


def note_begin(checkpoint: Path, newest_ms: int | None) -> None:
    """Write down up to which ``received_at`` all was judged that a new checkpoint begins with: it has no watermark yet."""
    atomic_write(checkpoint / _BEGIN, json.dumps({"newest_ms": newest_ms}))


def begun_with(checkpoint: Path) -> int | None:
    """Return what `note_begin` has written; None where it was begun with nothing.

    Raises:
        FleetError: what is written is damaged.
    """
    try:
        newest_ms = json.loads((checkpoint / _BEGIN).read_text())["newest_ms"]
        return None if newest_ms is None else int(newest_ms)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, f'"{_BEGIN}"', error) from None


def is_settled(checkpoint: Path) -> bool:
    """Whether all that was read is judged and said: there is a batch, and none is under way."""
    return unfinished(checkpoint) is None and bool(committed(checkpoint))


def committed(checkpoint: Path) -> list[int]:
    """Return the batches that were committed and are kept, in order."""
    return _numbers(checkpoint / "commits")


def begun(checkpoint: Path) -> list[int]:
    """Return the batches that were begun and are kept, in order; those that were committed are among them."""
    return _numbers(checkpoint / "offsets")


def unfinished(checkpoint: Path) -> int | None:
    """Return the batch that was begun and not committed: the next start does it again; None where there is none."""
    started, done = begun(checkpoint), committed(checkpoint)
    return started[-1] if started and (not done or started[-1] > done[-1]) else None


def newest_begun(checkpoint: Path) -> int:
    """Return the version of bronze at which the newest batch that was begun ends."""
    return read_offset(checkpoint, begun(checkpoint)[-1])[1]


def read_offset(checkpoint: Path, batch: int) -> tuple[int, int]:
    """Return the watermark with which a batch was begun, epoch milliseconds (0: none), and the version of bronze at its end.

    Raises:
        FleetError: what the checkpoint says of it is damaged, or not ours.
    """
    try:
        _, metadata, offset = (checkpoint / "offsets" / str(batch)).read_text().splitlines()[:3]
        return int(json.loads(metadata)["batchWatermarkMs"]), int(json.loads(offset)["version"])
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, f"batch {batch}", error) from None


def _damaged(checkpoint: Path, what: str, error: Exception) -> FleetError:
    return FleetError(
        f'{what} of the checkpoint "{checkpoint}" is not the lifecycle job\'s, or is damaged ({error!r}); '
        f"restore the checkpoint, or, if it is the current generation's, begin anew from a snapshot: "
        f"./fleet state bootstrap --damaged",
        code="checkpoint-damaged",
    )


def relocate(checkpoint: Path) -> None:
    """Let a checkpoint that was copied or moved name the schemas in its own folder: Spark writes their whole path down.

    No effect where it does already.

    Raises:
        FleetError: what one says of its state is damaged; the others are seen to all the same.
    """
    damaged: list[str] = []
    for path in (checkpoint.resolve() / "state").glob("*/_metadata/v2/*"):
        try:
            if path.name.isdecimal():
                _relocate_schemas(path)
        except FileNotFoundError:
            continue  # the job that runs has removed it meanwhile
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            damaged.append(f'"{path}" is not what Spark says of a state, or is damaged ({error!r})')
    if damaged:
        raise FleetError(
            f"{damaged[0]}; restore the checkpoint, or, if it is the current generation's, begin anew from a snapshot: "
            f"./fleet state bootstrap --damaged",
            code="checkpoint-damaged",
        )


def relocate_each(lifecycle: Path) -> None:
    """Do as `relocate` does for all checkpoints of a folder; one that is damaged is passed over: whoever opens it says so."""
    for checkpoint in lifecycle.glob("gen-*"):
        with suppress(FleetError):
            relocate(checkpoint)


def _relocate_schemas(path: Path) -> None:
    version, content = path.read_text().split("\n", 1)
    known = json.loads(content)
    moved = False
    for store in known["stateStoreInfo"]:
        there = store.get("stateSchemaFilePaths", [])
        here = [f"file:{path.parents[2]}{_SCHEMAS}{name.rpartition(_SCHEMAS)[2]}" for name in there]
        moved |= here != there
        store["stateSchemaFilePaths"] = here
    if moved:
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)  # Hadoop's checksum of what it was
        moved_text = f"{version}\n{json.dumps(known, separators=(',', ':'))}"
        atomic_write(path, moved_text, sync=False, aside=path.with_name(f".{path.name}.new"))


def query_id(checkpoint: Path) -> str | None:
    """Return the id of the checkpoint's query; None where there is none."""
    try:
        return str(json.loads((checkpoint / "metadata").read_text())["id"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        raise FleetError(
            f'"{checkpoint / "metadata"}" is no query\'s; restore the checkpoint, or name another home', code="checkpoint-damaged"
        ) from None


def position_after(checkpoint: Path, batch: int | None = None) -> CheckpointPosition:
    """Return where a checkpoint stood after a batch.

    Args:
        checkpoint: its folder.
        batch: a committed one; None takes the newest.

    Raises:
        FleetError: it has none, the batch is no longer kept, or it is not one of ours.
    """
    kept = committed(checkpoint)
    if not kept:
        raise FleetError(
            f'the checkpoint "{checkpoint}" has no batch yet; let the job judge something first: ./fleet up',
            code="checkpoint-empty",
        )
    if batch is not None and batch not in kept:
        raise FleetError(
            f"batch {batch} is not in the checkpoint, which keeps {kept[0]} to {kept[-1]}; name one of these, "
            f"or take an older snapshot by --version or --at",
            code="checkpoint-batch-missing",
        )
    chosen = kept[-1] if batch is None else batch
    try:
        _, metadata, offset = (checkpoint / "offsets" / str(chosen)).read_text().splitlines()[:3]
        version = int(json.loads(offset)["version"])
        partitions = int(json.loads(metadata)["conf"]["spark.sql.shuffle.partitions"])
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, f"batch {chosen}", error) from None
    watermark_ms = watermark_after(checkpoint, chosen)
    newest_ms = watermark_ms + WATERMARK_DELAY_MS if watermark_ms else begun_with(checkpoint)
    return CheckpointPosition(chosen, version, newest_ms, partitions)


def partitions_of(checkpoint: Path) -> int | None:
    """Return how many partitions the state of a checkpoint has, by its folders: what else says so may be damaged."""
    return len(_numbers(checkpoint / "state" / "0")) or None


def watermark_after(checkpoint: Path, batch: int) -> int | None:
    """Return Spark's watermark after a committed batch, epoch milliseconds; None where no row has moved it yet.

    Raises:
        FleetError: the commit is not one of ours.
    """
    try:
        return int(json.loads((checkpoint / "commits" / str(batch)).read_text().splitlines()[1])["nextBatchWatermarkMs"]) or None
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise _damaged(checkpoint, f"batch {batch}", error) from None


def _numbers(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())
