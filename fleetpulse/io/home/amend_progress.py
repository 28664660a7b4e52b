"""Progress of ``./fleet amend``: instant up to which late messages are processed.

Rule: the progress is valid only while ``judgements`` has the same number in its commits. A restored
table has another number.
"""

import json
from dataclasses import asdict, dataclass

from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write

_FILE = "amended.json"


@dataclass(frozen=True, slots=True)
class AmendProgress:
    """Progress of amend over the late messages of a home.

    Attributes:
        done_ms: ``received_at`` up to which late messages are processed for all devices, epoch
            milliseconds; also the number in the commits of ``judgements``.
        through_ms: ``received_at`` up to which bronze was read, epoch milliseconds.
        unmet: devices whose judged and amended history still differed at ``through_ms``. All other
            devices are processed up to ``through_ms``.
    """

    done_ms: int
    through_ms: int
    unmet: tuple[str, ...]


def read_amend_progress(home: Home) -> AmendProgress | None:
    """Read the progress of amend; None if the file is missing or unreadable.

    An unreadable file is not an error: the next amend replaces it.
    """
    try:
        content = json.loads((home.path / _FILE).read_text())
        return AmendProgress(int(content["done_ms"]), int(content["through_ms"]), tuple(map(str, content["unmet"])))
    except (OSError, ValueError, TypeError, LookupError):
        return None


def write_amend_progress(home: Home, now: AmendProgress) -> None:
    """Write the progress of amend, replacing the previous one."""
    atomic_write(home.path / _FILE, json.dumps(asdict(now)))
