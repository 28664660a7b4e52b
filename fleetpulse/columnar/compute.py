"""``pyarrow.compute`` for all modules: its functions are made at run time, and type checkers do not know them."""

from typing import Any, Final

import pyarrow.compute

pc: Final[Any] = pyarrow.compute
