"""Index of the ids of devices, which finds the ids with a text among a million in 10 to 30 milliseconds.

Rule 1: the number of an id is its position in the index, and never changes. An id that is added again has a
further number.
Rule 2: one thread adds ids while others search. A search finds at least the ids that were added before it began.
"""

from array import array
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from fleetpulse.columnar.compute import pc

if TYPE_CHECKING:
    import numpy.typing as npt
    from duckdb import DuckDBPyConnection

    Numbers = npt.NDArray[np.uint32]

_END: Final = b"\xff"  # after each id: UTF-8 does not have this byte
_FEW: Final = 60_000  # ids that are found one by one: a million others are found at once in the same time
_SAMPLE: Final = 1_000  # ids after which the number of all is estimated
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

    def find(self, searched: str) -> "Numbers":
        """Return the numbers of the ids that have a text, ascending.

        Args:
            searched: text in lower case, as DuckDB writes it.
        """
        begins, end = self._known
        text, wanted = self._text, searched.encode()
        places = array("I")
        place = text.find(wanted, 0, end)
        while place >= 0:
            if len(places) >= _FEW or (len(places) == _SAMPLE and _SAMPLE * end > _FEW * place):
                return _find_at_once(text[:end], begins, wanted)
            places.append(place)
            place = text.find(wanted, text.find(_END, place), end)
        return (np.searchsorted(begins, np.frombuffer(places, np.uint32), "right") - 1).astype(np.uint32)


def _find_at_once(text: bytearray, begins: "Numbers", wanted: bytes) -> "Numbers":
    """Do as `IdIndex.find`, with a copy of the text: a buffer of the text itself would hinder an addition."""
    offsets = np.append(begins, len(text)).astype(np.int64)
    ids = pa.Array.from_buffers(pa.large_binary(), len(begins), [None, pa.py_buffer(offsets), pa.py_buffer(text)])
    return np.flatnonzero(pc.match_substring(ids, wanted).to_numpy(zero_copy_only=False)).astype(np.uint32)


def those_in(found: "Numbers", numbers: "Numbers") -> "Numbers":
    """Return the numbers found that are among others; both are without repetition, and the first ones ascend."""
    is_one = np.zeros(max(found.max(initial=0), numbers.max(initial=0)) + 1, bool)
    is_one[numbers] = True
    return found[is_one[found]]
