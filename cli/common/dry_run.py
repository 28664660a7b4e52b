"""Dry run of a read-only verb: the tables and files that it would read and write.

Rule 1: it fails with the same errors as the verb, except errors that only reading the data reveals.
Rule 2: it starts no Spark and writes no file: the amounts are from table logs and file names.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cli.common.output import as_json, console, instant_ms, plain_row
from fleetpulse.core.monitoring.health import measure
from fleetpulse.core.times import format_instant

if TYPE_CHECKING:
    from fleetpulse.core.tables import Table
    from fleetpulse.io.home.home import Home


@dataclass(frozen=True, slots=True)
class Read:
    """One input of a verb; None for an amount that is unknown or omitted.

    Attributes:
        what: name or description of the table or file.
        files: number of files.
        rows: number of rows in the files.
        size_bytes: size of the files.
        from_ms: earliest instant in the files, epoch milliseconds.
        to_ms: latest instant in the files, epoch milliseconds.
    """

    what: str
    files: int | None = None
    rows: int | None = None
    size_bytes: int | None = None
    from_ms: int | None = None
    to_ms: int | None = None

    def plain(self) -> dict[str, Any]:
        """Return the known fields, by name."""
        known = {name: getattr(self, name) for name in self.__slots__}
        return plain_row({name: value for name, value in known.items() if value is not None})

    def sentence(self) -> str:
        """Return the input and its known amounts as text."""
        counts = ((self.files, "file"), (self.rows, "row"))
        amounts = [f"{count:,} {name}{'' if count == 1 else 's'}" for count, name in counts if count is not None]
        if self.size_bytes is not None:
            amounts.append(str(measure("_bytes", self.size_bytes)))
        if self.from_ms is not None and self.to_ms is not None:
            amounts.append(f"{format_instant(self.from_ms)} to {format_instant(self.to_ms)}")
        return f"{self.what}: {', '.join(amounts)}" if amounts else self.what


@dataclass(frozen=True, slots=True)
class DryRun:
    """Plan of a read-only verb.

    Attributes:
        does: action of the verb, such as ``show the fleet``.
        reads: inputs of the verb.
        writes: outputs of the verb; empty if there are none.
    """

    does: str
    reads: tuple[Read, ...] = ()
    writes: tuple[str, ...] = ()


def print_dry_run(outlook: DryRun, *, json_lines: bool) -> None:
    """Print a dry run, as text lines or as one JSON object."""
    if json_lines:
        reads = [one.plain() for one in outlook.reads]
        as_json([{"dry_run": True, "does": outlook.does, "reads": reads, "writes": list(outlook.writes)}])
        return
    shown = console()
    lines = [f"would {outlook.does}"]
    lines += [f"would read {one.sentence()}" for one in outlook.reads]
    lines += [f"would write {one}" for one in outlook.writes or ("nothing",)]
    for line in lines:
        shown.print(line, highlight=False, markup=False, soft_wrap=True)


def tables_read(home: "Home", tables: "Iterable[tuple[Table, str]]") -> tuple[Read, ...]:
    """Return the amounts in whole tables, from their logs; no data file is opened.

    Args:
        home: the home.
        tables: tables, each with the instant column whose range is reported.
    """
    from fleetpulse.io.tables.tables import files_of

    found: list[Read] = []
    for table, column in tables:
        files = [file for file in files_of(home, table, column) if file.rows != 0]
        rows = [file.rows for file in files if file.rows is not None]
        ranged = bool(files) and all(file.least is not None and file.greatest is not None for file in files)
        from_ms = min(instant_ms(file.least) for file in files) if ranged else None
        to_ms = max(instant_ms(file.greatest) for file in files) if ranged else None
        found.append(Read(table.name, len(files), sum(rows) if len(rows) == len(files) else None, None, from_ms, to_ms))
    return tuple(found)
