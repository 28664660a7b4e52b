"""Home for tests of the API: several sites, modes, refused messages, gaps, batches, runs of data quality."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import COVERAGE, QUALITY_FAILURES, QUALITY_RESULTS, QUARANTINE, STREAM_HEALTH
from tests.support.histories.histories import START, row, tick
from tests.support.homes.homes import RegisteredHome
from tests.support.homes.streams import add_streams

ODD = ('quo"te', "per%cent", "under_score", "Ünïcode", "<script>", "site-7/why", "'; DROP", " hx-get=")
_ARRIVAL: dict[str, Any] = {"origin": "bridge", "bridge": "bridge-1", "segment": 1}


def heard(at_s: float, device_id: str, site: str = "north", **more: Any) -> Row:
    """Return a heartbeat of a device at a site; the id is not checked, as of a home whose ids have the site."""
    made = row(more.pop("received_s", at_s), f"fleet/{site}/x/heartbeat", ts_s=at_s, **more)
    return replace(made, device_id=device_id)


class ApiHome(RegisteredHome):
    """Home with a policy.

    Args:
        path: folder of the home.
        rows: first rows.
    """

    def __init__(self, path: Path, *rows: Row) -> None:
        super().__init__(path, Deployment(10_000, max_clock_lead_ms=100_000))
        policy = parse_policy({"rules": {"timeout": "100s", "forget_after": "1d"}}).normalised()
        self.batch(row(0, "fleet/_/_/policy", policy=policy, effective_from_s=-1000), *rows)


def api_home(path: Path) -> ApiHome:
    """Create a home in which each route of the API has rows."""
    odd = [heard(20 + at, device_id, "south") for at, device_id in enumerate(ODD)]
    made = ApiHome(path, row(5, "fleet/north/silent/registry", op="add"), heard(10, "a"), *odd, tick(40))
    made.batch(heard(150, "b"), heard(2_000, "ahead", received_s=160), tick(200))
    made.batch(heard(60, "b", received_s=210), heard(212, "a"), tick(260))
    refused = {**_ARRIVAL, "received_at_ms": START, "topic": "t", "reason": "json", "detail": "x", "payload": b"<b>\xff"}
    made.append(QUARANTINE, refused)
    for op, at_s in (("open", 10), ("close", 20), ("open", 30), ("open", 35)):
        at_ms = START + at_s * 1000
        made.append(COVERAGE, {**_ARRIVAL, "received_at_ms": at_ms, "at_ms": at_ms, "op": op, "why": "broker"})
    zeros = {one.name: 0 for one in STREAM_HEALTH.columns if one.required}
    batch = {**zeros, "query_id": "q", "run_id": "r", "began_at_ms": START, "generation": 1, "devices": '{"online": 1}'}
    made.append(STREAM_HEALTH, *({**batch, "batch_id": number} for number in range(3)))
    run = {"run_id": "r1", "began_at_ms": START, "suite": "s", "expectation": "e", "severity": "critical"}
    made.append(QUALITY_RESULTS, {**run, "subject": "tables", "outcome": "failed", "rows": 1, "failed": 1})
    made.append(QUALITY_FAILURES, {**run, "row_key": "{}", "detail": "{}"})
    add_streams(made.home, "a", START + 250_000)
    return made
