"""Files with secrets that fleetpulse writes: only their owner can read them."""

import os
import secrets
from pathlib import Path

from fleetpulse.io.system.fsync import atomic_write, sync_folder


def create_secret(path: Path, text: str) -> str:
    """Create a file of mode 600 unless it exists, and return its content.

    Concurrent processes get the same content: that of the first one.
    """
    if not path.exists():
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        write_secret(fresh, text)
        try:
            os.link(fresh, path)
        except FileExistsError:
            pass  # another process was first
        finally:
            fresh.unlink()
        sync_folder(path.parent)
    return path.read_text()


def write_secret(path: Path, text: str) -> None:
    """Write a file of mode 600 atomically and durably."""
    atomic_write(path, text, mode=0o600, temporary=path.with_name(f".{path.name}.{os.getpid()}"))
