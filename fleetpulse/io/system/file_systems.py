"""Checks of a file system for a home: hard links, atomic renames, locks and syncs.

Rule: a check leaves no file behind, and changes no existing file.
"""

import fcntl
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.system.fsync import atomic_write

_MOUNTS: Final = Path("/proc/self/mountinfo")
_PROCESS_S: Final = 30.0  # limit of the second process; a busy machine starts Python slowly
_REFUSED: Final = 3  # exit code of the second process if it did not get the lock
_TAKE: Final = f"""
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit({_REFUSED})
"""
_OBJECTS: Final = "keeps files as objects, without hard links and atomic renames"
_UNSUITABLE: Final = {  # type of the file system -> reason
    "exfat": "has no hard links",
    "fuse.blobfuse2": _OBJECTS,
    "fuse.gcsfuse": _OBJECTS,
    "fuse.rclone": _OBJECTS,
    "fuse.s3fs": _OBJECTS,
    "msdos": "has no hard links",
    "vboxsf": "has no hard links",
    "vfat": "has no hard links",
}
_LOCAL: Final = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
# Patterns of mount options with which locks exclude only processes of the same host, by type
_LOCAL_LOCKS: Final = {
    "9p": r".*",
    "cifs": r"nobrl|nolock",
    "fuse.sshfs": r".*",
    "lustre": r"localflock",
    "nfs": r"nolock|local_lock=(all|flock)",
    "nfs4": r"nolock|local_lock=(all|flock)",
    "smb3": r"nobrl|nolock",
}


@dataclass(frozen=True, slots=True)
class Mount:
    """Mounted file system.

    Attributes:
        point: folder on which it is mounted.
        type: name of its type, such as ``ext4`` or ``nfs4``.
        options: its mount options, including those of the superblock.
    """

    point: Path
    type: str
    options: frozenset[str]


def mount_of(path: Path, mounts: Path = _MOUNTS) -> Mount | None:
    """Return the mount of an existing path; None if the system has no list of mounts.

    Source: proc_pid_mountinfo(5)
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    resolved, found = path.resolve(), None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, more = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(more) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        if resolved.is_relative_to(point) and (found is None or len(point.parts) >= len(found.point.parts)):
            found = Mount(point, more[0], frozenset((*fields[5].split(","), *more[2].split(","))))  # a later mount hides others
    return found


def require_suitable(mount: Mount | None, *, shared: bool) -> str:
    """Check the type of a file system; return a description of it.

    Args:
        mount: the mount; None if it is unknown.
        shared: whether other hosts use the file system, too.

    Raises:
        FleetError: the type is known to lack hard links or atomic renames, or other hosts share the
            file system and its locks do not exclude them.
    """
    if mount is None:
        return "of unknown type"
    reason = _UNSUITABLE.get(mount.type)
    if reason is None and shared and (options := _LOCAL_LOCKS.get(mount.type)):
        local = sorted(option for option in mount.options if re.fullmatch(options, option))
        reason = f"has locks that do not exclude other hosts (mount option {local[0]})" if local else None
    if reason is not None:
        raise FleetError(
            f'the file system on "{mount.point}" ({mount.type}) {reason}; a home needs hard links, atomic renames and locks '
            f"(flock); use a local disk, or NFS 4, EFS, Lustre or CephFS if hosts share the home",
            code="file-system-unsuitable",
        )
    if shared and mount.type in _LOCAL:
        return f"{mount.type} on {mount.point}, a local file system: all workers must run on this host"
    return f"{mount.type} on {mount.point}"


def require_hard_links(file: Path, link: Path) -> None:
    """Check that a hard link can be made, and does not replace an existing file.

    Args:
        file: existing file.
        link: path of the link, which is removed afterwards; nothing exists there.

    Raises:
        FleetError: there are no hard links, or they replace files.
    """
    replaces = True
    try:
        os.link(file, link)
        try:
            os.link(file, link)
        except FileExistsError:
            replaces = False
        link.unlink()
    except OSError as error:
        raise FleetError(
            f'the file system of "{file.parent}" does not support hard links ({error.strerror}), which number segments '
            f"uniquely; choose another with --home, on a local disk",
            code="hard-links-missing",
        ) from None
    if replaces:
        raise FleetError(
            f'a hard link replaces an existing file in "{file.parent}"; expected an error (EEXIST), because links number '
            f"segments uniquely; choose another file system with --home",
            code="hard-links-replace",
        )


def require_renames(folder: Path) -> None:
    """Check that a rename replaces an existing file.

    Args:
        folder: empty folder for the files of the check.

    Raises:
        FleetError: the rename fails, or leaves the old name or content.
    """
    old, new = folder / "renamed", folder / "renamed.new"
    old.write_text("old")
    new.write_text("new")
    try:
        new.rename(old)
        found = "" if old.read_text() == "new" and not new.exists() else "it left the old name or content"
    except OSError as error:
        found = str(error.strerror)
    finally:
        old.unlink(missing_ok=True)
        new.unlink(missing_ok=True)
    if found:
        raise FleetError(
            f'a file in "{folder.parent}" cannot be renamed over another ({found}); expected that a rename replaces the file; '
            f"choose another file system with --home",
            code="renames-faulty",
        )


def require_locks(folder: Path) -> None:
    """Check that a lock (flock) of this process excludes another process, until it is released.

    Args:
        folder: empty folder for the file of the check.

    Raises:
        FleetError: locks are not supported, do not exclude, or are not released.
    """
    path = folder / "locked"
    path.touch()
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = _taken_by_another(path)
        released = _taken_by_another(path)
        found = "another process took a lock that this one holds" if held else "" if released else "a released lock stays held"
    except (OSError, subprocess.TimeoutExpired) as error:
        found = str(error)
    finally:
        path.unlink()
    if found:
        raise FleetError(
            f'locks (flock) do not work in "{folder.parent}" ({found}); expected a lock that excludes other processes until it '
            f"is released; mount the file system with locks (nfs: without nolock, lustre: flock), or choose another with --home",
            code="locks-faulty",
        )


def _taken_by_another(path: Path) -> bool:
    """Return whether another process gets the lock of a file.

    Raises:
        OSError: the process failed.
    """
    command = [sys.executable, "-I", "-S", "-c", _TAKE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=_PROCESS_S)
    if done.returncode not in (0, _REFUSED):
        raise OSError((done.stderr.strip().splitlines() or ["the second process failed"])[-1])
    return done.returncode == 0


def require_syncs(folder: Path) -> None:
    """Check that files and the names in a folder can be synced (fsync).

    Args:
        folder: empty folder for the file of the check.

    Raises:
        FleetError: a sync fails.
    """
    path = folder / "synced"
    try:
        atomic_write(path, "synced")
    except OSError as error:
        raise FleetError(
            f'a file or folder in "{folder.parent}" cannot be synced ({error.strerror}); expected fsync, without which a power '
            f"failure loses acknowledged messages; choose another file system with --home",
            code="syncs-faulty",
        ) from None
    finally:
        path.unlink(missing_ok=True)
