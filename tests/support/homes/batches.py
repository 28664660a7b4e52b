"""Homes in which a history lands and is judged batch by batch, with amendments and a registry."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Kind, Row, hash64
from fleetpulse.core.tables import COVERAGE, DEVICES, JUDGEMENTS, MESSAGES, QUARANTINE, Table
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.frontiers import judged_frontier_ms
from tests.support.histories.emitted import Emitted
from tests.support.histories.histories import registry_entries
from tests.support.homes.homes import commit_batch


class BatchedHome:
    """Home whose rows land, and are judged by the definition, a batch at a time.

    Args:
        path: folder of the home.
        rows: rows in the order of ``received_at``.
        deployment: lateness, clock lead and jitter.
    """

    def __init__(self, path: Path, rows: Sequence[Row], deployment: Deployment) -> None:
        self.home = Home(path)
        self.home.prepare(deployment)
        for table in (MESSAGES, JUDGEMENTS, DEVICES, QUARANTINE, COVERAGE):
            tables.create(self.home, table)
        self._rows = rows
        self._emitted = Emitted(rows, deployment)
        self._landed = self._number = 0

    @property
    def frontier_ms(self) -> int | None:
        """Event time up to which the rows have been judged, epoch milliseconds."""
        return judged_frontier_ms(self.home)

    def land(self, cut: int, *, amending: bool = False, parts: int = 1, between: Callable[[], Any] = lambda: None) -> None:
        """Land the rows up to a place, and judge them.

        Args:
            cut: number of rows that have landed afterwards.
            amending: whether late messages are amended.
            parts: number of commits of the judgements.
            between: function that is called before each of them.
        """
        new = self._rows[self._landed : cut]
        arrival = {"origin": "mqtt", "bridge": "b", "segment": 1}
        self.append(MESSAGES, [{**asdict(one), "device_hash": hash64(one.device_id), **arrival} for one in new])
        gaps = [{"received_at_ms": one.received_at_ms, "op": "open", "bridge": "b"} for one in new if one.kind is Kind.GAP]
        self.append(COVERAGE, gaps)
        self.append(DEVICES, registry_entries(new))
        judged = self._emitted.batch(cut, amending=amending)
        for part in range(parts):
            between()
            self.append(JUDGEMENTS, judged[part::parts])
        self._landed = cut
        commit_batch(self.home.checkpoint, self._number, self._rows[cut - 1].received_at_ms)

    def append(self, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows to a table; without any, nothing is committed."""
        self._number += 1
        if rows:
            tables.append(self.home, table, tables.to_table(table, rows), "test", self._number)

    def compact(self) -> None:
        """Join the files of the judgements, and delete the replaced ones."""
        opened = DeltaTable(str(self.home.table(JUDGEMENTS.name)))
        opened.optimize.compact()
        opened.vacuum(0, dry_run=False, enforce_retention_duration=False)
