"""Errors are sentences that a person can act on.

Rule 1: a message says what is wrong, which one, the rule, what was got, and what to do.
Rule 2: bad input is a value that goes to quarantine; an exception is for what stops the work.
Rule 3: each error has a code, which programs and tests compare; its sentence is for people and may change.
"""

from typing import ClassVar, Final

UNKNOWN: Final = "unknown"


class FleetError(Exception):
    """The work cannot be done; ``str(error)`` is one sentence that says why and what to do.

    Args:
        sentence: for people.
        code: for programs: two to five lower-case words with hyphens, subject first, such as "generation-held".

    Attributes:
        code: see above.
        exit_code: exit status of a command that ends with this error: 1, refused.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, sentence: str, *, code: str = UNKNOWN) -> None:
        super().__init__(sentence)
        self.code = code


class Misuse(FleetError):
    """The command was called in a way that it cannot be called; it ends with 2."""

    exit_code: ClassVar[int] = 2
