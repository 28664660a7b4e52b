"""How far amend is: up to when all that came late is done with, but for which devices.

Rule: it counts as long as the table of judgements has the number that goes with it: a table that was put back has another.
"""

import json
from dataclasses import asdict, dataclass

from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write

_FILE = "amended.json"


@dataclass(frozen=True, slots=True)
class AmendProgress:
    """How far amend is.

    Attributes:
        done_ms: ``received_at`` up to which all that came late is done with, for every device: its number in the table.
        through_ms: ``received_at`` up to which it had read bronze when it said so.
        unmet: the devices whose two histories had not met there; up to ``through_ms`` all others are done with.
    """

    done_ms: int
    through_ms: int
    unmet: tuple[str, ...]


def reached(home: Home) -> AmendProgress | None:
    """Return what is written down; None where nothing is, or nothing that can be read: the next amend says it."""
    try:
        content = json.loads((home.path / _FILE).read_text())
        return AmendProgress(int(content["done_ms"]), int(content["through_ms"]), tuple(map(str, content["unmet"])))
    except (OSError, ValueError, TypeError, LookupError):
        return None


def write_reached(home: Home, now: AmendProgress) -> None:
    """Write down how far amend is, in the place of what was written before."""
    atomic_write(home.path / _FILE, json.dumps(asdict(now)))
