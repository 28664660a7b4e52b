"""Numbers of devices by the columns of filters, beside the facts in memory: the table ``live.counted``.

A row has a value of each of the columns `COUNTED`, and ``n``. Several rows may have the same values: their numbers add
up, also to 0.

Rule 1: the numbers are those of ``live.devices``, in the same transaction.
Rule 2: a refresh appends differences. Rows with the same values are joined when the table has become twice as long.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

COUNTED: Final = ("mode", "site", "device_class", "gateway", "trigger", "clock", "never_seen")
_NAMES: Final = ", ".join(f'"{name}"' for name in COUNTED)
_SUM: Final = f"SELECT {_NAMES}, sum(n)::BIGINT AS n FROM {{rows}} GROUP BY ALL HAVING sum(n) != 0"
_FEW: Final = 20_000  # rows below which none are joined


class Tally:
    """The table ``live.counted`` of a connection.

    Args:
        connection: connection with the table ``live.devices``.
    """

    def __init__(self, connection: "DuckDBPyConnection") -> None:
        self._connection = connection
        connection.execute(f"CREATE TABLE live.counted AS SELECT {_NAMES}, count(*) AS n FROM live.devices GROUP BY ALL")
        self._joined = self._rows()

    def replace(self, before: str, after: str) -> None:
        """Subtract devices, and add others.

        Args:
            before: table of the devices to subtract, with the columns `COUNTED`.
            after: table of the devices to add.
        """
        both = f"(SELECT {_NAMES}, -1 AS n FROM {before} UNION ALL SELECT {_NAMES}, 1 FROM {after})"
        self._connection.execute(f"INSERT INTO live.counted {_SUM.format(rows=both)}")
        if self._rows() > max(_FEW, 2 * self._joined):
            self._connection.execute(f"CREATE OR REPLACE TEMP TABLE joined AS {_SUM.format(rows='live.counted')}")
            self._connection.execute("DELETE FROM live.counted")
            self._connection.execute("INSERT INTO live.counted FROM joined")
            self._joined = self._rows()

    def _rows(self) -> int:
        [(count,)] = self._connection.execute("SELECT count(*) FROM live.counted").fetchall()
        return count
