"""Minimum numbers of cases that all examples of a property together must cover."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from tests.support.form import examples

P = ParamSpec("P")


class Floor:
    """Counter of the cases that a property asserts; too few of them are a failure.

    Put the decorator ``over_all_examples`` above ``given``. The property calls ``met`` after its
    assertions. A single example may cover no case.

    Args:
        least: minimum number of cases of one run of the property; half of it in the default suite, which has
            fewer examples. It must be well below the usual number, because examples are random.
    """

    def __init__(self, least: int) -> None:
        self.least = max(1, examples(least))
        self.count = 0

    def met(self, cases: int = 1) -> None:
        """Add cases of one example."""
        self.count += cases

    def over_all_examples(self, test: Callable[P, None]) -> Callable[P, None]:
        """Make a property fail after its last example if it covered too few cases."""

        @wraps(test)
        def run(*args: P.args, **more: P.kwargs) -> None:
            self.count = 0
            test(*args, **more)
            assert self.count >= self.least, f"all examples met {self.count} cases; at least {self.least} were expected"

        return run
