"""Durable file operations: sync of file contents and of their names in folders."""

import errno
import os
from contextlib import suppress
from pathlib import Path


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error reports a full disk or quota.

    The errors of Delta and DuckDB have no error number and are recognised by their text.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(f"(os error {code})" in str(error) or os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def atomic_write(
    path: Path, content: str | bytes, *, sync: bool = True, mode: int = 0o666, temporary: Path | None = None
) -> None:
    """Replace a file atomically: a reader sees the complete old or new content.

    Args:
        path: path of the file.
        content: complete new content.
        sync: whether content and name are durable when the function returns.
        mode: permission bits of the new file, before the umask.
        temporary: path of the temporary file, in the same folder. The default is one name for all
            writers, which requires one writer at a time; a leftover of a killed writer is replaced.

    Raises:
        OSError: the write failed; the old file stays, and no temporary file is left.
    """
    fresh = temporary or path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def replace_durably(temporary: Path, path: Path) -> None:
    """Replace a file atomically and durably by a finished temporary file.

    Args:
        temporary: path of the temporary file.
        path: path of the file to replace.

    Raises:
        OSError: the replacement failed; both files stay unchanged.
    """
    sync_file(temporary)
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(directory: Path) -> None:
    """Make new and changed names in a folder durable."""
    folder = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sync_file(path: Path) -> None:
    """Make the content of an existing file durable; for its name, use `sync_folder`.

    Raises:
        OSError: the file is missing or cannot be synced.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_tree(directory: Path) -> None:
    """Make all contents of a folder durable, and the name of the folder too."""
    for folder, _, names in os.walk(directory):
        for name in names:
            sync_file(Path(folder) / name)
        sync_folder(Path(folder))
    sync_folder(directory.parent)
