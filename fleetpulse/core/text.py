"""Bounds of texts that the state keeps: names and ids, as devices and operators send them."""

from typing import Final

MAX_ID_BYTES: Final = 128
MAX_TEXT: Final = 256  # characters
_INT64: Final = range(-(2**63), 2**63)


def as_text(value: object, *, numbers: bool = False) -> str | None:
    """Return a field's value as a text of a row; None where it may not be one.

    Args:
        value: what the payload says.
        numbers: whether a whole number may stand for a text.
    """
    if numbers and type(value) is int:
        value = str(value) if value in _INT64 else ""
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_TEXT or not value.isprintable():
        return None
    return value
