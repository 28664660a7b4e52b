"""Homes for tests of data quality: a history judged by the definition, and its state as a snapshot, without Spark."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import pyarrow as pa
from deltalake import CommitProperties, write_deltalake

from fleetpulse.columnar.codec.arrow import is_signal, signals_to_batch
from fleetpulse.columnar.codec.world_json import world_from_plain
from fleetpulse.columnar.fold.key_group import KeyGroup
from fleetpulse.columnar.snapshot.rows import taken
from fleetpulse.core.judgements import Judgement
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Kind, Row, for_everyone
from fleetpulse.core.tables import COVERAGE, DEVICE_SNAPSHOTS, DEVICES, JUDGEMENTS, QUARANTINE
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.snapshots import SnapshotInfo
from tests.histories import OWN, START, any_own_row, any_signal, positioned, row
from tests.homes import commit_batch, empty, land


def judged_home(
    path: Path, rows: Sequence[Row], deployment: Deployment, said: Sequence[Judgement] | None = None, cut: int = 0
) -> Home:
    """Make a home in which a history has landed, was judged to its newest row, and has a snapshot; a message is in quarantine.

    Args:
        path: where.
        rows: the history.
        deployment: lateness, clock lead and jitter.
        said: what was said of it; None for what the definition says.
        cut: after how many rows a version of bronze ends.
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
    told = [
        {**asdict(one), "judged_at_ms": newest_ms, "last_errors": json.dumps(one.last_errors) if one.last_errors else None}
        for one in (replay(rows, deployment) if said is None else said)
    ]
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, told), "test", 1)
    commit_batch(home.checkpoint, 1, newest_ms - 1)
    write_state(home, state_rows(rows, deployment))
    return home


def _land_ours(home: Home, rows: Sequence[Row]) -> None:
    """Land what landing keeps of our own rows in tables of their own."""
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
    """Return the state that rows come to, as the rows of a snapshot of one key group."""
    everything = [*rows, *(event for row in rows if (event := for_everyone(row)))]
    signals = signals_to_batch(row for row in everything if is_signal(row))
    others = [row for row in everything if not is_signal(row)]
    newest_ms = max(row.received_at_ms for row in rows)
    group, chunks = KeyGroup(Shards.begin(min(row.received_at_ms for row in rows))), dict[int, bytes]()
    step = group.fold(signals, others, newest_ms, deployment, chunks.__getitem__)
    return pa.Table.from_batches(taken(0, group.to_bytes(), dict(step.chunks), newest_ms, deployment))


def write_state(
    home: Home,
    state: pa.Table,
    devices: int | None = None,
    like: pa.Table | None = None,
    key_groups: int = 1,
    bronze: int = 1,
    generation: int = 1,
) -> None:
    """Write the rows of a state as the newest snapshot, with what is said of it: of other rows, where ``like`` gives some.

    ``devices`` is what is said of how many there are; ``bronze`` is the version that is read next.
    """
    said = state if like is None else like
    world = json.loads(next(row["content"] for row in said.to_pylist() if row["part"] == "group"))
    frontier_ms = world_from_plain(world)[0].frontier_ms
    count = sum(part == "device" for part in said["part"].to_pylist()) if devices is None else devices
    about = SnapshotInfo(generation, 1, bronze, world["newest_ms"], frontier_ms, count, key_groups)
    note = {name: value for name, value in asdict(replace(about)).items() if name not in ("version", "at_ms")}
    properties = CommitProperties(custom_metadata={"userMetadata": json.dumps(note)})
    path = str(home.table(DEVICE_SNAPSHOTS.name))
    write_deltalake(path, state.select([one.name for one in DEVICE_SNAPSHOTS.columns]), mode="overwrite", partition_by=["part"],
                    commit_properties=properties)  # fmt: skip


def in_shards(rows: Sequence[Row]) -> list[Row]:
    """Return a history in which the bridge of the site ``south`` does not listen for a while; some devices speak from both."""
    homes = {"device-1": "north", "device-2": "north", "device-4": "south", "device-5": "south"}
    of_sites = [replace(one, site=homes.get(one.device_id, one.site)) for one in rows]
    deaf = row(250.001, "fleet/_/c/gap", op="open", from_s=249, after_s=250, sites=["south"])
    return positioned([*of_sites, deaf, row(380.001, "fleet/_/c/gap", op="close", until_s=381)])


def eventful(seed: int) -> list[Row]:
    """Return a history in which much happens: late, ahead, twice, silent, held, out of service; a gap; and some still waits."""
    random = Random(seed)
    devices, steps, own = [f"device-{number}" for number in range(6)], 80, [one for one in OWN if one not in ("gap", "policy")]
    rows = [any_signal(random.choice, devices, steps) for _ in range(240)]
    rows += [replace(one, received_at_ms=one.received_at_ms + 5_000) for one in random.sample(rows, 8)]
    ours = [any_own_row(random.choice, devices, steps, own) for _ in range(12)]
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
