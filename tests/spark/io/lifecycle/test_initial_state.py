"""Initial state of registered devices: those that never speak are judged by ticks alone."""

import json
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from fleetpulse.columnar.snapshot.bootstrap import REGISTERED_SCHEMA
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.policy import Dated, Policies, parse_policy
from fleetpulse.core.presence.shards import Shards
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Row, hash64
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.initial_state import initial_state
from fleetpulse.io.lifecycle.query import InitialState, start
from fleetpulse.io.tables import tables
from tests.support.histories.histories import START, row, signal, tick

pytestmark = pytest.mark.spark
DEPLOYMENT = Deployment(30_000, 300_000)
POLICY = parse_policy({"rules": {"timeout": "20m", "forget_after": "60m"}, "classes": {"quick": {"timeout": "90s"}}})
DEVICES = 40  # about five per key group: each of the eight has a timer
SPEAKS = "device-07"


def _since_s(number: int) -> int:
    return -7 * number


def _class_of(number: int) -> str | None:
    return "quick" if number % 3 == 0 else None


def _land(home: Home, rows: list[Row], number: int) -> None:
    arrival = {"origin": "mqtt", "bridge": "b", "segment": number}
    table = [{**asdict(one), "device_hash": hash64(one.device_id), **arrival} for one in rows]
    tables.append(home, MESSAGES, tables.to_table(MESSAGES, table), "test", number)


def _registered(spark: SparkSession, home: Home) -> DataFrame:
    """Write a table of devices as an external registry has it, and return the initial state."""
    columns = {
        "device_id": [f"device-{number:02d}" for number in range(DEVICES)],
        "site": ["site"] * DEVICES,
        "device_class": [_class_of(number) for number in range(DEVICES)],
        "gateway": [None] * DEVICES,
        "registered_at": [(START + _since_s(number) * 1000) * 1000 for number in range(DEVICES)],
    }
    table = home.path / "registered"
    schema = pa.schema([*REGISTERED_SCHEMA, pa.field("remark", pa.string())])
    listed = pa.table({**columns, "remark": ["passed over"] * DEVICES}).cast(schema)
    spark.createDataFrame(listed).write.format("delta").save(str(table))
    listening = Shards.judged_through(START, START, DEPLOYMENT.allowed_lateness_ms)
    policies = Policies().including(Dated(0, 0, POLICY.version, POLICY))
    return initial_state(spark, table, listening, policies, home.key_groups())


def _run(spark: SparkSession, home: Home, initial: DataFrame | None = None) -> None:
    query = start(spark, home, initial=InitialState(initial) if initial else None)
    try:
        query.processAllAvailable()
        for batch in query.recentProgress:
            assert sum(one["numRowsDroppedByWatermark"] for one in batch["stateOperators"]) == 0
    finally:
        query.stop()


@pytest.mark.timeout(600)  # two cold starts of the query, also on a slow machine
def test_devices_that_never_speak_go_offline_by_ticks_as_defined(spark: SparkSession, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(DEPLOYMENT)
    tables.create(home, MESSAGES)
    ticks = [tick(at_s) for at_s in (31, 60, 125, 600, 1225, 1230)]
    heartbeat = signal(500, SPEAKS)
    rest = sorted([*ticks, heartbeat, tick(4000)], key=lambda one: one.received_at_ms)
    for number, one in enumerate(rest[:4], 1):
        _land(home, [one], number)
    _run(spark, home, _registered(spark, home))
    summaries = tables.query(
        home, "SELECT arg_max(counts, judged_at) AS counts FROM judgements WHERE kind = 'summary' GROUP BY key_group"
    )
    counted = sum(sum(json.loads(one["counts"]).values()) for one in summaries)
    assert (len(summaries), counted) == (8, DEVICES), "each group counts its initial devices, with or without a message"
    for number, one in enumerate(rest[4:-1], 5):
        _land(home, [one], number)
    _run(spark, home)  # an existing checkpoint needs no initial state
    # Timers at the watermark itself: the deadlines of 1200 s are exactly at the frontier of the newest tick, 1230.
    [last] = tables.query(home, "SELECT epoch_ms(max(event_time)) AS at_ms FROM transitions WHERE to_mode = 'offline'")
    assert last["at_ms"] - START == 1_200_000
    _land(home, [rest[-1]], len(rest))
    _run(spark, home)

    policy = row(0, "fleet/_/_/policy", policy=POLICY.normalised(), effective_from_s=-START // 1000)
    registry = [
        row(1, f"device-{number:02d}/registry", op="add", **{"class": _class_of(number)}, effective_from_s=_since_s(number))
        for number in range(DEVICES)
    ]
    want = {
        (one.device_id, one.transition_no, one.event_time_ms, str(one.to_mode), str(one.trigger), one.policy_version, one.life_ms)
        for one in replay([policy, *registry, *rest], DEPLOYMENT)
        if one.kind is JudgementKind.TRANSITION
    }
    rows = tables.query(
        home,
        """SELECT device_id, transition_no, epoch_ms(event_time), to_mode, "trigger", policy_version, epoch_ms(life)
           FROM transitions""",
    )
    transitions = [tuple(one.values()) for one in rows]
    assert len(transitions) == len(set(transitions))
    assert set(transitions) == want
    offline = {one[0]: one[2] - START for one in transitions if one[3] == "offline" and one[1] == 1}
    silent = {number: f"device-{number:02d}" for number in range(DEVICES) if f"device-{number:02d}" != SPEAKS}
    # No bridge listened before START: silence counts from there.
    assert offline == {device: 90_000 if _class_of(number) else 1_200_000 for number, device in silent.items()}
