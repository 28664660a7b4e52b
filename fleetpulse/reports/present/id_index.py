"""Index of the ids of devices, which finds a part of an id among a million in some milliseconds.

Rule 1: the number of an id is its position in the index, and never changes. An id that is added again has a
further number.
Rule 2: one thread adds ids while others search. A search finds at least the ids that were added before it began.
"""

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    from duckdb import DuckDBPyConnection

_END: Final = b"\xff"  # after each id: UTF-8 does not have this byte
_READ: Final = 100_000  # ids that are read at a time


class IdIndex:
    """Ids of devices in lower case, one after another in memory."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._known = np.empty(0, np.uint32), 0  # place of each id, and the end of the last one

    def add(self, connection: "DuckDBPyConnection", ids: str) -> int:
        """Append the ids that a query returns, in its order; return the number of the first one.

        Args:
            connection: connection of the query.
            ids: SQL with the column ``device_id``.
        """
        begins, end = self._known
        del self._text[end:]  # of an addition that failed
        added = [begins]
        rows = connection.sql(f"SELECT encode(lower(device_id)) || '\\xFF'::BLOB FROM ({ids})")
        for batch in rows.to_arrow_reader(_READ):
            column = batch.column(0)
            _, offsets, texts = column.buffers()
            places = np.frombuffer(offsets, np.int32)[column.offset :][: len(column) + 1]
            added.append((places[:-1] - places[0] + len(self._text)).astype(np.uint32))
            self._text += memoryview(texts)[places[0] : places[-1]]
        self._known = np.concatenate(added), len(self._text)
        return len(begins)

    def find(self, searched: str, most: int) -> "npt.NDArray[np.uint32]":
        """Return the numbers of ids that have a text, ascending.

        Args:
            searched: text in lower case.
            most: maximum number of results.
        """
        begins, end = self._known
        text, wanted = self._text, searched.encode()
        places = array("I")
        place = text.find(wanted, 0, end)
        while place >= 0 and len(places) < most:
            places.append(place)
            place = text.find(wanted, text.find(_END, place), end)
        return (np.searchsorted(begins, np.frombuffer(places, np.uint32), "right") - 1).astype(np.uint32)
