"""Plans of the lifecycle benchmark: contenders and inputs.

Rule: contenders that call Python per device get fewer batches or a smaller fleet, as they would not
finish otherwise. This job and the reference also run over those inputs, for the ratios.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bench.lifecycle.contenders import ON_SPARK, OURS, REFERENCE
from bench.lifecycle.generate import Fleet
from bench.peers import flink
from fleetpulse.core.errors import Misuse

FAST: Final = (OURS, REFERENCE, "scala-transform-with-state")
ALL: Final = (*ON_SPARK, flink.NAME)
PER_DEVICE: Final = tuple(name for name in ALL if name not in FAST)
SIZES: Final = (100_000, 1_000_000)
FLAT_ROWS: Final = 6_000_000  # messages of a batch for all fleet sizes: six per device of a million
SMALL_DEVICES: Final = 5_000
SMALLER_DEVICES: Final = 10_000
WARMING: Final = Fleet(2_000, 6, batches=20)  # before the first round: compiles the code that every batch runs
QUICK_BUDGET_S: Final = 270  # for five minutes in total: the last round may take longer than expected
WARMING_LIMIT_S: Final = 600  # the first run downloads JARs and compiles


@dataclass(frozen=True, slots=True)
class Workload:
    """One input and its contenders.

    Attributes:
        fleet: fleet of the input; its first batch is never measured.
        contenders: contenders in the order of their runs in a round.
        comparison_only: contenders that run for comparison only; their row is in another workload with
            the same number of devices.
        warm_rounds: number of warm-up rounds; their results are compared, but not measured.
        rounds: number of measured rounds.
    """

    fleet: Fleet
    contenders: tuple[str, ...]
    comparison_only: tuple[str, ...] = ()
    warm_rounds: int = 1
    rounds: int = 1

    @property
    def shown(self) -> tuple[str, ...]:
        """Contenders with a row in the results."""
        return tuple(name for name in self.contenders if name not in self.comparison_only)

    def runs_in(self, number: int, of: int) -> bool:
        """Return whether the workload runs in a round of a plan.

        A workload with fewer rounds than the plan runs in the last ones.

        Args:
            number: number of the round.
            of: number of measured rounds of the plan.
        """
        return 1 - self.warm_rounds <= number - (of - self.rounds)

    def counts_in(self, number: int, of: int) -> bool:
        """Return whether a round is measured; arguments as for `runs_in`."""
        return number > of - self.rounds


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one benchmark.

    Attributes:
        workloads: workloads in the order of their runs in a round.
        limit_s: time limit of one run of a contender, seconds.
        budget_s: time for the whole plan, seconds, inputs and warm-up included; see `bench.lifecycle.schedule`
            for the rounds left out. None runs all.
    """

    workloads: tuple[Workload, ...]
    limit_s: float
    budget_s: float | None = None

    @property
    def rounds(self) -> range:
        """Numbers of the rounds; measured ones count from 1."""
        last = max(workload.rounds for workload in self.workloads)
        return range(min(1 - workload.warm_rounds + last - workload.rounds for workload in self.workloads), last + 1)

    @property
    def contenders(self) -> tuple[str, ...]:
        """All contenders, in the order of their first run."""
        return tuple(dict.fromkeys(name for workload in self.workloads for name in workload.contenders))

    def restricted(self, names: Sequence[str]) -> "Plan":
        """Return the plan restricted to some contenders.

        Raises:
            Misuse: the plan does not run one of them, or none of them has a row.
        """
        if others := [name for name in names if name not in self.contenders]:
            raise Misuse(
                f"this plan runs {', '.join(self.contenders)}; got {', '.join(others)}; use another plan",
                code="contender-not-planned",
            )
        workloads = tuple(
            replace(workload, contenders=tuple(name for name in workload.contenders if name in names))
            for workload in self.workloads
        )
        if not (left := tuple(workload for workload in workloads if workload.shown)):
            raise Misuse(
                f"{', '.join(names)} alone have no row in this plan; name one of {', '.join(self.contenders)} in addition",
                code="contender-alone",
            )
        return replace(self, workloads=left)


def _quick(devices: Sequence[int]) -> Plan:
    """Plan with this job and the reference, all devices active, in large batches.

    A batch has 1.2 to 2 million messages. Only the first fleet has warm-up rounds: the rest is
    compiled in the unmeasured first batch of a larger fleet. Rounds that exceed the budget are left
    out, except one measured round per fleet.
    """
    workloads = tuple(
        Workload(
            Fleet(count, max(2, 1_200_000 // count), batches=3),
            (OURS, REFERENCE),
            warm_rounds=0 if place else 3,
            rounds=2,
        )
        for place, count in enumerate(devices or SIZES)
    )
    return Plan(workloads, limit_s=120, budget_s=QUICK_BUDGET_S)


def _small(devices: Sequence[int]) -> Plan:
    """Plan with all contenders over a small fleet, to check that their results agree."""
    return Plan(tuple(Workload(Fleet(count, 6, batches=4), ALL) for count in devices or (SMALL_DEVICES,)), limit_s=300)


def _python(devices: Sequence[int]) -> Plan:
    """Plan with per-device Python, over 100,000 devices; a batch is measured thrice."""
    return Plan(tuple(_python_workload(count) for count in devices or SIZES[:1]), limit_s=600)


def _python_workload(devices: int) -> Workload:
    return Workload(Fleet(devices, 12, batches=2), (OURS, REFERENCE, *PER_DEVICE), rounds=3)


def _full(devices: Sequence[int]) -> Plan:
    """Plan with both sizes, all devices or one in twenty active.

    Per-device Python runs over a smaller fleet, and over fewer batches.
    """
    if devices:
        raise Misuse(
            "the full benchmark has fixed sizes; use --devices with --quick, --small, --python or --flat", code="option-conflict"
        )
    runs = (
        (Fleet(SMALLER_DEVICES, 6), ALL),
        (Fleet(100_000, 12), FAST),
        (Fleet(100_000, 12, one_in=20), FAST),
        (Fleet(1_000_000, 2, batches=4), FAST),
        (Fleet(1_000_000, 12, batches=4, one_in=20), FAST),
    )
    by_size = (Workload(fleet, contenders, rounds=3) for fleet, contenders in runs)
    # No warm-up: the first workload has all contenders. Two of them have rows over more batches.
    python = replace(_python_workload(SIZES[0]), comparison_only=(OURS, REFERENCE), warm_rounds=0)
    return Plan((*by_size, python), limit_s=600)


def _flat(devices: Sequence[int], rows: int = FLAT_ROWS) -> Plan:
    """Plan with this job over all fleet sizes, in equal batches."""
    fleets = (Fleet(count, rows // count, batches=3) for count in devices or (10_000, *SIZES))
    return Plan(tuple(Workload(fleet, (OURS,), rounds=5) for fleet in fleets), limit_s=600)


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
        name: name of the plan, one of `PLANS`.
        devices: fleet sizes; empty for the sizes of the plan.
        rows: messages of a batch, for the flat plan only; each device has an equal number.

    Raises:
        Misuse: the plan has fixed sizes or batches, or such an input cannot be generated.
    """
    if rows is None:
        return PLANS[name](devices)
    if name != FLAT:
        raise Misuse(
            f"--rows needs --flat, whose batches have one size for all fleets; got --rows {rows} without it; add --flat",
            code="option-conflict",
        )
    return _flat(devices, rows)
