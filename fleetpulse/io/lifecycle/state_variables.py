"""State variables of one key group: block, timer, pending rows, names of copies.

Rule: a call for a group starts with `read` and ends with `write`, unless it changes nothing.
Between the two, the `GroupState` belongs to that group.
"""

import json
from collections.abc import Iterable
from typing import Any

from pyspark.sql.streaming.stateful_processor import MapState, StatefulProcessorHandle, ValueState
from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorHandleState

from fleetpulse.io.lifecycle.state_cache import StateValueCache


def only_declares(handle: StatefulProcessorHandle) -> bool:
    """Return whether Spark only reads the declarations of the state variables.

    Spark starts a Python process for it before the first batch of a query. The process calls ``init`` and ``close``
    of the processor, and needs no compiled code.
    """
    client: Any = getattr(handle, "_statefulProcessorApiClient", None)  # none for a handle of PySpark's tester
    return client is not None and client.handle_state is StatefulProcessorHandleState.PRE_INIT


def declare(handle: StatefulProcessorHandle) -> tuple[ValueState, MapState, ValueState]:
    """Declare the state variables of a key group: its block with its timer, its pending rows, and the names of copies."""
    return (
        handle.getValueState("group", "block binary, timer long"),
        handle.getMapState("waiting", "number long", "rows binary"),
        handle.getValueState("digests", "known string"),  # the name dates from when names were digests
    )


class GroupState:
    """State variables of a task, for one key group at a time.

    Args:
        handle: Spark's handle of the state variables.
    """

    def __init__(self, handle: StatefulProcessorHandle) -> None:
        self._group, self._waiting, self._names = declare(handle)
        self._copies = StateValueCache.of_worker()
        self._known: dict[str, Any] = {}

    def read(self) -> tuple[bytes, int | None] | None:
        """Return the block and its timer in epoch milliseconds; None without stored state."""
        names = self._names.get()
        self._known = json.loads(names[0]) if names else {"block": None, "chunks": {}}  # older releases store none
        if self._known["block"] and (block := self._copies.find(self._known["block"])) is not None:
            return block, self._known["timer"]
        stored = self._group.get()
        return (stored[0], stored[1]) if stored else None

    def chunk(self, number: int) -> bytes:
        """Return a chunk of pending rows by its number."""
        name = self._known["chunks"].get(str(number))
        if name and (rows := self._copies.find(name)) is not None:
            return rows
        found = self._waiting.getValue((number,))
        assert found is not None, f"chunk {number} of pending rows is missing"
        return found[0]

    def write(self, block: bytes, timer_ms: int | None, chunks: Iterable[tuple[int, bytes]], deleted: Iterable[int]) -> None:
        """Store the group.

        Args:
            block: stored form of the group.
            timer_ms: time of the registered timer, epoch milliseconds; None without a timer.
            chunks: new chunks of pending rows, by number.
            deleted: numbers of the chunks to delete.
        """
        names: dict[str, str] = self._known["chunks"]
        for number, rows in chunks:
            self._waiting.updateValue((number,), (rows,))
            names[str(number)] = self._copies.keep(rows)
        for number in deleted:
            self._waiting.removeKey((number,))
            if name := names.pop(str(number), None):
                self._copies.drop(name)
        if self._known["block"]:
            self._copies.drop(self._known["block"])
        self._group.update((block, timer_ms))
        self._known = {"block": self._copies.keep(block), "timer": timer_ms, "chunks": names}
        self._names.update((json.dumps(self._known),))
