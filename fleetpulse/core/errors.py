"""Errors are sentences that a person can act on.

Rule 1: a message says what is wrong, which one, the rule, what was got, and what to do.
Rule 2: bad input is a value that goes to quarantine; an exception is for what stops the work.
"""

from typing import ClassVar


class FleetError(Exception):
    """The work cannot be done; ``str(error)`` is one sentence that says why and what to do.

    Attributes:
        exit_code: with what the command ends: 1, refused.
    """

    exit_code: ClassVar[int] = 1


class Misuse(FleetError):
    """The command was called in a way that it cannot be called; it ends with 2."""

    exit_code: ClassVar[int] = 2
