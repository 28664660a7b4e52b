"""Home of a small fleet as the server reads it: several sites, modes, clocks, refused messages and an amendment."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.core.tables import COVERAGE, JUDGEMENTS, QUARANTINE, STREAM_HEALTH
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import RegisteredHome

RULES: dict[str, Any] = {"rules": {"timeout": "100s", "forget_after": "1d"}}
BRIDGE_ROW: dict[str, Any] = {"origin": "bridge", "bridge": "bridge-1", "segment": 1}


def at_site(site: str, one: Row) -> Row:
    """Return a row of another site; the name is not checked, as in a table that another program wrote."""
    return replace(one, site=site)


def registered(received_s: float, device_id: str, site: str, **content: Any) -> Row:
    """Return an entry of the registry that adds a device."""
    return row(received_s, f"fleet/{site}/{device_id}/registry", op="add", **content)


class ServedHome(RegisteredHome):
    """Home with a policy, and rows of the tables that the server reads.

    Args:
        path: folder of the home.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, Deployment(10_000, max_clock_lead_ms=100_000))
        policy = parse_policy(RULES).normalised()
        self.batch(row(0, "fleet/_/_/policy", policy=policy, effective_from_s=-1000))

    def refuse(self, reason: str, messages: int | None = None) -> None:
        """Append a row to quarantine."""
        entry = {**BRIDGE_ROW, "received_at_ms": START, "topic": "t", "reason": reason, "detail": "x", "messages": messages}
        self.append(QUARANTINE, entry)

    def retract(self, device_id: str, to_mode: str, transition_no: int) -> None:
        """Append the retraction of a transition."""
        entry = {
            "kind": "retract", "device_id": device_id, "life": START, "transition_no": transition_no, "to_mode": to_mode,
            "amendment_no": 1, "event_time_ms": START, "judged_at_ms": START,
        }  # fmt: skip
        self.append(JUDGEMENTS, entry)

    def gap(self, bridge: str, op: str, received_s: int) -> None:
        """Append a row to coverage."""
        at_ms = START + received_s * 1_000
        self.append(COVERAGE, {**BRIDGE_ROW, "bridge": bridge, "received_at_ms": at_ms, "at_ms": at_ms, "op": op})

    def ran_batch(self, number: int, **columns: Any) -> None:
        """Append a batch to the metrics of the job."""
        zeros = {column.name: 0 for column in STREAM_HEALTH.columns if column.required and column.name != "began_at"}
        entry = {**zeros, "query_id": "q", "run_id": "r", "batch_id": number, "began_at_ms": START + number, **columns}
        self.append(STREAM_HEALTH, entry)


def small_fleet(path: Path) -> ServedHome:
    """Create a home with devices of two sites and classes: online, offline, never seen, unjudged, with wrong clocks."""
    made = ServedHome(path)
    made.batch(
        registered(5, "silent", "north", **{"class": "meter"}),
        registered(5, "later", "north", effective_from_s=9_000),
        at_site("north", signal(10, "a")),
        at_site("north", signal(12, "b")),
        at_site("south", signal(20, "c")),
        tick(40),
    )
    made.batch(at_site("south", signal(150, "c")), at_site("south", signal(2_000, "ahead", received_s=160)), tick(200))
    made.batch(at_site("south", signal(60, "c", received_s=210)), at_site("south", signal(212, "c")), tick(260))
    made.refuse("json")
    made.refuse("flood", 40)
    return made
