"""Histories for the lifecycle job on Spark, and homes in which it judges them."""

import shutil
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

from pyspark.sql import SparkSession

from fleetpulse.core.messages.decode import decode
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Origin, Row, hash64
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import relocate_each
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.tables import tables
from streaming.simulator.scenario import Scenario, scenario_policy, simulate
from tests.support.histories.histories import START, positioned, row, tick

DEPLOYMENT = Deployment(30_000, 300_000)


def history(seed: int) -> list[Row]:
    scenario = Scenario(seed, 24, START, history_ms=150 * 60_000)
    sent = takewhile(lambda one: one.received_at_ms < START + scenario.history_ms, simulate(scenario))
    decoded = [decode(one.topic, one.payload, one.received_at_ms, Origin.REPLAY) for one in sent]
    rows = [one for one in decoded if isinstance(one, Row)]
    policy = parse_policy(scenario_policy()).normalised()
    shorter = parse_policy({"rules": {"timeout": "10m"}}).normalised()
    ours = [
        row(0, "fleet/_/_/policy", policy=policy, effective_from_s=-3600),
        row(3000.0005, "fleet/_/b/gap", op="open", from_s=2950, after_s=3000),
        row(3600.0005, "fleet/_/b/gap", op="close", until_s=3700),
        row(6000.0005, "fleet/_/_/policy", policy=shorter, effective_from_s=6500),
        row(5000.0005, "fleet/_/camera-00002/control", op="maintain", until_s=7000),
        row(4000.0005, "fleet/harbour/gw-harbour-0/death", gateway="gw-harbour-0"),
        row(4500.0005, "fleet/north/gw-north-3/death", gateway="gw-north-3", boot="b7"),
        row(8200.0005, "fleet/south/gw-south-0/death", gateway="gw-south-0"),
        row(8232.0005, "fleet/south/gw-south-0/heartbeat", ts_s=8200),
        tick(9100),
    ]
    kept = [one for one in rows if not START + 2_950_000 < one.received_at_ms < START + 3_000_001]
    return positioned([*kept, *ours])


def land(home: Home, rows: list[Row], number: int) -> None:
    arrival = {"origin": "replay", "bridge": "b", "segment": number}
    table = [{**asdict(one), "device_hash": hash64(one.device_id), **arrival} for one in rows]
    tables.append(home, MESSAGES, tables.to_table(MESSAGES, table), "test", number)


def judge(spark: SparkSession, home: Home) -> None:
    """Run the lifecycle job until all rows are judged."""
    query = start(spark, home, None)
    try:
        assert query.awaitTermination(300)
        assert sum(one["numRowsDroppedByWatermark"] for batch in query.recentProgress for one in batch["stateOperators"]) == 0
    finally:
        query.stop()


def copy_of(home: Home, to: Path) -> Home:
    """Copy a home, and update the paths in its checkpoints."""
    shutil.copytree(home.path, to)
    copied = Home(to)
    relocate_each(copied.lifecycle)
    return copied
