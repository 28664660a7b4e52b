"""How the fold is compiled."""

from typing import Any, Final

from numba import njit

# Of functions that are given arrays and make none. Numba otherwise counts a reference to each array, atomically, wherever
# one function gives it to another: a message passes through a dozen of them, and two thirds of its cost were this counting.
_FLAGS: Final[dict[str, Any]] = {"cache": True, "_nrt": False}
borrowing: Final[Any] = njit(**_FLAGS)
