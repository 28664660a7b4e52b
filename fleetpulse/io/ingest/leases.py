"""Leases: what each of several bridges says of itself, so that their rows can be put in one order.

Rule 1: a bridge promises: whatever it received up to an instant is in its segments, and what comes is later.
Rule 2: who says nothing for the time of a lease is not waited for: a gap of its is opened in its own segments, and whoever
finds that segment in its way (`SegmentTakenError`) begins anew where it stands.
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
    """What a bridge last said.

    Attributes:
        through_ms: whatever it received up to then is in its segments.
        beat_ms: when it said so, on the wall.
        sites: whose messages the broker keeps for it, also while it is away.
        stopped: whether it ended in order.
    """

    through_ms: int
    beat_ms: int
    sites: tuple[str, ...] = ()
    stopped: bool = False


def write_lease(folder: Path, lease: Lease) -> None:
    """Write a bridge's lease; one that cannot be written is left out: it runs out, and that is what it is for."""
    path = folder / "lease.json"
    with suppress(OSError):
        aside = path.with_suffix(f".{os.getpid()}.tmp")  # see `segments.remove_leftovers`
        atomic_write(path, json.dumps(asdict(lease)), sync=False, aside=aside)


def read_lease(folder: Path) -> Lease | None:
    """Return a bridge's lease; None where there is none."""
    try:
        said = json.loads((folder / "lease.json").read_text())
        return Lease(int(said["through_ms"]), int(said["beat_ms"]), tuple(said["sites"]), bool(said["stopped"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def kept_sites(folders: Iterable[Path]) -> frozenset[str]:
    """Return the sites whose messages the broker keeps for other bridges."""
    leases = (read_lease(folder) for folder in folders)
    return frozenset(site for lease in leases if lease is not None for site in lease.sites)
