"""What is run: which contenders over which inputs.

Rule: those that call Python for each device get a smaller fleet, so that they end at all; the reference runs over it
too, and their ratio is to that run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench import flink_peer
from bench.contenders import ON_SPARK, OURS, REFERENCE
from bench.generate import Fleet

FAST: Final = (OURS, REFERENCE, "scala-transform-with-state")
ALL: Final = (*ON_SPARK, flink_peer.NAME)
QUICK_DEVICES: Final = 5_000
SMALLER_DEVICES: Final = 10_000


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


def quick(devices: int | None = None) -> Plan:
    """Everyone over a small fleet."""
    return Plan((Course(Fleet(devices or QUICK_DEVICES, 6, batches=4), ALL),), rounds=2, limit_s=300)


def full() -> Plan:
    """Both sizes, all devices and one in twenty active; per-device Python over a smaller fleet."""
    courses = (
        Course(Fleet(SMALLER_DEVICES, 6), ALL),
        Course(Fleet(100_000, 6), FAST),
        Course(Fleet(100_000, 6, one_in=20), FAST),
        Course(Fleet(1_000_000, 1), FAST),
        Course(Fleet(1_000_000, 6, one_in=20), FAST),
    )
    return Plan(courses, rounds=3, limit_s=600)


def flat(devices: Sequence[int] = (100_000, 1_000_000)) -> Plan:
    """One in twenty active, at sizes that differ: what do those cost that are silent?"""
    courses = tuple(Course(Fleet(count, 6, one_in=20), (OURS, REFERENCE)) for count in devices)
    return Plan(courses, rounds=5, limit_s=600)
