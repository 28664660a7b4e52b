"""What landing has taken from the bridges' segments, and what maintenance has removed, counted: running numbers in commits.

Rule 1: they are counted from the rows of segments, and stand in the very commit of what was made of these.
Rule 2: each row that was taken is a row of ``messages``, or one of ``quarantine``.
Rule 3: rows that are too old are counted in the very commit that removes them, of the table from which they go (ADR 24).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from deltalake import DeltaTable

from fleetpulse.core.tables import MESSAGES, QUARANTINE
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables

_REMOVED: Final = "removed"


@dataclass(frozen=True, slots=True)
class IngestCounters:
    """How many rows landing has taken.

    Attributes:
        taken: in all; the line after a recording's last is none.
        quarantined: how many of them went to quarantine.
    """

    taken: int
    quarantined: int

    def more(self, taken: int, quarantined: int) -> "IngestCounters":
        """Return what it comes to with so many more rows, of which so many went to quarantine."""
        return IngestCounters(self.taken + taken, self.quarantined + quarantined)

    def numbers(self) -> dict[str, int]:
        """Return it as a commit says it, see `tables.append_of`."""
        return asdict(self)


def read_counters(messages: DeltaTable) -> IngestCounters | None:
    """Return how many rows had been taken by a version of ``messages``; None where nobody has counted."""
    taken, quarantined = map(messages.transaction_version, ("taken", "quarantined"))
    return None if taken is None or quarantined is None else IngestCounters(taken, quarantined)


def removed_in(table: DeltaTable | None) -> int:
    """Return how many rows maintenance has removed from a table, by the version that is open; 0 where there is no table."""
    return 0 if table is None else table.transaction_version(_REMOVED) or 0


def removal_txn(table: DeltaTable, rows: int) -> dict[str, int]:
    """Return what a commit that removes so many rows says of it, see `commits.exchange`."""
    return {_REMOVED: removed_in(table) + rows}


def count_from_tables(home: Home, places: Mapping[str, int]) -> IngestCounters:
    """Return what the tables hold, and what was removed from them: where nobody has counted yet, counting begins with that.

    Args:
        home: the home; nobody lands rows meanwhile.
        places: by bridge, up to where ``messages`` has come. What quarantine has beyond is still to be counted.
    """
    with tables.reading(home, (MESSAGES.name, QUARANTINE.name)) as connection:
        [found] = tables.fetch(connection, "SELECT (SELECT count(*) FROM messages) AS kept, count(*) AS refused FROM quarantine")
        ahead = "SELECT count(*) AS rows FROM quarantine WHERE bridge = ? AND place >= ?"
        beyond = sum(tables.fetch(connection, ahead, place)[0]["rows"] for place in places.items())
    gone, gone_refused = (removed_in(tables.newest(home, table)) for table in (MESSAGES, QUARANTINE))
    refused = found["refused"] - beyond + gone_refused
    return IngestCounters(found["kept"] + gone + refused, refused)
