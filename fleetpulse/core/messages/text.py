"""Bounds of texts in the state: names and ids from devices and operators."""

from typing import Final

MAX_ID_BYTES: Final = 128
MAX_TEXT: Final = 256  # characters
_INT64: Final = range(-(2**63), 2**63)


def as_text(value: object, *, numbers: bool = False) -> str | None:
    """Return the value of a field as a text of a row; None if it is not a valid text.

    Args:
        value: value in the payload.
        numbers: whether a whole number is accepted as a text.
    """
    if numbers and type(value) is int:
        value = str(value) if value in _INT64 else ""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_TEXT or not value.isprintable():
        return None
    return value
