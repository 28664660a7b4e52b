"""Comparison of the contenders' transitions, row by row: all must be equal.

Rule: compared are device, number, modes, trigger, event time and runtime, up to the least frontier
of all contenders. Order and time of writing do not count.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import duckdb
from deltalake import DeltaTable

from bench.lifecycle.contenders import OURS, split_name
from fleetpulse.io.delta.log import holds_table

COLUMNS: Final = ("device_id", "transition_no", "from_mode", "to_mode", "trigger", "event_time_ms", "runtime_ms")
NEEDED: Final = frozenset({"signal", "silence", "errors"})  # a comparison without one of these had too small an input
_SHOWN: Final = 5


def difference(results: Mapping[str, Path], judged_to_ms: int) -> str | None:
    """Describe how the first contender and the others differ; None if all are equal.

    Args:
        results: sink of each contender, a Delta table or a folder of JSON lines.
        judged_to_ms: last event time to compare, epoch milliseconds.
    """
    lines: list[str] = []
    with duckdb.connect() as connection:
        for number, (name, out) in enumerate(results.items()):
            _load(connection, f"r{number}", name, out, judged_to_ms)
        first, *others = results
        if not _count(connection, "r0"):
            lines.append(f"{first} has no transition: nothing was compared")
        for number, name in enumerate(others, 1):
            table = f"r{number}"
            alone = _rows(connection, f"FROM r0 EXCEPT ALL FROM {table}")
            added = _rows(connection, f"FROM {table} EXCEPT ALL FROM r0")
            if alone or added:
                lines.append(f"{first} has {_count(connection, 'r0')} rows, {name} {_count(connection, table)}")
                lines += [f"  only {first}: {row}" for row in alone] + [f"  only {name}: {row}" for row in added]
    return "\n".join([f"columns: {', '.join(COLUMNS)}", *lines]) if lines else None


def triggers(name: str, out: Path, judged_to_ms: int) -> set[str]:
    """Return the triggers of a contender's transitions."""
    with duckdb.connect() as connection:
        _load(connection, "r0", name, out, judged_to_ms)
        return {str(row[0]) for row in connection.execute('SELECT DISTINCT "trigger" FROM r0').fetchall()}


def _load(connection: duckdb.DuckDBPyConnection, table: str, name: str, out: Path, judged_to_ms: int) -> None:
    if holds_table(out):
        connection.register("found", DeltaTable(str(out)).to_pyarrow_dataset())
        found = "found"
    else:
        kinds = ", ".join(f"{column}: '{'BIGINT' if column.endswith(('_ms', '_no')) else 'VARCHAR'}'" for column in COLUMNS)
        found = f"read_json('{out}/**/*.json', format = 'newline_delimited', columns = {{{kinds}}})"
    if split_name(name)[0] == OURS:
        found = f"(SELECT *, epoch_ms(event_time) AS event_time_ms FROM {found} WHERE kind = 'transition')"
    columns = ", ".join(f'"{column}"' for column in COLUMNS)
    connection.execute(f"CREATE TABLE {table} AS SELECT {columns} FROM {found} WHERE event_time_ms <= {judged_to_ms}")


def _count(connection: duckdb.DuckDBPyConnection, table: str) -> int:
    return connection.execute(f"SELECT count(*) FROM {table}").fetchall()[0][0]


def _rows(connection: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[object, ...]]:
    return connection.execute(f"FROM ({sql}) ORDER BY ALL LIMIT {_SHOWN}").fetchall()
