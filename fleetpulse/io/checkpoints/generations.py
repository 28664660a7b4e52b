"""Generations of the lifecycle job: checkpoints, and the record of their origin.

Rule 1: one generation is current. A switch to another is one step, the renaming of the record file.
A crash before this step changes nothing. A generation whose creation was interrupted is created
again.
Rule 2: a generation that was current is kept with its last position until it is pruned, so that a
rollback to it is possible.
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
    """One checkpoint lineage of the lifecycle job, as recorded.

    Attributes:
        number: number of the generation, from 1.
        key_groups: number of its key groups.
        form: stored form that it writes, see `columnar.codec.versions`.
        made_by: command that created it, such as ``rescale``.
        made_from: source of its state: a generation and its batch, a snapshot's version, or a file.
        made_at_ms: time of its creation, epoch milliseconds.
        status: new, held (created, but not activated), current, retired, discarded or pruned.
        position: entries that depend on the status. Retired: its position at the switch, and the
            time of the switch (``retired_at_ms``, absent in old records). Retired with unknown
            position: ``damaged``. Held: position of the current generation when this one was
            created, and its number (``beside``). Empty otherwise.
        asked_by: user or Airflow run that requested it, see `process.asked_by`; may be empty in old
            records.
    """

    number: int
    key_groups: int
    form: int
    made_by: str
    made_from: Mapping[str, Any] = field(default_factory=dict[str, Any])
    made_at_ms: int = 0
    status: str = CURRENT
    position: Mapping[str, Any] = field(default_factory=dict[str, Any])
    asked_by: str = ""

    @property
    def is_damaged(self) -> bool:
        """Whether its position at the switch is unknown, so that rollback is impossible."""
        return bool(self.position.get("damaged"))

    @classmethod
    def first(cls, key_groups: int, form: int = STORED_FORM) -> "Generation":
        """Return the first generation of a home."""
        return cls(1, key_groups, form, "up")


@dataclass(frozen=True, slots=True)
class Generations:
    """Record of the generations of a home.

    Attributes:
        current: number of the current generation.
        known: generations by number. The first one is absent until a second one is created.
    """

    current: int
    known: Mapping[int, Generation]

    def of(self, number: int) -> Generation | None:
        """Return the generation with a number; None if it is not in the record."""
        return self.known.get(number)

    def newest(self) -> int:
        """Return the greatest number of a generation."""
        return max([self.current, *self.known])

    def predecessor(self) -> Generation | None:
        """Return the newest retired generation before the current one, unless damaged.

        Returns:
            The target of a rollback; None if there is none, or it was pruned.
        """
        gone_on_from = (one for one in self.known.values() if one.status == RETIRED and not one.is_damaged)
        before = [one for one in gone_on_from if one.number < self.current]
        return max(before, key=lambda one: one.number, default=None)

    def held(self) -> Generation | None:
        """Return the held generation, which waits for its switch; None if there is none."""
        return next((one for one in self.known.values() if one.status == HELD), None)

    def retired_at_ms(self, number: int) -> int | None:
        """Return the time of the switch from a generation to its successor.

        Old records lack this time; the creation time of the successor is returned instead.

        Returns:
            Time, epoch milliseconds; None if it is not recorded.
        """
        one = self.of(number)
        if one is not None and (at_ms := one.position.get("retired_at_ms")) is not None:
            return int(at_ms)
        ran = (later for later in self.known.values() if later.number > number and later.status in (CURRENT, RETIRED, PRUNED))
        successor = min(ran, key=lambda later: later.number, default=None)
        return successor.made_at_ms or None if successor is not None else None

    def repartitioned_from(self, number: int) -> list[int]:
        """Return the numbers of a generation and of the generations that it was copied from.

        All have the same key groups, so the newest summary of a group may be from any of them.
        """
        found = [number]
        while (one := self.of(found[-1])) is not None and one.made_by == REPARTITION:
            found.append(int(one.made_from["generation"]))
        return found

    def with_chosen_devices(self, number: int) -> frozenset[int]:
        """Return which of a generation and its ancestors have chosen devices.

        A generation has chosen devices if it was created with only some of the known devices
        (``only``), or from a list of devices (``devices``).
        """
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

    def switched(self, number: int, position: Mapping[str, Any]) -> "Generations":
        """Return the record with another current generation, and the former one retired.

        Args:
            number: number of the generation that becomes current.
            position: position of the former generation, see `Generation`.
        """
        former = replace(self.known[self.current], status=RETIRED, position=position)
        chosen = replace(self.known[number], status=CURRENT, position={})
        return Generations(number, {**self.known, former.number: former, number: chosen})


def checkpoint_of(lifecycle: Path, number: int) -> Path:
    """Return the folder of a generation's checkpoint."""
    return lifecycle / f"gen-{number:04d}"


def load_generations(lifecycle: Path) -> Generations:
    """Read the record of generations in a folder of checkpoints.

    Raises:
        FleetError: the record is damaged.
    """
    path = lifecycle / _RECORD
    try:
        record = json.loads(path.read_text())
        return Generations(int(record["current"]), {one["number"]: _read(**one) for one in record["generations"]})
    except FileNotFoundError:
        return Generations(1, {})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f'the record of generations "{path}" is damaged ({error}); restore it from a backup', code="generations-damaged"
        ) from None


def _read(stands: Mapping[str, Any] | None = None, **others: Any) -> Generation:
    """Parse an entry of the record; its key ``stands`` has the position, as in homes of version 1."""
    return Generation(**others, position=stands or {})


def _written(one: Generation) -> dict[str, Any]:
    entry = asdict(one)
    entry["stands"] = entry.pop("position")
    return entry


def sync_checkpoint(lifecycle: Path, number: int) -> None:
    """Make a new generation's checkpoint durable, before the record refers to it.

    Spark does not call fsync.

    Raises:
        FleetError: the checkpoint cannot be written to the disk.
    """
    checkpoint = checkpoint_of(lifecycle, number)
    try:
        sync_tree(checkpoint)
    except OSError as error:
        raise FleetError(f'"{checkpoint}" cannot be written to the disk ({error.strerror}); nothing has changed; fix the cause, '
                         f"then run the same command again", code="checkpoint-not-durable") from None  # fmt: skip


def save_generations(lifecycle: Path, record: Generations) -> None:
    """Write the record of generations durably, in one step.

    Raises:
        FleetError: the record cannot be written.
    """
    content = {"current": record.current, "generations": [_written(one) for _, one in sorted(record.known.items())]}
    try:
        atomic_write(lifecycle / _RECORD, json.dumps(content, indent=1))
    except OSError as error:
        raise FleetError(f'"{lifecycle / _RECORD}" cannot be written ({error.strerror}); nothing has changed; fix the cause, '
                         f"then run the same command again", code="generations-unwritable") from None  # fmt: skip


def begin_generation(
    lifecycle: Path, current: Generation, *, key_groups: int, form: int, made_by: str, made_from: Mapping[str, Any]
) -> Generation:
    """Record that a generation is being created, and remove half-made ones.

    Args:
        lifecycle: folder of checkpoints.
        current: current generation.
        key_groups: number of key groups of the new generation.
        form: stored form of the new generation.
        made_by: command that creates it.
        made_from: source of its state, see `Generation`.

    Raises:
        FleetError: another generation is held, or the record cannot be written.
    """
    record = require_none_held(lifecycle)
    record = record if record.known else record.with_one(current)
    record = remove_leftovers(lifecycle, record)
    generation = Generation(record.newest() + 1, key_groups, form, made_by, made_from, wall_clock_ms(), NEW, asked_by=asked_by())
    shutil.rmtree(checkpoint_of(lifecycle, generation.number), ignore_errors=True)
    save_generations(lifecycle, record.with_one(generation))
    return generation


def require_none_held(lifecycle: Path) -> Generations:
    """Read the record of generations, and check that no generation is held.

    Raises:
        FleetError: a generation is held.
    """
    record = load_generations(lifecycle)
    if (held := record.held()) is not None:
        raise FleetError(
            f"generation {held.number}, made by {held.made_by}, is held, and only one can be held at a time; activate it "
            f"with: ./fleet state switch {held.number}, or remove it with: ./fleet state discard {held.number}",
            code="generation-held",
        )
    return record


def remove_leftovers(lifecycle: Path, record: Generations) -> Generations:
    """Remove files of commands that were killed, and return the updated record.

    The caller holds `exclusive_state_change`.

    Args:
        lifecycle: folder of checkpoints.
        record: record of generations; the caller saves the returned one.
    """
    for one in record.known.values():
        if one.status == NEW:
            record = record.with_one(replace(one, status=DISCARDED))
    for folder in left_over(lifecycle, record):
        shutil.rmtree(folder, ignore_errors=True)
    for scratch in lifecycle.glob("scratch-*"):  # judgements of canaries and of bootstraps with --damaged
        shutil.rmtree(scratch, ignore_errors=True)
    return record


def left_over(lifecycle: Path, record: Generations) -> list[Path]:
    """Return checkpoints of discarded or pruned generations that still exist."""
    folders = [checkpoint_of(lifecycle, one.number) for one in record.known.values() if one.status in (DISCARDED, PRUNED)]
    return [folder for folder in folders if folder.exists()]


def discard_generation(lifecycle: Path, generation: Generation) -> None:
    """Record a generation as discarded, and remove its checkpoint."""
    record = load_generations(lifecycle)
    save_generations(lifecycle, record.with_one(replace(generation, status=DISCARDED)))
    shutil.rmtree(checkpoint_of(lifecycle, generation.number), ignore_errors=True)
