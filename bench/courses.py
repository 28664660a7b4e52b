"""What is run: which contenders over which inputs.

Rule: those that call Python for each device get fewer batches or a smaller fleet, so that they end at all; this job and
the reference run over the same, and their ratio is to that run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bench import flink_peer
from bench.contenders import ON_SPARK, OURS, REFERENCE
from bench.generate import Fleet
from fleetpulse.core.errors import Misuse

FAST: Final = (OURS, REFERENCE, "scala-transform-with-state")
ALL: Final = (*ON_SPARK, flink_peer.NAME)
PER_DEVICE: Final = tuple(name for name in ALL if name not in FAST)
SIZES: Final = (100_000, 1_000_000)
FLAT_ROWS: Final = 6_000_000  # a batch, whatever the fleet: six of each device where there are a million
SMALL_DEVICES: Final = 5_000
SMALLER_DEVICES: Final = 10_000
WARMING: Final = Fleet(2_000, 6, batches=20)  # before the first round: what costs the same in every batch is run, and compiled
QUICK_BUDGET_S: Final = 270  # of five minutes: the last round may take longer than the one before it
WARMING_LIMIT_S: Final = 600  # the first time, JARs are fetched and what is compiled is compiled


@dataclass(frozen=True, slots=True)
class Course:
    """One input and who runs over it.

    Attributes:
        fleet: of the input; its first batch is never measured.
        contenders: in the order in which each round runs them.
        beside: those of them that run to be compared with, and have their row in a course over as many devices.
        warm_rounds: before the measured ones: compared, and not counted.
        rounds: measured ones.
    """

    fleet: Fleet
    contenders: tuple[str, ...]
    beside: tuple[str, ...] = ()
    warm_rounds: int = 1
    rounds: int = 1

    @property
    def shown(self) -> tuple[str, ...]:
        """Those who have a row."""
        return tuple(name for name in self.contenders if name not in self.beside)

    def runs_in(self, number: int, of: int) -> bool:
        """Return whether it runs in a round of a plan that has so many; a course of fewer rounds runs in the last ones."""
        return 1 - self.warm_rounds <= number - (of - self.rounds)

    def counts_in(self, number: int, of: int) -> bool:
        """Return whether such a round is measured."""
        return number > of - self.rounds


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call of the benchmark does.

    Attributes:
        courses: in the order in which each round runs them.
        limit_s: how long a contender may take for one run.
        budget_s: how long all may take together, from inputs and warm-up on; what is left out for it is said in `bench.pace`.
    """

    courses: tuple[Course, ...]
    limit_s: float
    budget_s: float | None = None

    @property
    def rounds(self) -> range:
        """The rounds, of which the measured ones count from 1."""
        last = max(course.rounds for course in self.courses)
        return range(min(1 - course.warm_rounds + last - course.rounds for course in self.courses), last + 1)

    @property
    def contenders(self) -> tuple[str, ...]:
        """All that take part, in the order in which they first run."""
        return tuple(dict.fromkeys(name for course in self.courses for name in course.contenders))

    def restricted(self, names: Sequence[str]) -> "Plan":
        """Return the plan for some of the contenders.

        Raises:
            Misuse: it does not run one of them, or shows none.
        """
        if others := [name for name in names if name not in self.contenders]:
            raise Misuse(
                f"this plan runs {', '.join(self.contenders)}; got {', '.join(others)}: take another plan",
                code="contender-not-planned",
            )
        courses = tuple(
            replace(course, contenders=tuple(name for name in course.contenders if name in names)) for course in self.courses
        )
        if not (left := tuple(course for course in courses if course.shown)):
            raise Misuse(
                f"{', '.join(names)} alone have no row in this plan; name one of {', '.join(self.contenders)} beside them",
                code="contender-alone",
            )
        return replace(self, courses=left)


def _quick(devices: Sequence[int]) -> Plan:
    """Ours and the reference, all devices active, in batches of 1,200,000 to 2,000,000 messages.

    What is left to compile after the rounds of the first fleet is what the first batch of a greater one compiles. Of the
    rounds, the budget leaves out which do not fit: each fleet has a measured one.
    """
    courses = tuple(
        Course(
            Fleet(count, max(2, 1_200_000 // count), batches=3),
            (OURS, REFERENCE),
            warm_rounds=0 if place else 3,
            rounds=2,
        )
        for place, count in enumerate(devices or SIZES)
    )
    return Plan(courses, limit_s=120, budget_s=QUICK_BUDGET_S)


def _small(devices: Sequence[int]) -> Plan:
    """Everyone over a small fleet: do all agree?"""
    return Plan(tuple(Course(Fleet(count, 6, batches=4), ALL) for count in devices or (SMALL_DEVICES,)), limit_s=300)


def _python(devices: Sequence[int]) -> Plan:
    """Python called for each device beside this job, over a fleet of the bars' smaller size; a batch is measured, three times."""
    return Plan(tuple(_python_course(count) for count in devices or SIZES[:1]), limit_s=600)


def _python_course(devices: int) -> Course:
    return Course(Fleet(devices, 12, batches=2), (OURS, REFERENCE, *PER_DEVICE), rounds=3)


def _full(devices: Sequence[int]) -> Plan:
    """Both sizes, all devices and one in twenty active; per-device Python over a smaller fleet, and over fewer batches."""
    if devices:
        raise Misuse(
            "the full benchmark has its sizes; --devices goes with --quick, --small, --python or --flat", code="option-conflict"
        )
    runs = (
        (Fleet(SMALLER_DEVICES, 6), ALL),
        (Fleet(100_000, 12), FAST),
        (Fleet(100_000, 12, one_in=20), FAST),
        (Fleet(1_000_000, 2, batches=4), FAST),
        (Fleet(1_000_000, 12, batches=4, one_in=20), FAST),
    )
    by_size = (Course(fleet, contenders, rounds=3) for fleet, contenders in runs)
    # Warmed by the first course, in which all take part; two of its contenders have their rows over more batches above.
    python = replace(_python_course(SIZES[0]), beside=(OURS, REFERENCE), warm_rounds=0)
    return Plan((*by_size, python), limit_s=600)


def _flat(devices: Sequence[int], rows: int = FLAT_ROWS) -> Plan:
    """Ours over fleets of all sizes, in batches of as many messages: does a message cost the same?"""
    fleets = (Fleet(count, rows // count, batches=3) for count in devices or (10_000, *SIZES))
    return Plan(tuple(Course(fleet, (OURS,), rounds=5) for fleet in fleets), limit_s=600)


QUICK, SMALL, PYTHON, FLAT, FULL = "quick", "small", "python", "flat", "full"
PLANS: Final[Mapping[str, Callable[[Sequence[int]], Plan]]] = {
    QUICK: _quick,
    SMALL: _small,
    PYTHON: _python,
    FLAT: _flat,
    FULL: _full,
}


def planned(name: str, devices: Sequence[int], rows: int | None = None) -> Plan:
    """Return a plan.

    Args:
        name: one of `PLANS`.
        devices: other sizes than the plan's; empty for its own.
        rows: messages of a batch, for the flat plan; each device has an equal number of them.

    Raises:
        Misuse: the plan takes no other sizes or no other batches, or such an input cannot be generated.
    """
    if rows is None:
        return PLANS[name](devices)
    if name != FLAT:
        raise Misuse(
            f"--rows goes with --flat alone, whose batches are of one size in all fleets; got --rows {rows} without it",
            code="option-conflict",
        )
    return _flat(devices, rows)
