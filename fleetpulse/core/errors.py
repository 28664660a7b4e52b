"""Base classes of errors with a message for people and a code for programs.

Rule 1: a message states the fault, the object, the expected and the actual value, and the remedy.
Rule 2: invalid input is a value that goes to quarantine; an exception is for failures of an
operation.
Rule 3: programs and tests compare the code of an error; the message is for people and may change.
"""

from typing import ClassVar, Final

UNKNOWN: Final = "unknown"


class FleetError(Exception):
    """An operation cannot be done; ``str(error)`` is the message for people.

    Args:
        sentence: message for people: cause and remedy.
        code: identifier for programs: two to five lower-case words with hyphens, subject first,
            such as "generation-held".

    Attributes:
        code: identifier for programs.
        exit_code: exit status of a command that ends with this error: 1, refused.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, sentence: str, *, code: str = UNKNOWN) -> None:
        super().__init__(sentence)
        self.code = code


class Misuse(FleetError):
    """Invalid use of a command; the command exits with status 2."""

    exit_code: ClassVar[int] = 2


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error, at most 300 characters; its class if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
