"""Copies of state values on the machine's own disk: Spark hands a value to Python as text, at many times the price of a file.

Rule 1: the state is the truth. It holds the name of each value's copy, written in the same commit. A name is given once: it says
which value is meant, and its checksum whether the file is whole. Lost, damaged, older, of another try or on another machine: then
the value itself is read.
Rule 2: a copy is let go of with its value, and all of them with the session, so that they take no more room than the state.
"""

import os
import secrets
import zlib
from pathlib import Path
from typing import Final

_TOKEN_BYTES: Final = 12
_FOLDER: Final = "fleetpulse-state"


class StateValueCache:
    """The copies that this worker and its neighbours have written.

    Args:
        folder: where they lie; None keeps none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            folder.mkdir(exist_ok=True)

    @classmethod
    def of_worker(cls) -> "StateValueCache":
        """Return those in the folder that Spark gives its Python workers, and removes at its end."""
        folders = os.environ.get("SPARK_LOCAL_DIRS")
        return cls(Path(folders.split(",")[0], _FOLDER) if folders else None)

    def find(self, name: str) -> bytes | None:
        """Return the value whose copy has this name, where there is one that is whole."""
        if self.folder is None:
            return None
        try:
            found = (self.folder / name).read_bytes()
        except OSError:
            return None
        return found if name.endswith(_checksum(found)) else None

    def keep(self, value: bytes) -> str:
        """Copy a value if it can be done, and return the copy's name."""
        name = secrets.token_hex(_TOKEN_BYTES) + _checksum(value)
        if self.folder is not None:
            try:
                (self.folder / name).write_bytes(value)
            except OSError:  # a full disk takes nothing away but the advantage
                self.drop(name)
        return name

    def drop(self, name: str) -> None:
        """Let go of a copy."""
        if self.folder is not None:
            (self.folder / name).unlink(missing_ok=True)


def _checksum(value: bytes) -> str:
    return f"{zlib.crc32(value):08x}"
