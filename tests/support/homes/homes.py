"""Homes for tests without processes.

Bronze is as landing writes it; judgements and checkpoint are as the lifecycle job writes them.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from deltalake import CommitProperties, DeltaTable, write_deltalake

from fleetpulse.core.catalog import TABLES
from fleetpulse.core.judgements import Judgement
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Row, hash64
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, DEVICES, JUDGEMENTS, MESSAGES, Table
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import raise_floor
from fleetpulse.io.maintenance import compaction
from fleetpulse.io.maintenance.readers import ReaderPin
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.row_accounting import IngestCounters, read_counters
from tests.support.histories.histories import registry_entries
from tests.support.homes.copies import copy_built


def empty(path: Path, deployment: Deployment) -> Home:
    """Create a home with empty tables."""
    home = Home(path)
    home.prepare(deployment)
    copy_built(_create_tables, path / "tables")
    return home


def _create_tables(folder: Path) -> None:
    for table in TABLES:
        tables.create_at(folder / table.name, table)


def land(home: Home, rows: Sequence[Row], number: int, refused: int = 0) -> None:
    """Append rows to bronze, with the counters that landing writes.

    Args:
        home: the home.
        rows: rows to append.
        number: number of the segment.
        refused: number of refused messages in the counters.
    """
    arrival = {"origin": "replay", "bridge": "b", "segment": number}
    table = [{**asdict(one), "device_hash": hash64(one.device_id), **arrival} for one in rows]
    counted = read_counters(DeltaTable(str(home.table(MESSAGES.name)))) or IngestCounters(0, 0)
    numbers = {"test": number, **counted.more(len(rows) + refused, refused).numbers()}
    tables.append_of(home, MESSAGES, tables.to_table(MESSAGES, table), numbers)


def landed_home(path: Path, rows: Sequence[Row], deployment: Deployment, cuts: Sequence[int] = ()) -> Home:
    """Create a home with rows in bronze.

    Args:
        path: folder of the home.
        rows: rows in the order of ``received_at``.
        deployment: lateness, clock lead and jitter.
        cuts: numbers of rows after which a version ends.
    """
    home = Home(path)
    home.prepare(deployment)
    tables.create(home, MESSAGES)
    edges = [0, *sorted(cuts), len(rows)]
    for number, (begin, end) in enumerate(pairwise(edges), 1):
        land(home, rows[begin:end], number)
    return home


def commit_batch(checkpoint: Path, number: int, watermark_ms: int, *, committed: bool = True) -> None:
    """Write the files of a batch in a checkpoint."""
    for folder in ("offsets", "commits"):
        (checkpoint / folder).mkdir(parents=True, exist_ok=True)
    metadata = json.dumps({"batchWatermarkMs": watermark_ms, "conf": {"spark.sql.shuffle.partitions": "2"}})
    (checkpoint / "offsets" / str(number)).write_text(f'v1\n{metadata}\n{{"version": 1}}\n')
    if committed:
        (checkpoint / "commits" / str(number)).write_text(f"v1\n{json.dumps({'nextBatchWatermarkMs': watermark_ms})}")


def take_snapshot(home: Home, batch: int = 1, mode: Any = "overwrite", **more: Any) -> None:
    """Write a snapshot with two rows.

    Args:
        home: the home.
        batch: batch after which the snapshot claims to be taken.
        mode: write mode of the commit.
        more: further or other fields of the commit's metadata.
    """
    taken = {"generation": 1, "batch": batch, "bronze": 1, "newest_ms": 1, "frontier_ms": 1, "devices": 1, "key_groups": 1}
    parts = [{"part": part, "key_group": 0, "device_id": str(batch)} for part in ("device", "group")]
    note = CommitProperties(custom_metadata={"userMetadata": json.dumps({**taken, **more})})
    path, rows = str(home.table(DEVICE_SNAPSHOTS.name)), tables.to_table(DEVICE_SNAPSHOTS, parts)
    write_deltalake(path, rows, mode=mode, commit_properties=note)


def apply_retention(home: Home, version: int, keep_ms: int) -> int:
    """Remove old rows of bronze as maintenance does; return the retention floor.

    Args:
        home: the home.
        version: version of bronze that a reader still needs.
        keep_ms: age of rows to keep, in milliseconds.
    """
    table = home.table(MESSAGES.name)
    planned = compaction.plan(table, [ReaderPin("a test", version, by_version=True)], keep_ms, time.time_ns() // 1_000_000)
    assert planned is not None, "there are rows"
    raise_floor(home, MESSAGES.name, planned.cutoff_ms)
    assert compaction.drop_expired(table, planned), "some are old"
    return planned.cutoff_ms


class JudgedHome:
    """Home that is judged by the definition, some rows at a time.

    Args:
        home: empty home.
    """

    def __init__(self, home: Home) -> None:
        self.home = home
        self.rows: list[Row] = []
        self._written: Counter[Judgement] = Counter()
        self._number = 0

    def land_and_judge(self, *rows: Row) -> None:
        """Land rows, and judge up to the newest one."""
        self._number += 1
        self.rows += rows
        land(self.home, rows, self._number)
        fresh = Counter(replay(self.rows, self.home.deployment())) - self._written
        self._written += fresh
        newest_ms = max(one.received_at_ms for one in self.rows)
        more = {"judged_at_ms": newest_ms}
        written = [{**asdict(one), **more, "last_errors": json.dumps(one.last_errors)} for one in fresh.elements()]
        tables.append(self.home, JUDGEMENTS, tables.to_table(JUDGEMENTS, written), "test", self._number)
        commit_batch(self.home.checkpoint, self._number, newest_ms - 1)


class RegisteredHome(JudgedHome):
    """Home that is judged by the definition, with entries of the registry.

    Args:
        path: folder of the home.
        deployment: its deployment.
    """

    def __init__(self, path: Path, deployment: Deployment) -> None:
        super().__init__(empty(path, deployment))
        self._commits = 0

    def batch(self, *rows: Row) -> None:
        """Land and judge rows, and append their entries of the registry."""
        self.land_and_judge(*rows)
        if entries := registry_entries(rows):
            self.append(DEVICES, *entries)

    def append(self, table: Table, *entries: Mapping[str, Any]) -> None:
        """Append rows to a table, in a commit of its own."""
        self._commits += 1
        tables.append(self.home, table, tables.to_table(table, entries), f"test-{table.name}", self._commits)
