"""The state of one key group: its block with the timer that stands for it, what waits, and the name of each one's copy.

Rule: a call for a group begins with `read` and ends with `write`, unless it changes nothing; between them this is that group's.
"""

import json
from collections.abc import Iterable
from typing import Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from fleetpulse.io.lifecycle.state_cache import StateValueCache


class GroupState:
    """The state variables of a task, one key group at a time.

    Args:
        handle: Spark's door to them.
    """

    def __init__(self, handle: StatefulProcessorHandle) -> None:
        self._group = handle.getValueState("group", "block binary, timer long")
        self._waiting = handle.getMapState("waiting", "number long", "rows binary")
        self._names = handle.getValueState("digests", "known string")  # called after what a name once was
        self._copies = StateValueCache.of_worker()
        self._known: dict[str, Any] = {}

    def read(self) -> tuple[bytes, int | None] | None:
        """Return the group's block, and when its timer stands, epoch milliseconds; None before the first call for it."""
        told = self._names.get()
        self._known = json.loads(told[0]) if told else {"block": None, "chunks": {}}  # none where an older version wrote
        if self._known["block"] and (block := self._copies.find(self._known["block"])) is not None:
            return block, self._known["timer"]
        stored = self._group.get()
        return (stored[0], stored[1]) if stored else None

    def chunk(self, number: int) -> bytes:
        """Return a chunk of what waits."""
        name = self._known["chunks"].get(str(number))
        if name and (rows := self._copies.find(name)) is not None:
            return rows
        found = self._waiting.getValue((number,))
        assert found is not None, f"chunk {number} is kept until it is judged"
        return found[0]

    def write(self, block: bytes, timer_ms: int | None, chunks: Iterable[tuple[int, bytes]], gone: Iterable[int]) -> None:
        """Keep the group.

        Args:
            block: its stored form.
            timer_ms: when its timer stands, epoch milliseconds; None without one.
            chunks: new ones, by number.
            gone: numbers of those that are no longer needed.
        """
        names: dict[str, str] = self._known["chunks"]
        for number, rows in chunks:
            self._waiting.updateValue((number,), (rows,))
            names[str(number)] = self._copies.keep(rows)
        for number in gone:
            self._waiting.removeKey((number,))
            if name := names.pop(str(number), None):
                self._copies.drop(name)
        if self._known["block"]:
            self._copies.drop(self._known["block"])
        self._group.update((block, timer_ms))
        self._known = {"block": self._copies.keep(block), "timer": timer_ms, "chunks": names}
        self._names.update((json.dumps(self._known),))
