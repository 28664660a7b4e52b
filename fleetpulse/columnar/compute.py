"""Untyped ``pyarrow.compute``: type checkers do not know its generated functions."""

from typing import Any, Final

import pyarrow.compute

pc: Final[Any] = pyarrow.compute
