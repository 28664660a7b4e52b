"""What is run: which contenders over which inputs.

Rule: those that call Python for each device get a smaller fleet, so that they end at all; the reference runs over it
too, and their ratio is to that run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bench import flink_peer
from bench.contenders import ON_SPARK, OURS, REFERENCE
from bench.generate import Fleet
from fleetpulse.core.errors import Misuse

FAST: Final = (OURS, REFERENCE, "scala-transform-with-state")
ALL: Final = (*ON_SPARK, flink_peer.NAME)
SIZES: Final = (100_000, 1_000_000)
FLAT_ROWS: Final = 3_000_000  # a batch, whatever the fleet
SMALL_DEVICES: Final = 5_000
SMALLER_DEVICES: Final = 10_000
WARMING: Final = Fleet(2_000, 6, batches=40)  # what costs the same in every batch is compiled by then
WARMING_LIMIT_S: Final = 600  # the first time, JARs are fetched and what is compiled is compiled


@dataclass(frozen=True, slots=True)
class Course:
    """One input and who runs over it."""

    fleet: Fleet
    contenders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call of the benchmark does.

    Attributes:
        courses: in the order in which each round runs them.
        rounds: measured ones, after one that warms up.
        limit_s: how long a contender may take for one run.
    """

    courses: tuple[Course, ...]
    rounds: int
    limit_s: float

    def restricted(self, names: Sequence[str]) -> "Plan":
        """Return the plan for some of the contenders."""
        courses = tuple(
            Course(course.fleet, tuple(name for name in course.contenders if name in names)) for course in self.courses
        )
        return Plan(tuple(course for course in courses if course.contenders), self.rounds, self.limit_s)


def _quick(devices: Sequence[int]) -> Plan:
    """Ours and the reference, all devices active, in batches of 1,200,000 to 2,000,000 messages."""
    courses = tuple(Course(Fleet(count, max(2, 1_200_000 // count), batches=3), (OURS, REFERENCE)) for count in devices or SIZES)
    return Plan(courses, rounds=1, limit_s=120)


def _small(devices: Sequence[int]) -> Plan:
    """Everyone over a small fleet: do all agree?"""
    return Plan(tuple(Course(Fleet(count, 6, batches=4), ALL) for count in devices or (SMALL_DEVICES,)), rounds=1, limit_s=300)


def _full(devices: Sequence[int]) -> Plan:
    """Both sizes, all devices and one in twenty active; per-device Python over a smaller fleet."""
    if devices:
        raise Misuse("the full benchmark has its sizes; --devices goes with --quick, --small or --flat")
    courses = (
        Course(Fleet(SMALLER_DEVICES, 6), ALL),
        Course(Fleet(100_000, 12), FAST),
        Course(Fleet(100_000, 12, one_in=20), FAST),
        Course(Fleet(1_000_000, 2, batches=4), FAST),
        Course(Fleet(1_000_000, 12, batches=4, one_in=20), FAST),
    )
    return Plan(courses, rounds=3, limit_s=600)


def _flat(devices: Sequence[int]) -> Plan:
    """Ours over fleets of all sizes, in batches of as many messages: does a message cost the same?"""
    courses = tuple(Course(Fleet(count, FLAT_ROWS // count, batches=3), (OURS,)) for count in devices or (10_000, *SIZES))
    return Plan(courses, rounds=5, limit_s=600)


QUICK, SMALL, FLAT, FULL = "quick", "small", "flat", "full"
PLANS: Final[Mapping[str, Callable[[Sequence[int]], Plan]]] = {QUICK: _quick, SMALL: _small, FLAT: _flat, FULL: _full}
