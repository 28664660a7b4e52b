"""Homes for tests of maintenance: four days of bronze, and a job's position in it."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow.parquet as pq

from batch.maintenance.maintain import maintain
from batch.maintenance.plan import Keep, Step
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row, hash64
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from tests.support.histories.histories import row, tick
from tests.support.histories.histories import signal as heartbeat
from tests.support.homes.copies import copy_built
from tests.support.homes.homes import empty

Read = list[tuple[int, str, str]]
DAY_S = 86_400
DAY_MS = 1000 * DAY_S
KEEP = Keep(90 * DAY_MS, 90 * DAY_MS, 7 * DAY_MS, 30 * DAY_MS, None, 90 * DAY_MS, 90 * DAY_MS, 30 * DAY_MS, 0)
KEEP_LITTLE = replace(KEEP, messages_ms=DAY_MS, device_snapshots_ms=DAY_MS, generations_ms=DAY_MS)
DAYS, EACH = 4, 12
NOW_S = time.time() + 3600  # an hour later, so that new files are old enough


def four_days(path: Path) -> Home:
    """Create a home of four days with twelve versions each.

    The rows of the first day include a policy.
    """
    copy_built(_build_four_days, path)
    return Home(path)


def _build_four_days(path: Path) -> None:
    made = empty(path, Deployment())
    number = 0
    for day in range(DAYS):
        for each in range(EACH):
            number += 1
            at_s = day * DAY_S + each * 60
            rows = [heartbeat(at_s, "a"), heartbeat(at_s + 1, "b"), tick(at_s + 2)]
            if number == 3:
                rows.append(row(at_s + 3, "fleet/_/_/policy", policy={"rules": {"timeout": "9m"}}, effective_from_s=at_s + 60))
            land_live(made, rows, number)
    judged_up_to(made, number + 1)


def land_live(home: Home, rows: Sequence[Row], number: int) -> None:
    """Append rows to bronze as rows of a live bridge."""
    arrival = {"origin": "mqtt", "bridge": "b", "segment": number}
    table = [{**asdict(one), "device_hash": hash64(one.device_id), **arrival} for one in rows]
    tables.append(home, MESSAGES, tables.to_table(MESSAGES, table), "test", number)


def judged_up_to(home: Home, *ends: int, generation: str = "gen-0001") -> None:
    """Write a checkpoint as Spark does, with a batch for each end version."""
    for batch, end in enumerate(ends):
        offsets = ["v1", '{"batchWatermarkMs":1}', f'{{"version": {end}}}']
        for kind, lines in (("offsets", offsets), ("commits", ["v1", '{"nextBatchWatermarkMs":1}'])):
            path = home.checkpoint.parent / generation / kind / str(batch)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines))


def date(table: Path, versions_ms: Mapping[int, int]) -> None:
    """Set the commit instants of versions of a Delta table."""
    for version, at_ms in versions_ms.items():
        commit = table / "_delta_log" / f"{version:020d}.json"
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for action in actions:
            if "commitInfo" in action:
                action["commitInfo"]["timestamp"] = at_ms
        commit.write_text("\n".join(map(json.dumps, actions)))
        os.utime(commit, (at_ms / 1000, at_ms / 1000))


def run_maintain(home: Home, keep: Keep = KEEP, *, dry_run: bool = False) -> list[Step]:
    """Run maintenance an hour later; return its steps except those held back."""
    return [step for step in maintain(home, keep, dry_run=dry_run, now_s=NOW_S) if step.did != "hold"]


def read_on(home: Home, version: int) -> Read:
    """Read bronze from a version on, as the job does, without its key groups."""
    log = DeltaLog(home.table(MESSAGES.name))
    found: Read = []
    while version <= log.latest():
        files, version = log.span(version)
        for path, rows in files:
            table = pq.ParquetFile(path).read(columns=["received_at", "device_id", "kind"])
            assert table.num_rows == rows
            found += [(one["received_at"].timestamp(), one["device_id"], one["kind"]) for one in table.to_pylist()]
    return found
