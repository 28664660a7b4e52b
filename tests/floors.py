"""Floors of properties: how many cases all examples together must have met, since one example may meet none."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

P = ParamSpec("P")


class Floor:
    """Counts the cases that a property asserts something about, and fails where its examples met too few.

    ``over_all_examples`` stands above ``given``; the property calls ``met`` behind its assertions.

    Args:
        least: cases of one run of the property; well below a usual run's, for examples are random.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.count = 0

    def met(self, cases: int = 1) -> None:
        """Count cases of one example."""
        self.count += cases

    def over_all_examples(self, test: Callable[P, None]) -> Callable[P, None]:
        """Let a property fail behind its last example where the floor was not reached."""

        @wraps(test)
        def run(*args: P.args, **more: P.kwargs) -> None:
            self.count = 0
            test(*args, **more)
            assert self.count >= self.least, f"all examples met {self.count} cases; at least {self.least} were expected"

        return run
