"""Local disk cache of state values.

Spark passes a state value to Python as text, which costs many times as much as reading a file.

Rule 1: the state is authoritative. It stores the name of each value's copy in the same commit. A
name is unique to one value and contains a checksum of the file. If no intact copy of that name is
on this machine, the value is read from the state.
Rule 2: a copy is removed with its value, and all copies with the session. The cache therefore takes
no more disk space than the state.
"""

import os
import secrets
import zlib
from pathlib import Path
from typing import Final

_TOKEN_BYTES: Final = 12
_FOLDER: Final = "fleetpulse-state"


class StateValueCache:
    """Cache of state values, shared by the Python workers of this machine.

    Args:
        folder: folder of the copies; None disables the cache.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            folder.mkdir(exist_ok=True)

    @classmethod
    def of_worker(cls) -> "StateValueCache":
        """Return the cache in the workers' local folder, which Spark removes at its end."""
        folders = os.environ.get("SPARK_LOCAL_DIRS")
        return cls(Path(folders.split(",")[0], _FOLDER) if folders else None)

    def find(self, name: str) -> bytes | None:
        """Return the value of the copy with this name; None if missing or damaged."""
        if self.folder is None:
            return None
        try:
            found = (self.folder / name).read_bytes()
        except OSError:
            return None
        return found if name.endswith(_checksum(found)) else None

    def keep(self, value: bytes) -> str:
        """Copy a value if possible, and return the name of the copy."""
        name = secrets.token_hex(_TOKEN_BYTES) + _checksum(value)
        if self.folder is not None:
            try:
                (self.folder / name).write_bytes(value)
            except OSError:  # a full disk costs only the speed of the cache
                self.drop(name)
        return name

    def drop(self, name: str) -> None:
        """Remove a copy."""
        if self.folder is not None:
            (self.folder / name).unlink(missing_ok=True)


def _checksum(value: bytes) -> str:
    return f"{zlib.crc32(value):08x}"
