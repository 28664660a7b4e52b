"""Leases of bridges, by which landing merges the rows of several bridges in order.

Rule 1: a lease guarantees that all rows that the bridge received up to an instant are in its
segments, and that later rows have a later ``received_at``.
Rule 2: landing does not wait for a bridge whose lease has expired. It fences the bridge with a
segment that opens a gap. If the bridge finds this segment (`BridgeFencedError`), it reconnects and
continues after the fence.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fleetpulse.io.system.fsync import atomic_write

LEASE_MS: Final = 15_000


@dataclass(frozen=True, slots=True)
class Lease:
    """Lease of a bridge.

    Attributes:
        through_ms: ``received_at`` up to which all rows are in the segments, epoch milliseconds.
        beat_ms: wall-clock time of the lease, epoch milliseconds.
        sites: sites whose messages the broker keeps for the bridge, even while it is disconnected.
        stopped: whether the bridge stopped cleanly.
    """

    through_ms: int
    beat_ms: int
    sites: tuple[str, ...] = ()
    stopped: bool = False


def write_lease(folder: Path, lease: Lease) -> None:
    """Write the lease of a bridge; ignore errors, since the old lease then expires."""
    path = folder / "lease.json"
    with suppress(OSError):
        temporary = path.with_suffix(f".{os.getpid()}.tmp")  # see `segments.remove_leftovers`
        atomic_write(path, json.dumps(asdict(lease)), sync=False, temporary=temporary)


def read_lease(folder: Path) -> Lease | None:
    """Return the lease of a bridge; None if it is missing or invalid."""
    try:
        content = json.loads((folder / "lease.json").read_text())
        return Lease(int(content["through_ms"]), int(content["beat_ms"]), tuple(content["sites"]), bool(content["stopped"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def kept_sites(folders: Iterable[Path]) -> frozenset[str]:
    """Return the sites whose messages the broker keeps for other bridges."""
    leases = (read_lease(folder) for folder in folders)
    return frozenset(site for lease in leases if lease is not None for site in lease.sites)
