"""Homes for tests of data quality: a judged history and a snapshot, without Spark."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute
from deltalake import CommitProperties, write_deltalake

from batch.quality import facts
from batch.quality.derived_tables import DerivedTables, snapshot_state
from fleetpulse.columnar.codec.arrow import is_signal, signals_to_batch
from fleetpulse.columnar.codec.context_json import context_from_plain
from fleetpulse.columnar.compute import pc
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.columnar.snapshot.rows import snapshot_rows
from fleetpulse.core.judgements import Judgement
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.quality.suites import Severity
from fleetpulse.core.quality.table_suites import SUITES
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Kind, Row, for_everyone
from fleetpulse.core.tables import COVERAGE, DEVICE_SNAPSHOTS, DEVICES, JUDGEMENTS, QUARANTINE
from fleetpulse.io.home.home import Home
from fleetpulse.io.quality.suite_inputs import OpenedTables, opened
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import SnapshotInfo
from tests.support.histories.histories import OWN, START, any_internal_row, any_signal, positioned, row, stamped_by_bridge
from tests.support.histories.key_groups import Stream, snapshot_of
from tests.support.homes.homes import commit_batch, empty, land

DEPLOYMENT = Deployment(30_000, 20_000)


def judged_home(
    path: Path, rows: Sequence[Row], deployment: Deployment, emitted: Sequence[Judgement] | None = None, cut: int = 0
) -> Home:
    """Create a home with a judged history, a snapshot, and a message in quarantine.

    Args:
        path: folder of the home.
        rows: history.
        deployment: lateness, clock lead and jitter.
        emitted: judgements about the history; None for those of the definition.
        cut: number of rows after which the first version of bronze ends.
    """
    home = empty(path, deployment)
    rows = sorted(rows, key=lambda one: one.received_at_ms)
    for number, those in enumerate((rows[:cut], rows[cut:]), 1):
        if those:
            land(home, those, number, refused=int(those[0] is rows[0]))
    refused = {"received_at_ms": rows[0].received_at_ms, "topic": "fleet/s/d/heartbeat", "payload": b"{", "reason": "json",
               "detail": "it is cut", "origin": "mqtt", "bridge": "b", "segment": 0, "place": 0}  # fmt: skip
    tables.append(home, QUARANTINE, tables.to_table(QUARANTINE, [refused]), "test", 1)
    _land_ours(home, rows)
    newest_ms = rows[-1].received_at_ms
    written = [
        {**asdict(one), "judged_at_ms": newest_ms, "last_errors": json.dumps(one.last_errors) if one.last_errors else None}
        for one in (replay(rows, deployment) if emitted is None else emitted)
    ]
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, written), "test", 1)
    commit_batch(home.checkpoint, 1, newest_ms - 1)
    write_state(home, state_rows(rows, deployment))
    return home


def flooded(rows: Sequence[Row], device_id: str, count: int) -> list[Row]:
    """Return a history in which a device also sends late messages and copies of its signals."""
    own = [one for one in rows if one.device_id == device_id and one.kind is Kind.HEARTBEAT and one.event_time_ms is not None]
    last_ms = rows[-1].received_at_ms
    more: list[Row] = []
    for number in range(count):
        late = replace(own[0], received_at_ms=last_ms - 60_000 + 1_000 * number, seq=10_000 + number, digest=number)
        copied = own[number % len(own)]
        more += [late, replace(copied, received_at_ms=copied.received_at_ms + 1_000 + number)]
    return positioned([*rows, *more])


def _land_ours(home: Home, rows: Sequence[Row]) -> None:
    """Write the rows that landing adds to ``coverage`` and ``devices``."""
    same = {"origin": "bridge", "segment": 1}
    spans = [
        {**same, "bridge": row.device_id, "received_at_ms": row.received_at_ms, "op": row.contents()["op"],
         "at_ms": row.contents().get("from", row.contents().get("until"))}
        for row in rows if row.kind is Kind.GAP
    ]  # fmt: skip
    changes = [
        {**same, "bridge": "b", "received_at_ms": row.received_at_ms, "effective_from_ms": row.event_time_ms,
         "device_id": row.device_id, "site": row.site, "op": row.contents()["op"]}
        for row in rows if row.kind is Kind.REGISTRY
    ]  # fmt: skip
    for table, found in ((COVERAGE, spans), (DEVICES, changes)):
        if found:
            tables.append(home, table, tables.to_table(table, found), "test", 1)


def state_rows(rows: Sequence[Row], deployment: Deployment) -> pa.Table:
    """Return the state after some rows, as snapshot rows of one key group."""
    everything = [*rows, *(event for row in rows if (event := for_everyone(row)))]
    signals = signals_to_batch(row for row in everything if is_signal(row))
    others = [row for row in everything if not is_signal(row)]
    newest_ms = max(row.received_at_ms for row in rows)
    group, chunks = KeyGroup(Shards.begin(min(row.received_at_ms for row in rows))), dict[int, bytes]()
    step = group.fold(signals, others, newest_ms, deployment, chunks.__getitem__)
    return pa.Table.from_batches(snapshot_rows(0, group.to_bytes(), dict(step.chunks), newest_ms, deployment))


def write_state(
    home: Home,
    state: pa.Table,
    devices: int | None = None,
    like: pa.Table | None = None,
    key_groups: int = 1,
    bronze: int = 1,
    generation: int = 1,
) -> None:
    """Write the rows of a state as the newest snapshot.

    Args:
        home: the home.
        state: rows of the state.
        devices: number of devices in the metadata; None for the real number.
        like: rows from which the metadata is computed; None for ``state``.
        key_groups: number of key groups in the metadata.
        bronze: next version of bronze to read, in the metadata.
        generation: generation in the metadata.
    """
    described = state if like is None else like
    context = json.loads(next(row["content"] for row in described.to_pylist() if row["part"] == "group"))
    frontier_ms = context_from_plain(context)[0].frontier_ms
    count = sum(part == "device" for part in described["part"].to_pylist()) if devices is None else devices
    about = SnapshotInfo(generation, 1, bronze, context["newest_ms"], frontier_ms, count, key_groups)
    note = {name: value for name, value in asdict(replace(about)).items() if name not in ("version", "at_ms")}
    properties = CommitProperties(custom_metadata={"userMetadata": json.dumps(note)})
    path = str(home.table(DEVICE_SNAPSHOTS.name))
    write_deltalake(path, state.select([one.name for one in DEVICE_SNAPSHOTS.columns]), mode="overwrite", partition_by=["part"],
                    commit_properties=properties)  # fmt: skip


def with_site_gap(rows: Sequence[Row]) -> list[Row]:
    """Return a history with a gap of the site ``south``, and devices at both sites."""
    homes = {"device-1": "north", "device-2": "north", "device-4": "south", "device-5": "south"}
    of_sites = [replace(one, site=homes.get(one.device_id, one.site)) for one in rows]
    deaf = row(250.001, "fleet/_/c/gap", op="open", from_s=249, after_s=250, sites=["south"])
    return positioned([*of_sites, deaf, row(380.001, "fleet/_/c/gap", op="close", until_s=381)])


def eventful_history(seed: int) -> list[Row]:
    """Return a history with many kinds of events.

    It has late messages, messages ahead of time, copies, silences, holds, devices out of service,
    a gap, and pending rows.
    """
    random = Random(seed)
    devices, steps, own = [f"device-{number}" for number in range(6)], 80, [one for one in OWN if one not in ("gap", "policy")]
    rows = [any_signal(random.choice, devices, steps) for _ in range(240)]
    rows += [replace(one, received_at_ms=one.received_at_ms + 5_000) for one in random.sample(rows, 8)]
    ours = [any_internal_row(random.choice, devices, steps, own) for _ in range(12)]
    rules = {"timeout": "30s", "forget_after": "200s", "degraded": {"errors": 3, "window": "60s"}}
    ours += [
        row(-1, "fleet/_/_/policy", policy=parse_policy({"rules": rules}).normalised(), effective_from_s=-500),
        row(180.001, "fleet/_/b/gap", op="open", from_s=178, after_s=180),
        row(211.001, "fleet/_/b/gap", op="close", until_s=212),
        row(300.001, "fleet/_/b/gap", op="open", from_s=299, after_s=300),
        row(310.001, "fleet/_/b/gap", op="close", until_s=311),
    ]
    silent = [one for one in rows if not START + 180_000 < one.received_at_ms < START + 211_000]
    return positioned([*silent, *ours])


def random_history(seed: int) -> list[Row]:
    """Return a history of rows of all kinds, with meaningless gaps and policies."""
    choose = Random(seed).choice
    devices = [f"device-{number}" for number in range(6)]
    rows = [any_signal(choose, devices, 80) for _ in range(250)]
    return stamped_by_bridge([*rows, *(any_internal_row(choose, devices, 80) for _ in range(25))])


def judged_in_batches(rows: list[Row], random: Random, key_groups: int) -> Any:
    """Return the state after rows judged in random batches, as rows of a snapshot."""
    stream, begin = Stream(DEPLOYMENT, key_groups, {}), 0
    while begin < len(rows):
        end = min(begin + random.choice((1, 5, 30, 100)), len(rows))
        while end < len(rows) and rows[end].received_at_ms == rows[end - 1].received_at_ms:
            end += 1  # rows received at one instant are read in one batch
        stream.batch(rows[begin:end])
        begin = end
    return snapshot_of(stream)


def failed_expectations(home: Home) -> list[tuple[str, str]]:
    """Return the violated critical laws, with their suites."""
    found: list[tuple[str, str]] = []
    judged = facts.job_position(home)
    with opened(home) as tables:
        made = DerivedTables(home, tables, judged, snapshot_state(home))
        for suite in SUITES:
            assert made.skip_reason(suite) == ""
            made.make(suite)
            rows = tables.arrow(suite.rows)
            laws = [one for one in suite.expectations if one.form == "holds" and one.severity is Severity.CRITICAL]
            found += [(suite.name, one.name) for one in laws if pc.any(pc.equal(rows[one.column], False)).as_py()]
    return found


NAMED = {one.name: one for one in SUITES}


@contextmanager
def opened_tables(home: Home) -> Iterator[tuple[OpenedTables, DerivedTables]]:
    judged = facts.job_position(home)
    with opened(home) as tables:
        yield tables, DerivedTables(home, tables, judged, snapshot_state(home))


def plant(tables: OpenedTables, name: str, sql: str) -> None:
    """Change an opened table by SQL, without changing its files."""
    tables.connection.execute(f"CREATE TABLE copied AS SELECT * FROM {name}")
    if name in tables.made:
        tables.connection.unregister(name)
    else:
        tables.connection.execute(f"DROP VIEW {name}")
    tables.connection.execute(f"ALTER TABLE copied RENAME TO {name}")
    tables.connection.execute(sql)
