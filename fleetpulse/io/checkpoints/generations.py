"""The generations of the lifecycle job: a checkpoint each, and a record of who made which from what.

Rule 1: one is current. Another becomes so in one step, the renaming of the record; until then, and after a crash before it,
nothing has changed. A generation that was being made when its maker died is made anew.
Rule 2: a generation that was current stays, with what it stood at, until it is pruned: it is the way back.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from fleetpulse.columnar.codec.versions import STORED_FORM
from fleetpulse.core.errors import FleetError
from fleetpulse.io.system.fsync import atomic_write, sync_tree
from fleetpulse.io.system.process import asked_by
from fleetpulse.io.system.wall_clock import wall_clock_ms

_RECORD: Final = "generations.json"
REPARTITION: Final = "repartition"
NEW, HELD, CURRENT, RETIRED, DISCARDED, PRUNED = "new", "held", "current", "retired", "discarded", "pruned"


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation.

    Attributes:
        number: from 1.
        key_groups: how many it has.
        form: the stored form that it writes, see `columnar.stored`.
        made_by: the verb, such as ``rescale``.
        made_from: what from: a generation and its batch, a snapshot's version, a file.
        made_at_ms: when, epoch milliseconds.
        status: new, held (made, and not yet given the work), current, retired, discarded or pruned.
        stands: where it was stopped when another took over: batch, version of bronze, frontier, and when that was
            (``retired_at_ms``; older ones have none); of one that is held, where the current one stood when it was made, and
            the ``beside`` of that; of one whose checkpoint could not say where it stopped, ``damaged``; empty otherwise.
        asked_by: who asked for it, see `process.asked_by`; empty in records from before that was written down.
    """

    number: int
    key_groups: int
    form: int
    made_by: str
    made_from: Mapping[str, Any] = field(default_factory=dict[str, Any])
    made_at_ms: int = 0
    status: str = CURRENT
    stands: Mapping[str, Any] = field(default_factory=dict[str, Any])
    asked_by: str = ""

    @property
    def is_damaged(self) -> bool:
        """Whether its checkpoint could not say where it stopped when another took over: nobody can go back to it."""
        return bool(self.stands.get("damaged"))

    @classmethod
    def first(cls, key_groups: int, form: int = STORED_FORM) -> "Generation":
        """Return the one that a home begins with."""
        return cls(1, key_groups, form, "up")


@dataclass(frozen=True, slots=True)
class Generations:
    """The record.

    Attributes:
        current: the number of the one that runs.
        known: all of them, by number; the first is not in it before there is a second.
    """

    current: int
    known: Mapping[int, Generation]

    def of(self, number: int) -> Generation | None:
        """Return a generation."""
        return self.known.get(number)

    def newest(self) -> int:
        """Return the greatest number."""
        return max([self.current, *self.known])

    def predecessor(self) -> Generation | None:
        """Return the one that the current one took over from, where it has not been pruned; damaged ones are passed over."""
        gone_on_from = (one for one in self.known.values() if one.status == RETIRED and not one.is_damaged)
        before = [one for one in gone_on_from if one.number < self.current]
        return max(before, key=lambda one: one.number, default=None)

    def held(self) -> Generation | None:
        """Return the one that waits to be given the work."""
        return next((one for one in self.known.values() if one.status == HELD), None)

    def retired_at_ms(self, number: int) -> int | None:
        """Return when another took over from a generation, epoch milliseconds; None where nobody wrote down when.

        Of one that was retired before that was written down, when the next one was made that came to run.
        """
        one = self.of(number)
        if one is not None and (at_ms := one.stands.get("retired_at_ms")) is not None:
            return int(at_ms)
        ran = (later for later in self.known.values() if later.number > number and later.status in (CURRENT, RETIRED, PRUNED))
        successor = min(ran, key=lambda later: later.number, default=None)
        return successor.made_at_ms or None if successor is not None else None

    def of_the_same_groups(self, number: int) -> list[int]:
        """Return a generation and those of whose checkpoints it is a copy: what their groups said last may still be so."""
        found = [number]
        while (one := self.of(found[-1])) is not None and one.made_by == REPARTITION:
            found.append(int(one.made_from["generation"]))
        return found

    def choices_in(self, number: int) -> frozenset[int]:
        """Return the generations that were made of other devices than were known, of a generation and those it comes from."""
        found: set[int] = set()
        seen: set[int] = set()
        while number not in seen and (one := self.of(number)) is not None:
            seen.add(number)
            if one.made_from.get("only") or one.made_from.get("devices"):
                found.add(number)
            number = int(one.made_from.get("generation", 0))
        return frozenset(found)

    def with_one(self, one: Generation) -> "Generations":
        """Return the record with a generation added or changed."""
        return replace(self, known={**self.known, one.number: one})

    def switched(self, number: int, stands: Mapping[str, Any]) -> "Generations":
        """Return the record with another current one; the former is retired.

        Args:
            number: of the one that becomes current.
            stands: where the former one stopped.
        """
        former = replace(self.known[self.current], status=RETIRED, stands=stands)
        chosen = replace(self.known[number], status=CURRENT, stands={})
        return Generations(number, {**self.known, former.number: former, number: chosen})


def checkpoint_of(lifecycle: Path, number: int) -> Path:
    """Return the folder of a generation's checkpoint."""
    return lifecycle / f"gen-{number:04d}"


def load_generations(lifecycle: Path) -> Generations:
    """Read the record of a folder of checkpoints.

    Raises:
        FleetError: it is damaged.
    """
    path = lifecycle / _RECORD
    try:
        record = json.loads(path.read_text())
        return Generations(int(record["current"]), {one["number"]: Generation(**one) for one in record["generations"]})
    except FileNotFoundError:
        return Generations(1, {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f'the record of generations "{path}" is damaged ({error}); restore it from a backup', code="generations-damaged"
        ) from None


def made_durable(lifecycle: Path, number: int) -> None:
    """Put a generation that was made on the disk, before the record says that it is to be gone on with: Spark syncs nothing.

    Raises:
        FleetError: the system refuses.
    """
    checkpoint = checkpoint_of(lifecycle, number)
    try:
        sync_tree(checkpoint)
    except OSError as error:
        raise FleetError(f'"{checkpoint}" cannot be written to the disk ({error.strerror}); nothing has changed; see to it, then '
                         f"give the same command again", code="checkpoint-not-durable") from None  # fmt: skip


def save_generations(lifecycle: Path, record: Generations) -> None:
    """Write the record in one step, and on the disk.

    Raises:
        FleetError: the system refuses.
    """
    content = {"current": record.current, "generations": [asdict(one) for _, one in sorted(record.known.items())]}
    try:
        atomic_write(lifecycle / _RECORD, json.dumps(content, indent=1))
    except OSError as error:
        raise FleetError(f'"{lifecycle / _RECORD}" cannot be written ({error.strerror}); nothing has changed; see to it, then '
                         f"give the same command again", code="generations-unwritable") from None  # fmt: skip


def begin_generation(
    lifecycle: Path, current: Generation, *, key_groups: int, form: int, made_by: str, made_from: Mapping[str, Any]
) -> Generation:
    """Write down that a generation is being made, and make room for it; one left half made is removed.

    Args:
        lifecycle: the folder of checkpoints.
        current: the generation that runs.
        key_groups: of the new one.
        form: likewise.
        made_by: the verb.
        made_from: what from.

    Raises:
        FleetError: another is held.
    """
    record = none_held(lifecycle)
    record = record if record.known else record.with_one(current)
    record = sweep(lifecycle, record)
    made = Generation(record.newest() + 1, key_groups, form, made_by, made_from, wall_clock_ms(), NEW, asked_by=asked_by())
    shutil.rmtree(checkpoint_of(lifecycle, made.number), ignore_errors=True)
    save_generations(lifecycle, record.with_one(made))
    return made


def none_held(lifecycle: Path) -> Generations:
    """Return the record, where no generation waits to be given the work.

    Raises:
        FleetError: one does.
    """
    record = load_generations(lifecycle)
    if (held := record.held()) is not None:
        raise FleetError(
            f"generation {held.number}, made by {held.made_by}, is held, and there is one at a time; give it the work: "
            f"./fleet state switch {held.number}, or remove it: ./fleet state discard {held.number}",
            code="generation-held",
        )
    return record


def sweep(lifecycle: Path, record: Generations) -> Generations:
    """Remove what those that were killed have left behind; return the record that says so. For one who makes, alone."""
    for one in record.known.values():
        if one.status == NEW:
            record = record.with_one(replace(one, status=DISCARDED))
    for folder in left_over(lifecycle, record):
        shutil.rmtree(folder, ignore_errors=True)
    for aside in lifecycle.glob("told-*"):  # what a canary said
        shutil.rmtree(aside, ignore_errors=True)
    return record


def left_over(lifecycle: Path, record: Generations) -> list[Path]:
    """Return the checkpoints that are there still of generations that were removed: whoever did that was killed."""
    folders = [checkpoint_of(lifecycle, one.number) for one in record.known.values() if one.status in (DISCARDED, PRUNED)]
    return [folder for folder in folders if folder.exists()]


def discard_generation(lifecycle: Path, made: Generation) -> None:
    """Remove a generation that was not to be."""
    record = load_generations(lifecycle)
    save_generations(lifecycle, record.with_one(replace(made, status=DISCARDED)))
    shutil.rmtree(checkpoint_of(lifecycle, made.number), ignore_errors=True)
