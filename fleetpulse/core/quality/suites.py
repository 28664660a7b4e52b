"""Data-quality suites: expectations on SQL queries, and suites of tables.

Rule 1: expectations on keys, required columns and known values are derived from `core.tables` and
the enums; nothing is declared twice.
Rule 2: a domain rule is a boolean column of the query, null for rows that it does not apply to. The
evaluating engine has no domain rules.
Rule 3: DuckDB and Spark run the same SQL. Instants are compared, or converted by ``unix_millis``.

Source: ADR 16.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.rows import REASONS, Clock, GatewayEvent, Kind, Origin, Trust
from fleetpulse.core.streams.commands import CommandStatus
from fleetpulse.core.streams.sessions import EndedBy, StartedBy
from fleetpulse.core.streams.tables import COMMANDS, SESSIONS, VITALS
from fleetpulse.core.tables import (
    COVERAGE,
    DEVICE_SNAPSHOTS,
    DEVICES,
    GATEWAYS,
    JUDGEMENTS,
    MESSAGES,
    QUARANTINE,
    STREAM_HEALTH,
    Table,
)


class Severity(StrEnum):
    """Severity of an expectation: consequence of rows that fail it."""

    CRITICAL = "critical"  # a gate fails: nothing may be built on the rows
    WARNING = "warning"  # the rows are reported only


class Form(StrEnum):
    """Method of evaluating an expectation."""

    PRESENT = "present"  # the column has a value
    ONE_OF = "one of"  # the value of the column is one of the words, or null
    HOLDS = "holds"  # the column is true, or null if the rule does not apply


@dataclass(frozen=True, slots=True)
class Expectation:
    """Expectation on each row of a suite.

    Attributes:
        name: key of the expectation in results and failures.
        form: method of evaluation.
        column: evaluated column of the suite's rows.
        meaning: description for people.
        severity: consequence of rows that fail.
        allowed_values: allowed values, for `Form.ONE_OF`.
    """

    name: str
    form: Form
    column: str
    meaning: str
    severity: Severity = Severity.CRITICAL
    allowed_values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Suite:
    """Expectations on the same rows.

    Attributes:
        name: key of the suite.
        about: table that is faulty if the suite fails.
        meaning: description of the rows.
        reads: tables that the query reads; those in `DERIVED_TABLES` are derived for the suites.
        rows: SQL query that selects the rows.
        key: columns that identify a row.
        expectations: expectations on the rows.
        shown: further columns to report for a row that fails.
        needs_replay: whether the suite needs bronze to be judged again, from its first row or from a
            snapshot, see ``batch/quality/rejudge.py``.
    """

    name: str
    about: str
    meaning: str
    reads: tuple[str, ...]
    rows: str
    key: tuple[str, ...]
    expectations: tuple[Expectation, ...]
    shown: tuple[str, ...] = ()
    needs_replay: bool = False


DERIVED_TABLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "job": "one row: position of the lifecycle job",
        "shards": "frontier of each site that a gap row names",
        "roaming": "devices with messages from sites of several shards",
        "landing_counts": "one row: number of rows that landing has read from the bridges' segments, number of those in "
        "quarantine, and number of rows that maintenance has removed from each table",
        "declared_columns": "declared columns, with the stored type",
        "expected_judgements": "judgements that follow from bronze when it is judged again",
        "deadlines": "deadline at which each silent device had to be offline",
        "state": "rows of a snapshot, or of the state of a generation",
        "checked": "one row: position of that state",
        "pending": "judgements of that state that are not emitted yet",
        "next_deadlines": "next deadline of each device of that state, and covered time at the start of its silence, by the "
        "gaps in bronze",
        "reserved_rows": "pending rows of that state from the registry and operators, and for all key groups",
        "expected_devices": "devices that follow from bronze when it is judged again up to that position",
    }
)
_WORDS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = MappingProxyType(
    {
        (MESSAGES.name, "kind"): tuple(Kind),
        (MESSAGES.name, "clock"): tuple(Clock),
        (DEVICE_SNAPSHOTS.name, "clock"): tuple(Trust),
        (MESSAGES.name, "origin"): tuple(Origin),
        (QUARANTINE.name, "origin"): tuple(Origin),
        (QUARANTINE.name, "reason"): REASONS,
        (MESSAGES.name, "gateway_event"): tuple(GatewayEvent),
        (GATEWAYS.name, "event"): (*GatewayEvent, "session"),
        (COVERAGE.name, "op"): ("open", "close"),
        (COVERAGE.name, "why"): ("start", "broker", "network", "disk", "bridge"),
        (JUDGEMENTS.name, "kind"): tuple(JudgementKind),
        (JUDGEMENTS.name, "from_mode"): tuple(Mode),
        (JUDGEMENTS.name, "to_mode"): tuple(Mode),
        (JUDGEMENTS.name, "trigger"): tuple(Trigger),
        (SESSIONS.name, "started_by"): tuple(StartedBy),
        (SESSIONS.name, "ended_by"): tuple(EndedBy),
        (COMMANDS.name, "status"): tuple(CommandStatus),
        (DEVICE_SNAPSHOTS.name, "mode"): tuple(mode for mode in Mode if mode is not Mode.FORGOTTEN),
        (DEVICE_SNAPSHOTS.name, "part"): ("device", "signal", "row", "pending", "group"),
    }
)
# In other tables two rows may have one key: a message or a registry entry can be delivered twice.
_ONCE: Final[Mapping[str, str]] = MappingProxyType(
    {
        QUARANTINE.name: "place IS NOT NULL",
        JUDGEMENTS.name: "kind IN ('transition', 'add')",
        STREAM_HEALTH.name: "true",
        SESSIONS.name: "true",
        VITALS.name: "true",
        COMMANDS.name: "true",
    }
)


def of_table(table: Table) -> Suite:
    """Return the suite of a table's declaration: required columns, known values, key."""
    required = [column.name for column in table.columns if column.required]
    expectations = [
        Expectation(f"{name} is present", Form.PRESENT, name, f"every row of `{table.name}` has a value in `{name}`")
        for name in required
    ]
    for (name, column), known_values in _WORDS.items():
        if name == table.name:
            meaning = f"`{column}` is null or one of {', '.join(known_values)}"
            expectations.append(Expectation(f"{column} is known", Form.ONE_OF, column, meaning, allowed_values=known_values))
    key = tuple(name for name in table.key if name in {column.name for column in table.columns})
    again = "CAST(NULL AS BOOLEAN)"
    if condition := _ONCE.get(table.name):
        place = f"row_number() OVER (PARTITION BY {', '.join(table.key)} ORDER BY {table.key[0]})"  # a count would need a join
        again = f"CASE WHEN {condition} THEN {place} = 1 END"
        meaning = f"no two rows have the same {', '.join(table.key)}" + (
            "" if condition == "true" else f", among rows with {condition}"
        )
        expectations.append(Expectation("key is unique", Form.HOLDS, "key_is_unique", meaning))
    columns = dict.fromkeys([*key, *(column for name, column in _WORDS if name == table.name), *required])
    named = ", ".join(f"its.{name}" for name in columns)  # a column name may be a keyword of SQL
    rows = f"SELECT {named}, {again} AS key_is_unique FROM {table.name} AS its"
    return Suite(f"{table.name} table", table.name, table.meaning, (table.name,), rows, key, tuple(expectations))


COLUMNS: Final = Suite(
    "columns",
    "every table",
    "Declared columns of all tables, with the stored type.",
    ("declared_columns",),
    "SELECT table_name, column_name, declared, stored, stored IS NOT DISTINCT FROM declared AS as_declared FROM declared_columns",
    ("table_name", "column_name"),
    (Expectation("as declared", Form.HOLDS, "as_declared", "every declared column exists, with the declared type"),),
    ("declared", "stored"),
)


def holds(column: str, meaning: str, severity: Severity = Severity.CRITICAL) -> Expectation:
    """Return an expectation that a boolean column is true, named after the column."""
    return Expectation(column.replace("_", " "), Form.HOLDS, column, meaning, severity)


CORRECTED: Final = "corrected AS (SELECT DISTINCT device_id FROM messages WHERE kind = 'correct')"  # see Rule 3 of `table_suites`
DECLARED: Final = (
    MESSAGES,
    QUARANTINE,
    COVERAGE,
    DEVICES,
    GATEWAYS,
    JUDGEMENTS,
    STREAM_HEALTH,
    DEVICE_SNAPSHOTS,
    SESSIONS,
    VITALS,
    COMMANDS,
)
STRUCTURE: Final = (COLUMNS, *(of_table(table) for table in DECLARED))
