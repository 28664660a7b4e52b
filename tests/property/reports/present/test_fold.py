"""Kept facts of the devices: folding new rows into them gives the same as the definition over all rows."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from duckdb import DuckDBPyConnection
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetpulse.core.replay import Deployment, outcome
from fleetpulse.core.rows import Row, hash64
from fleetpulse.core.tables import DEVICES, JUDGEMENTS, MESSAGES, Table
from fleetpulse.io.tables import tables as delta
from fleetpulse.reports.present import fold
from fleetpulse.reports.present.fold import KEPT
from fleetpulse.reports.present.parts import Limits, heard_sql, judged_sql, listed_sql, through
from tests.support.floors import Floor
from tests.support.form import examples
from tests.support.histories.emitted import Emitted
from tests.support.histories.histories import registry_entries
from tests.support.histories.strategies import DEPLOYMENTS, histories

CUTS = st.lists(st.integers(0, 60), min_size=1, max_size=3)
READ_ANEW, FOLDED = Floor(5), Floor(10)


class _Tables:
    """Tables of a fleet in DuckDB, and the facts kept from them.

    Attributes:
        connection: connection with the tables.
    """

    def __init__(self, connection: DuckDBPyConnection) -> None:
        self.connection = connection
        self._judgements: list[dict[str, Any]] = []
        self._kept_ms, self._kept_frontier_ms = -1, through(None)
        self._newest_ms = 0
        self._rows: Sequence[Row] = []
        self.create("judgements", JUDGEMENTS, [])
        delta.open_views_in(connection)

    def create(self, name: str, table: Table, content: Sequence[dict[str, Any]]) -> None:
        held = delta.to_table(table, content)
        self.connection.register("held", held)
        self.connection.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM held")
        self.connection.unregister("held")

    def land(self, rows: Sequence[Row], begin: int, new: Sequence[dict[str, Any]]) -> None:
        """Land rows, of which those from a place on are new, and their judgements."""
        waiting = [one for one in self._judgements if one["kind"] == "late" and (one["received_at_ms"] or 0) > self._kept_ms]
        self._judgements += new
        self._rows = rows
        self.create("judgements", JUDGEMENTS, self._judgements)
        self.create("devices", DEVICES, registry_entries(rows))
        self._messages("messages", rows)
        self.create("new_judgements", JUDGEMENTS, [*waiting, *new])
        self.create("new_devices", DEVICES, registry_entries(rows[begin:]))
        self._messages("new_messages", [one for one in rows if one.received_at_ms > self._kept_ms])

    def _messages(self, name: str, rows: Sequence[Row]) -> None:
        arrival = {"origin": "mqtt", "bridge": "b", "segment": 1}
        self.create(name, MESSAGES, [{**asdict(one), "device_hash": hash64(one.device_id), **arrival} for one in rows])

    def define(self, limits: Limits, messages: str = "messages") -> str:
        """Create the table of the facts by the definition; return its name."""
        judged, values = judged_sql(limits)
        facts = fold.joined(judged, heard_sql(limits, messages))
        self.connection.execute(f"CREATE OR REPLACE TABLE defined AS {facts}", values)
        return "defined"

    def fold(self, limits: Limits) -> str:
        """Create the table of the kept facts with the new rows; return its name."""
        if fold.prepare(self.connection, self._kept_frontier_ms, limits):
            fold.read_anew(self.connection, limits)
        self.connection.execute(f"CREATE OR REPLACE TABLE folded AS {fold.joined(fold.judged(), fold.heard(limits))}")
        return "folded"

    def keep(self, limits: Limits, *, first: bool) -> None:
        """Keep the facts; more rows of the newest instant may land, so signals of that instant are not included."""
        newest_ms = self._rows[-1].received_at_ms
        self._messages("new_messages", [one for one in self._rows if self._kept_ms < one.received_at_ms < newest_ms])
        name = self.define(limits, "new_messages") if first else self.fold(limits)
        self.connection.execute(f"CREATE OR REPLACE TABLE kept AS FROM {name}")
        self._kept_ms, self._kept_frontier_ms = newest_ms - 1, limits.frontier_ms

    def result(self, sql: str) -> list[tuple[Any, ...]]:
        return sorted(self.connection.execute(sql).fetchall(), key=repr)


@READ_ANEW.over_all_examples
@FOLDED.over_all_examples
@settings(max_examples=examples(25))
@given(histories(), CUTS, DEPLOYMENTS, st.data())
def test_folded_facts_equal_the_definition(
    rows: list[Row], drawn_cuts: list[int], deployment: Deployment, data: st.DataObject
) -> None:
    cuts = sorted({len(rows), *(1 + cut % len(rows) for cut in drawn_cuts)})
    emitted = Emitted(rows, deployment)
    columns = ", ".join(f'"{name}"' for name in KEPT)
    with delta.connect() as connection:
        tables = _Tables(connection)
        for begin, cut in pairwise([0, *cuts]):
            tables.land(rows[:cut], begin, emitted.batch(cut, amending=data.draw(st.booleans())))
            reached = outcome(rows[:cut], deployment)
            frontier_ms = through(reached.shards.frontier_ms if reached.shards else None)
            limits = Limits(frontier_ms, deployment.max_clock_lead_ms, deployment.max_backlog_ms)
            if begin:
                folded, defined = tables.fold(limits), tables.define(limits)
                assert tables.result(f"SELECT {columns} FROM {folded}") == tables.result(f"SELECT {columns} FROM {defined}")
                assert tables.result(listed_sql(limits, folded)) == tables.result(listed_sql(limits, defined))
                anew = len(tables.result(f"FROM folded SEMI JOIN {fold.REREAD} USING (device_id)"))
                READ_ANEW.met(anew)
                FOLDED.met(len(tables.result("FROM folded")) - anew)
            tables.keep(limits, first=not begin)
