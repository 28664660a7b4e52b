"""Appends of micro-batches to a Delta table, once each.

Rule: the commit of a batch carries the id of its query and its number (Delta's ``txn``). A query that repeats a batch
after a crash finds its number in the table.
"""

from collections.abc import Sequence
from pathlib import Path

from fleetpulse.io.checkpoints.checkpoint import query_id
from fleetpulse.io.delta.appender import Appender
from fleetpulse.io.delta.commits import Added
from fleetpulse.io.delta.corruption import open_table


class BatchAppender:
    """Appender of the batches of one query.

    Args:
        folder: folder of the table, which exists.
        checkpoint: checkpoint of the query, which has an id before its first batch.
    """

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self._appender: Appender | None = None
        self._query = ""
        self._through = -1  # newest batch in the table

    def has(self, batch_id: int) -> bool:
        """Return whether the table has a batch, or a later one."""
        if self._appender is None:
            self._open()
        return batch_id <= self._through

    def commit(self, added: Sequence[Added], batch_id: int) -> None:
        """Commit the files of a batch that the table does not have.

        Raises:
            FleetError: see `Appender.commit`.
            OSError: see `Appender.commit`.
        """
        appender = self._appender or self._open()
        try:
            appender.commit(added, {self._query: batch_id})
        except BaseException:
            self._appender = None  # the next call reads the newest batch from the table again
            raise
        self._through = batch_id

    def _open(self) -> Appender:
        query = query_id(self._checkpoint)
        assert query is not None, "a query has an id before its first batch"
        appender = Appender(self._folder)
        known = open_table(self._folder).transaction_version(query)
        self._query, self._through, self._appender = query, -1 if known is None else known, appender
        return appender
