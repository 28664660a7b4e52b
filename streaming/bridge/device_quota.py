"""Quota of new devices: a client that may publish for many ids cannot create devices without limit.

Rule 1: a device is new if the bridge has never heard it, and no operator has registered it.
`BridgeSequencer` caches the topics of known devices, so they are seldom looked up.
Rule 2: a device is stored on disk before its first message. A crash in between costs one device of
the quota.
"""

import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fleetpulse.core.presence.identities import DeviceIdentity, device_of
from fleetpulse.core.rows import hash64
from fleetpulse.core.times import HOUR_MS
from fleetpulse.io.system.fsync import atomic_write, sync_folder

FILE: Final = "known-devices"  # in the folder of the bridge's segments: 8 bytes for each device
_HASH_BYTES: Final = 8


class DeviceQuota:
    """Token bucket of new devices, and the devices that are known.

    Topics of other formats name no device before they are decoded; they are not limited.

    Args:
        per_hour: number of new devices per hour, and size of the bucket; 0 for no limit.
        path: file of the known devices; None to remember them in memory only.
        identity: identity scheme of devices.
    """

    def __init__(self, per_hour: int = 0, path: Path | None = None, identity: DeviceIdentity = DeviceIdentity.ID) -> None:
        self.limits = per_hour > 0
        self._per_hour, self._path, self._identity = per_hour, path, identity
        self._left, self._at_ms = float(per_hour), -1
        known = _read(path) if path is not None and self.limits else array("q")
        self._known, self._saved = set(known), len(known)
        self._unsaved = array("q")

    def knows(self, topic: str) -> bool:
        """Return whether the device of a topic is known; True also if the quota does not apply to the topic."""
        return self._new(topic) is None

    def admits(self, topic: str, now_ms: int) -> bool:
        """Return whether the device of a topic is known or within the quota; remember a new device.

        Args:
            topic: topic of a message.
            now_ms: wall clock time; a step backwards adds nothing.
        """
        number = self._new(topic)
        if number is None:
            return True
        if now_ms > self._at_ms >= 0:
            self._left = min(self._per_hour, self._left + (now_ms - self._at_ms) * self._per_hour / HOUR_MS)
        self._at_ms = now_ms
        if self._left < 1:
            return False
        self._left -= 1
        self._remember(number)
        return True

    def learn(self, topic: str) -> None:
        """Remember the device of a topic from an operator or a recording, regardless of the quota."""
        number = self._new(topic)
        if number is not None:
            self._remember(number)

    def _new(self, topic: str) -> int | None:
        """Return `hash64` of the device of a topic; None if the topic belongs to no new device."""
        device = device_of(topic, self._identity) if self.limits and topic.startswith("fleet/") else None
        number = None if device is None else hash64(device)
        return None if number in self._known else number

    def _remember(self, number: int) -> None:
        self._known.add(number)
        self._unsaved.append(number)

    def save(self) -> None:
        """Append the new devices to the file durably.

        Raises:
            OSError: the disk cannot be written; the next call writes them again.
        """
        if not self._unsaved or self._path is None:
            return
        is_new = not self._path.exists()
        with os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
            file.seek(self._saved * _HASH_BYTES)
            file.write(self._unsaved.tobytes())
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(self._path.parent)
        self._saved += len(self._unsaved)
        self._unsaved = array("q")


def write_known(path: Path, hashes: Iterable[int]) -> None:
    """Write the file of known devices anew.

    Args:
        path: path of the file.
        hashes: `hash64` of the id of each device, as in bronze.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, array("q", hashes).tobytes())


def _read(path: Path) -> "array[int]":
    """Return the hashes in a file, without an incomplete one at its end."""
    known = array("q")
    content = path.read_bytes() if path.exists() else b""
    known.frombytes(content[: len(content) // _HASH_BYTES * _HASH_BYTES])
    return known
