"""Copies of state values on the machine's own disk: Spark hands a value to Python as text, at many times the price of a file.

Rule 1: the state is the truth. It holds a digest of each value, written in the same commit; a copy is read only where its
content has that digest. Lost, damaged, older, of another try or on another machine: then the value itself is read.
Rule 2: a copy is let go of with its value, and all of them with the session, so that they take no more room than the state.
"""

import os
from hashlib import blake2b
from pathlib import Path
from typing import Final

_DIGEST_BYTES: Final = 16
_FOLDER: Final = "fleetpulse-state"


class Copies:
    """The copies that this worker and its neighbours have written.

    Args:
        folder: where they lie; None keeps none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            folder.mkdir(exist_ok=True)

    @classmethod
    def of_worker(cls) -> "Copies":
        """Return those in the folder that Spark gives its Python workers, and removes at its end."""
        folders = os.environ.get("SPARK_LOCAL_DIRS")
        return cls(Path(folders.split(",")[0], _FOLDER) if folders else None)

    def find(self, digest: str) -> bytes | None:
        """Return the value of a digest, where there is a copy of it that is whole."""
        if self.folder is None:
            return None
        try:
            found = (self.folder / digest).read_bytes()
        except OSError:
            return None
        return found if _digest(found) == digest else None

    def keep(self, value: bytes) -> str:
        """Return a value's digest, and copy the value if it can be done."""
        digest = _digest(value)
        if self.folder is not None:
            try:
                (self.folder / digest).write_bytes(value)
            except OSError:  # a full disk takes nothing away but the advantage
                self.drop(digest)
        return digest

    def drop(self, digest: str) -> None:
        """Let go of a copy."""
        if self.folder is not None:
            (self.folder / digest).unlink(missing_ok=True)


def _digest(value: bytes) -> str:
    return blake2b(value, digest_size=_DIGEST_BYTES).hexdigest()
