"""Who may still read a table on from where: what maintenance asks before it puts together, removes or forgets a version.

Rule 1: whoever may read on from a version of bronze has a `ReaderPin` here, and nowhere else; what has none may be gone tomorrow.
Rule 2: a need that cannot be read is an error: nothing is removed by guessing.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.checkpoints.checkpoint import committed, query_id
from fleetpulse.io.checkpoints.generations import DISCARDED, NEW, PRUNED, RETIRED, checkpoint_of, load_generations
from fleetpulse.io.home.exclusive import is_making
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance.vacuum import newest_by
from fleetpulse.io.tables.snapshots import snapshots


@dataclass(frozen=True, slots=True)
class ReaderPin:
    """That somebody may read bronze on from a version.

    Attributes:
        who: as a person knows it, such as ``generation 1``.
        version: the first version that is read.
        by_version: whether it goes on version by version, in batches that are planned already: what lies at or above is then
            left as it is. Otherwise versions may be put together, from this one on and up to this one, never across it.
    """

    who: str
    version: int
    by_version: bool = False


def _generations(home: Home) -> Iterable[ReaderPin]:
    """Yield what the lifecycle job's generations need: what runs or is being made, and what may be gone back to."""
    record = load_generations(home.lifecycle)
    known = {**record.known, record.current: record.of(record.current) or home.generation()}
    for number, one in sorted(known.items()):
        checkpoint = checkpoint_of(home.lifecycle, number)
        if one.status in (DISCARDED, PRUNED) or (one.status == NEW and not is_making(home)):  # its maker was killed
            continue
        if one.status == RETIRED and one.is_damaged:  # nobody can go back to it
            continue
        ends = batch_ends(checkpoint)
        if one.status == RETIRED:
            for version in ends:
                yield ReaderPin(f"generation {number}, which may be gone back to", version)
        else:
            yield ReaderPin(f"generation {number}", ends[0] if ends else 0, by_version=True)


def batch_ends(checkpoint: Path) -> list[int]:
    """Return the versions at which the batches ended that a checkpoint still has, in order; none before the first.

    A batch that was begun and not committed is among them only behind one that was: it is done again from there.

    Raises:
        FleetError: the checkpoint cannot be read.
    """
    done = committed(checkpoint)
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
                f'the offsets in "{path}" cannot be read ({error!r}), so it is not known what the job still needs; '
                f"restore the checkpoint, or begin anew from a snapshot: ./fleet state bootstrap --damaged",
                code="offsets-damaged",
            ) from None
    return sorted(set(ends))


def _snapshots(home: Home) -> Iterable[ReaderPin]:
    """Yield from where one who begins with a snapshot reads on, of those whose files are there.

    One that a newer version took needs it too; where it does not say from where, all of bronze.
    """
    for one in snapshots(home):
        yield ReaderPin(f"snapshot {one.version}", one.bronze)


# Further needs are added here: a function of a home each.
SOURCES: Final[tuple[Callable[[Home], Iterable[ReaderPin]], ...]] = (_generations, _snapshots)


def reader_pins(home: Home) -> list[ReaderPin]:
    """Return everybody's needs, the oldest version first; where nobody has one, the whole of bronze is needed.

    Raises:
        FleetError: one of them cannot be read.
    """
    found = sorted((need for source in SOURCES for need in source(home)), key=lambda need: need.version)
    return (
        found if any(need.by_version for need in found) else [ReaderPin("a job that has not begun", 0, by_version=True), *found]
    )


def judged_through(home: Home) -> int | None:
    """Return the newest version of `judgements` that the job has committed: the log of what came after it stays, see `newest_by`.

    Returns:
        The version; -1 where the job has committed none, or it is not known which job it is; None where there is no job.
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
    """Return the oldest need that goes on version by version: what lies at or above its version is left as it is."""
    return min((need for need in found if need.by_version), key=lambda need: need.version)
