"""Vitals of the policies in bronze, as far as a batch needs them.

Rule 1: a policy that the lifecycle refuses since it is late counts from its receipt.
Rule 2: the vitals depend on bronze alone. The record beside the checkpoint saves the reading of rows that were read
before; if it is not of this table, or versions after it are gone, all of bronze is read.
Rule 3: of a file, the column of kinds is read, and further columns only of row groups with a policy.
"""

import json
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from fleetpulse.columnar.compute import pc
from fleetpulse.core.errors import FleetError
from fleetpulse.core.policy import PolicyFault, from_row
from fleetpulse.core.rows import Kind
from fleetpulse.core.streams.vitals import Vitals, VitalsSpan, spans_of, stored_vitals, vitals_from_stored
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.delta.corruption import reporting_corruption_of_file
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.tables.tables import newest, paths_in

RECORD: Final = "policies.json"
RECORD_EVERY: Final = 1_000  # versions of bronze, of which maintenance keeps the log longer
_COLUMNS: Final = ("kind", "event_time", "received_at", "body")


class VitalsPolicies:
    """Vitals of the policies in bronze; new versions of bronze are read when a batch needs them.

    Args:
        home: home of bronze.
        checkpoint: checkpoint of the query, which keeps the record; a missing folder is created.

    Attributes:
        spans: vitals of the policies that were in bronze at the start.

    Raises:
        FleetError: a file of bronze is damaged.
    """

    def __init__(self, home: Home, checkpoint: Path) -> None:
        self._home, self._record = home, checkpoint / RECORD
        self._log = DeltaLog(home.table(MESSAGES.name))
        self._dated: list[tuple[int, int, Vitals]] = []
        self._next = self._recorded = 0
        try:
            self._restore()
            self._read(self._log.latest())
        except (FleetError, ValueError, LookupError, TypeError):  # not of this table, or versions after it are gone
            self._recorded = 0
            self._read_all()
        self._write_record()
        self.spans = spans_of(self._dated)

    def read_through(self, version: int) -> tuple[VitalsSpan, ...]:
        """Return the spans by the rows up to a version of bronze.

        Raises:
            FleetError: a version is no longer in the log, or a file of bronze is damaged.
        """
        self._read(min(version, self._log.latest()))
        if self._next - self._recorded >= RECORD_EVERY:
            self._write_record()
        return spans_of(self._dated)

    def _read(self, last: int) -> None:
        while self._next <= last:
            appended, end = self._log.span(self._next)
            self._dated += [one for name, _ in appended for one in _policies_in(Path(name))]
            self._next = end

    def _read_all(self) -> None:
        opened = newest(self._home, MESSAGES)
        files = [] if opened is None else paths_in(self._home, MESSAGES, opened)
        self._dated = [one for file in files for one in _policies_in(file)]
        self._next = 0 if opened is None else opened.version() + 1

    def _restore(self) -> None:
        """Continue from the record.

        Raises:
            LookupError: there is no record of this table.
            ValueError: the record is damaged; also `TypeError`.
        """
        if not self._record.exists():
            raise LookupError(RECORD)
        record = json.loads(self._record.read_text())
        if self._log.digest(record["next"] - 1) != record["digest"]:
            raise LookupError(RECORD)
        self._next = self._recorded = record["next"]
        self._dated = [(effective, received, vitals_from_stored(vitals)) for effective, received, vitals in record["policies"]]

    def _write_record(self) -> None:
        digest = self._log.digest(self._next - 1)
        if digest is None or self._recorded == self._next:
            return
        policies = [(effective, received, stored_vitals(vitals)) for effective, received, vitals in self._dated]
        self._record.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self._record, json.dumps({"next": self._next, "digest": digest, "policies": policies}))
        self._recorded = self._next


def _policies_in(file: Path) -> list[tuple[int, int, Vitals]]:
    """Return ``effective_from`` and ``received_at`` (epoch milliseconds) of the valid policies in a file, and their vitals."""
    found: list[tuple[int, int, Vitals]] = []
    with reporting_corruption_of_file(file):
        opened = pq.ParquetFile(file, read_dictionary=["kind"])
        for group in range(opened.num_row_groups):
            kinds = opened.read_row_group(group, columns=["kind"], use_threads=False)["kind"]
            if not any(Kind.POLICY.value in chunk.dictionary.to_pylist() for chunk in kinds.chunks):
                continue
            rows = opened.read_row_group(group, columns=[*_COLUMNS], use_threads=False)
            for row in rows.filter(pc.equal(kinds.cast(pa.string()), Kind.POLICY.value)).to_pylist():
                if (vitals := _vitals_in(row["body"])) is not None:
                    effective_ms, received_ms = (round(row[name].timestamp() * 1000) for name in ("event_time", "received_at"))
                    found.append((effective_ms, received_ms, vitals))
    return found


def _vitals_in(body: str | None) -> Vitals | None:
    """Return the vitals of a policy row; None if the policy is invalid, and therefore refused."""
    try:
        return from_row(json.loads(body or "{}").get("policy")).vitals
    except PolicyFault:
        return None
