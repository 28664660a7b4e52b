"""What must hold of the tables, as data: suites of expectations, each with its rows as SQL that every engine reads.

Rule 1: what the tables declare is derived from `tables`, the words from the enums; nothing of it is written twice.
Rule 2: a law is a column that says of each row whether it holds; null where it does not apply. Who evaluates knows no law.
Rule 3: SQL here is read by DuckDB and by Spark alike: instants are compared, and counted by ``unix_millis`` alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.lifecycle import Mode, Trigger
from fleetpulse.core.rows import REASONS, Clock, GatewayEvent, Kind, Origin, Trust
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
    """What follows from rows that fail."""

    CRITICAL = "critical"  # nothing is built on them: a gate stays shut
    WARNING = "warning"  # they are reported


class Form(StrEnum):
    """How an expectation is evaluated."""

    PRESENT = "present"  # the column has a value
    ONE_OF = "one of"  # the column's value is one of the words, or there is none
    HOLDS = "holds"  # the column is true, or null where the law does not apply


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must hold of each row.

    Attributes:
        name: as results and failures have it.
        form: how it is evaluated.
        column: of the suite's rows.
        meaning: in a sentence.
        severity: what follows where it does not hold.
        words: of `Form.ONE_OF`.
    """

    name: str
    form: Form
    column: str
    meaning: str
    severity: Severity = Severity.CRITICAL
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Suite:
    """Expectations of the same rows.

    Attributes:
        name: names it.
        about: the table that fails with it.
        meaning: what its rows are.
        reads: tables that its rows are made of; those in `MADE` are worked out for it.
        rows: the SQL that selects them.
        key: columns that say which row it is.
        shown: columns that say of a row that fails what it says.
        expectations: of them.
        again: whether it is told by judging again: from bronze's first row, or on from a snapshot, see
            ``batch/quality/rejudge.py``.
    """

    name: str
    about: str
    meaning: str
    reads: tuple[str, ...]
    rows: str
    key: tuple[str, ...]
    expectations: tuple[Expectation, ...]
    shown: tuple[str, ...] = ()
    again: bool = False


MADE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "stand": "one row: how far the job has judged",
        "shards": "how far each site is judged that a gap row names",
        "roaming": "the devices with messages from sites that are judged apart",
        "landed": "one row: how many rows landing has taken from the bridges' segments, how many of them it has quarantined, and "
        "how many rows of each table maintenance has removed since",
        "declared_columns": "the columns that are declared, with the type that is stored",
        "defined": "what bronze comes to, judged again",
        "deadlines": "when each device that fell silent was to be offline",
        "state": "the rows of a snapshot, or of a generation's state",
        "taken": "one row: where that state stands",
        "pending": "what it has judged and not said",
        "dues": "of each of its devices the next deadline, and the covered time at which its silence began, by bronze's gaps",
        "own_rows": "rows of the registry, of operators and for everybody that wait in it",
        "defined_state": "the devices that bronze comes to, judged again up to there",
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
        (DEVICE_SNAPSHOTS.name, "mode"): tuple(mode for mode in Mode if mode is not Mode.FORGOTTEN),
        (DEVICE_SNAPSHOTS.name, "part"): ("device", "signal", "row", "pending", "group"),
    }
)
# Of a table that is not here rows may share their key: a message may come twice, a registry's entry be sent again.
_ONCE: Final[Mapping[str, str]] = MappingProxyType(
    {
        QUARANTINE.name: "place IS NOT NULL",
        JUDGEMENTS.name: "kind IN ('transition', 'add')",
        STREAM_HEALTH.name: "true",
    }
)


def of_table(table: Table) -> Suite:
    """Return what the declaration of a table says of its rows: values that are always there, known words, the key."""
    there = [column.name for column in table.columns if column.required]
    expectations = [
        Expectation(f"{name} is there", Form.PRESENT, name, f"`{name}` is there in every row of `{table.name}`") for name in there
    ]
    for (name, column), words in _WORDS.items():
        if name == table.name:
            meaning = f"`{column}` is one of {', '.join(words)}"
            expectations.append(Expectation(f"{column} is known", Form.ONE_OF, column, meaning, words=words))
    key = tuple(name for name in table.key if name in {column.name for column in table.columns})
    again = "CAST(NULL AS BOOLEAN)"
    if condition := _ONCE.get(table.name):
        place = f"row_number() OVER (PARTITION BY {', '.join(table.key)} ORDER BY {table.key[0]})"  # a count would be joined
        again = f"CASE WHEN {condition} THEN {place} = 1 END"
        meaning = f"no two rows have the same {', '.join(table.key)}" + ("" if condition == "true" else f", where {condition}")
        expectations.append(Expectation("key is unique", Form.HOLDS, "key_is_unique", meaning))
    columns = dict.fromkeys([*key, *(column for name, column in _WORDS if name == table.name), *there])
    named = ", ".join(f"its.{name}" for name in columns)  # a column may be named by a word of SQL
    rows = f"SELECT {named}, {again} AS key_is_unique FROM {table.name} AS its"
    return Suite(f"{table.name} table", table.name, table.meaning, (table.name,), rows, key, tuple(expectations))


COLUMNS: Final = Suite(
    "columns",
    "every table",
    "The columns that are declared, with the type that is stored.",
    ("declared_columns",),
    "SELECT table_name, column_name, declared, stored, stored IS NOT DISTINCT FROM declared AS as_declared FROM declared_columns",
    ("table_name", "column_name"),
    (Expectation("as declared", Form.HOLDS, "as_declared", "every declared column is there, with the declared type"),),
    ("declared", "stored"),
)


def holds(column: str, meaning: str, severity: Severity = Severity.CRITICAL) -> Expectation:
    """Return a law that stands in a column, named by it."""
    return Expectation(column.replace("_", " "), Form.HOLDS, column, meaning, severity)


def among(words: Iterable[str]) -> str:
    """Return words as SQL lists them."""
    return ", ".join(f"'{word}'" for word in sorted(words))


CORRECTED: Final = "corrected AS (SELECT DISTINCT device_id FROM messages WHERE kind = 'correct')"  # see Rule 3 of `laws`
DECLARED: Final = (MESSAGES, QUARANTINE, COVERAGE, DEVICES, GATEWAYS, JUDGEMENTS, STREAM_HEALTH, DEVICE_SNAPSHOTS)
STRUCTURE: Final = (COLUMNS, *(of_table(table) for table in DECLARED))
