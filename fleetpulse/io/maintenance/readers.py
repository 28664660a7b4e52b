"""Reader pins: versions of bronze that active readers still need.

Maintenance reads the pins before it compacts or deletes versions.

Rule 1: every reader that may continue at a version of bronze has a `ReaderPin`, defined in this
module only. Versions without a pin may be removed at any time.
Rule 2: a pin that cannot be determined is an error: maintenance never guesses.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io.checkpoints.checkpoint import committed_batches, query_id
from fleetpulse.io.checkpoints.generations import DISCARDED, NEW, PRUNED, RETIRED, checkpoint_of, load_generations
from fleetpulse.io.checkpoints.stream_rebuild import read_begin, read_span
from fleetpulse.io.checkpoints.streams import versions_after
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.exclusive import is_making
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance.vacuum import newest_by
from fleetpulse.io.tables.adaptive_batching import first_version_since
from fleetpulse.io.tables.snapshots import snapshots


@dataclass(frozen=True, slots=True)
class ReaderPin:
    """Version of bronze at which a reader may continue.

    Attributes:
        reader: name of the reader in messages, such as ``generation 1``.
        version: first version to be read.
        by_version: whether the reader continues version by version, in batches already planned. If
            so, versions from this one on must not change. Otherwise, they may be compacted, but not
            together with versions below this one.
    """

    reader: str
    version: int
    by_version: bool = False


def _generations(home: Home) -> Iterable[ReaderPin]:
    """Yield the pins of generations: current, held, unfinished, or kept for rollback."""
    record = load_generations(home.lifecycle)
    known = {**record.known, record.current: record.of(record.current) or home.generation()}
    for number, one in sorted(known.items()):
        checkpoint = checkpoint_of(home.lifecycle, number)
        if one.status in (DISCARDED, PRUNED) or (one.status == NEW and not is_making(home)):  # its creation was killed
            continue
        if one.status == RETIRED and one.is_damaged:  # rollback to it is impossible
            continue
        ends = batch_ends(checkpoint)
        if one.status == RETIRED:
            for version in ends:
                yield ReaderPin(f"generation {number}, kept for rollback", version)
        else:
            yield ReaderPin(f"generation {number}", ends[0] if ends else 0, by_version=True)


def batch_ends(checkpoint: Path) -> list[int]:
    """Return the versions of bronze at which a checkpoint's batches end, in order.

    Started but uncommitted batches are included if they follow a committed batch, since the job
    repeats them from there. The list is empty before the first committed batch.

    Raises:
        FleetError: the offsets of a batch cannot be read.
    """
    done = committed_batches(checkpoint)
    if not done:
        return []
    ends: list[int] = []
    for path in (checkpoint / "offsets").glob("*"):
        if not path.name.isdecimal() or int(path.name) < done[0]:
            continue
        try:
            ends.append(int(json.loads(path.read_text().splitlines()[2])["version"]))
        except FileNotFoundError:
            continue  # Spark has just removed it
        except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
            raise FleetError(
                f'the offsets in "{path}" cannot be read ({error!r}), so the versions that the job still needs are unknown; '
                f"restore the checkpoint, or create a generation from a snapshot: ./fleet state bootstrap --damaged",
                code="offsets-damaged",
            ) from None
    return sorted(set(ends))


def _snapshots(home: Home) -> Iterable[ReaderPin]:
    """Yield the pin of each snapshot: the version at which a bootstrap continues.

    A snapshot of a newer fleetpulse has a pin as well. If its version of bronze is unknown, the pin
    is version 0.
    """
    for one in snapshots(home):
        yield ReaderPin(f"snapshot {one.version}", one.bronze)


def _streams(home: Home) -> Iterable[ReaderPin]:
    """Yield the pins of the streams beside the lifecycle.

    A stream also keeps the versions from which its state can be rebuilt.
    """
    log = DeltaLog(home.table(MESSAGES.name))
    for name in StreamName:
        if (version := state_begin(log, home.stream_checkpoint(name))) is not None:
            yield ReaderPin(f"stream {name}", version, by_version=True)


def state_begin(log: DeltaLog, checkpoint: Path) -> int | None:
    """Return the version of bronze from which the state of a stream follows; None if it has not begun.

    A batch runs with the watermark of the batch before it. So the state after a batch has all rows of the batch, and
    those of the stream's span before it.

    Args:
        log: Delta log of bronze.
        checkpoint: checkpoint of the stream.

    Raises:
        FleetError: the offsets of a batch, or a record of the checkpoint, cannot be read.
    """
    done, begun = committed_batches(checkpoint), read_begin(checkpoint)
    begin = None if begun is None else begun.begin
    if not done or (len(done) == 1 and begin is not None):
        return begin
    read = versions_after(checkpoint, done[-2:][0])
    return max(begin or 0, first_version_since(log, min(read, default=0), read_span(checkpoint) or 0))


# Each function returns the pins of one kind of reader; add new kinds here.
PIN_SOURCES: Final[tuple[Callable[[Home], Iterable[ReaderPin]], ...]] = (_generations, _snapshots, _streams)


def reader_pins(home: Home) -> list[ReaderPin]:
    """Return all reader pins of a home, oldest version first.

    If no reader continues version by version, a pin of version 0 is added: a job that starts now
    reads all of bronze.

    Raises:
        FleetError: a pin cannot be determined.
    """
    found = sorted((need for source in PIN_SOURCES for need in source(home)), key=lambda need: need.version)
    return (
        found if any(need.by_version for need in found) else [ReaderPin("a job that has not started", 0, by_version=True), *found]
    )


def newest_job_commit(home: Home) -> int | None:
    """Return the newest version of ``judgements`` that the job has committed.

    The log of later versions must be kept, see `newest_by`.

    Returns:
        Version; -1 if the job has committed none, or its query id is unreadable; None if no query
        was started.
    """
    try:
        job = query_id(home.checkpoint)
    except FleetError:
        return -1
    if job is None:
        return None
    newest = newest_by(home.table(JUDGEMENTS.name), job)
    return -1 if newest is None else newest


def oldest_live_pin(found: Iterable[ReaderPin]) -> ReaderPin:
    """Return the oldest pin of a reader that continues version by version.

    Versions from this one on must not change.
    """
    return min((need for need in found if need.by_version), key=lambda need: need.version)
