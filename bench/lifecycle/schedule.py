"""Schedule of a plan: all rounds, or those that fit into a time budget.

Rule 1: the first round of a workload and its first measured one always run.
Rule 2: any other round runs if it fits into the budget, with time reserved for the first measured
rounds of other workloads.
Rule 3: the expected duration of a round is that of the previous round of its workload. Without a
previous round, it is estimated from other workloads, in proportion to the work.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Final

from bench.lifecycle.generate import Fleet
from bench.lifecycle.plans import Plan, Workload

_MESSAGES_OF_A_DEVICE: Final = 2  # cost of a device in a batch, in messages: about 0.2 here, four in the reference


@dataclass(frozen=True, slots=True)
class Step:
    """One round of one workload.

    Attributes:
        number: number of the round; measured rounds count from 1.
        place: index of the workload in its plan.
        workload: the workload.
    """

    number: int
    place: int
    workload: Workload


@dataclass(slots=True)
class Schedule:
    """Execution of a plan within its budget, which counts from its creation.

    Create it before inputs and warm-up.

    Attributes:
        plan: the plan.
        clock: monotonic clock, seconds.
        left_out: steps that did not fit into the budget.
    """

    plan: Plan
    clock: Callable[[], float] = time.monotonic
    left_out: list[Step] = field(default_factory=list[Step])
    _began_s: float = field(init=False)
    _took_s: dict[int, float] = field(default_factory=dict[int, float])
    _measured: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def steps(self) -> Iterator[Step]:
        """Yield each step to run; the time until the next call counts as its duration."""
        last = self.plan.rounds[-1]
        for number, (place, workload) in product(self.plan.rounds, enumerate(self.plan.workloads)):
            if not workload.runs_in(number, last):
                continue
            step = Step(number, place, workload)
            counts = workload.counts_in(number, last)
            must = place not in self._took_s or (counts and place not in self._measured)
            if not must and not self._fits(place):
                self.left_out.append(step)
                continue
            started_s = self.clock()
            yield step
            self._took_s[place] = self.clock() - started_s
            self._measured |= {place} if counts else set()

    def _fits(self, place: int) -> bool:
        if self.plan.budget_s is None:
            return True
        owed_s = sum(self._expected_s(other) for other in range(len(self.plan.workloads)) if other not in self._measured)
        return self.clock() - self._began_s + self._expected_s(place) + owed_s <= self.plan.budget_s

    def _expected_s(self, place: int) -> float:
        if place in self._took_s:
            return self._took_s[place]
        work = _work(self.plan.workloads[place].fleet)
        return max(
            (took_s * work / _work(self.plan.workloads[other].fleet) for other, took_s in self._took_s.items()), default=0.0
        )

    def note(self, place: int, measured: int) -> str | None:
        """Return a note for a row of results if rounds were left out; None otherwise.

        Args:
            place: index of the workload.
            measured: number of its measured rounds.
        """
        last, workload = self.plan.rounds[-1], self.plan.workloads[place]
        cold = sum(step.place == place and not workload.counts_in(step.number, last) for step in self.left_out)
        if not measured or (measured == workload.rounds and not cold):
            return None
        rounds = f"{measured} measured round{'s' if measured > 1 else ''}"
        return f"{rounds}, after {workload.warm_rounds - cold} of {workload.warm_rounds} warm-up rounds" if cold else rounds


def _work(fleet: Fleet) -> int:
    return fleet.batches * fleet.devices // fleet.one_in * (fleet.messages + _MESSAGES_OF_A_DEVICE)
