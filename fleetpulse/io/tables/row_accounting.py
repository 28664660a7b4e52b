"""Running counters of landed and removed rows, stored in Delta commits.

Rule 1: landing counts the rows of segments, and stores the counters in the commit of these rows.
Rule 2: each row that landing reads becomes a row of ``messages`` or of ``quarantine``.
Rule 3: maintenance counts expired rows in the commit that removes them, for each table (ADR 24).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from deltalake import DeltaTable

from fleetpulse.core.tables import MESSAGES, QUARANTINE
from fleetpulse.io.delta.compacted import remainder_end
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables

_REMOVED: Final = "removed"


@dataclass(frozen=True, slots=True)
class IngestCounters:
    """Number of rows that landing has read from segments since the home was created.

    Attributes:
        taken: number of all rows. The marker after the last line of a recording does not count.
        quarantined: number of those rows that were written to ``quarantine``.
    """

    taken: int
    quarantined: int

    def more(self, taken: int, quarantined: int) -> "IngestCounters":
        """Return the counters increased by rows taken and by rows quarantined."""
        return IngestCounters(self.taken + taken, self.quarantined + quarantined)

    def numbers(self) -> dict[str, int]:
        """Return the counters as numbers of a commit, see `tables.append_of`."""
        return asdict(self)


def read_counters(messages: DeltaTable) -> IngestCounters | None:
    """Return the counters in a version of ``messages``; None if it has none."""
    taken, quarantined = map(messages.transaction_version, ("taken", "quarantined"))
    return None if taken is None or quarantined is None else IngestCounters(taken, quarantined)


def landed_before(log: DeltaLog, version: int) -> int | None:
    """Return the number of rows that had landed in ``messages`` before a version; None if its log has no counters."""
    for one in range(version - 1, -1, -1):
        if log.digest(one) is None:
            return None
        numbers = {action["txn"]["appId"]: action["txn"]["version"] for action in log.actions(one) if "txn" in action}
        if {"taken", "quarantined"} <= numbers.keys():
            return int(numbers["taken"]) - int(numbers["quarantined"])
    return None


def landed_before_oldest(messages: DeltaTable | None) -> int | None:
    """Return the number of rows that had landed before the oldest version of ``messages`` that can be read.

    Rows of earlier versions were removed, or are in the remainder file.

    Args:
        messages: newest version of the table; None if it does not exist, which returns None.
    """
    counted = None if messages is None else read_counters(messages)
    if messages is None or counted is None:
        return None
    files = messages.get_add_actions()
    names, counts = files["path"].to_pylist(), files["num_records"].to_pylist()
    readable = sum(count for name, count in zip(names, counts, strict=True) if remainder_end(str(name)) is None)
    return counted.taken - counted.quarantined - readable


def removed_in(table: DeltaTable | None) -> int:
    """Return the number of rows that maintenance removed, as of an opened version.

    Args:
        table: opened version of the table; None if the table does not exist, which returns 0.
    """
    return 0 if table is None else table.transaction_version(_REMOVED) or 0


def removal_txn(table: DeltaTable, rows: int) -> dict[str, int]:
    """Return the numbers of a commit that removes rows, see `commits.replace_files`."""
    return {_REMOVED: removed_in(table) + rows}


def count_from_tables(home: Home, places: Mapping[str, int]) -> IngestCounters:
    """Compute initial counters from the tables, for a home whose commits have none.

    Args:
        home: home of the tables; no landing may run at the same time.
        places: place after the last row in ``messages``, by bridge, see `merge.place`. Rows of
            ``quarantine`` from that place on are not included: landing counts them later.
    """
    with tables.reading(home, (MESSAGES.name, QUARANTINE.name)) as connection:
        [found] = tables.fetch(connection, "SELECT (SELECT count(*) FROM messages) AS kept, count(*) AS refused FROM quarantine")
        ahead = "SELECT count(*) AS rows FROM quarantine WHERE bridge = ? AND place >= ?"
        beyond = sum(tables.fetch(connection, ahead, place)[0]["rows"] for place in places.items())
    removed, removed_refused = (removed_in(tables.newest(home, table)) for table in (MESSAGES, QUARANTINE))
    refused = found["refused"] - beyond + removed_refused
    return IngestCounters(found["kept"] + removed + refused, refused)
