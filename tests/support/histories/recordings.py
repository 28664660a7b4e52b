"""Recordings of simulated fleets, in the format of recordings of real ones."""

import gzip
import json
import os
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.rows import Clock, Row
from streaming.simulator.scenario import Scenario, simulate

RECORDED_FLEET = Path(os.environ.get("FLEET_RECORDING", ""))
NEEDS_RECORDED_FLEET = pytest.mark.skipif(
    not RECORDED_FLEET.is_file(), reason="the recorded fleet is not in this tree; set FLEET_RECORDING to its path"
)
_SENT_FIELDS = ("boot", "session", "seq", "code", "firmware", "gateway")
_NO_TIME = 5  # an invalid ts


def record(path: Path, scenario: Scenario) -> Path:
    """Write the messages of a simulated fleet's history, including undecodable ones.

    Returns:
        Path of the recording.
    """
    end_ms = scenario.start_ms + scenario.history_ms
    with gzip.open(path, "wt") as file:
        for sent in takewhile(lambda one: one.received_at_ms < end_ms, simulate(scenario)):
            try:
                payload: Any = json.loads(sent.payload)
            except ValueError:
                payload = sent.payload.decode()
            file.write(json.dumps({"received_at_ms": sent.received_at_ms, "topic": sent.topic, "payload": payload}) + "\n")
    return path


def record_rows(path: Path, rows: Iterable[Row]) -> Path:
    """Write rows as the messages that they were decoded from; return the path."""
    with gzip.open(path, "wt") as file:
        for row in rows:
            payload: Any = json.loads(row.body) if row.body else _payload(row)
            topic = f"fleet/{row.site}/{row.device_id}/{row.kind}"
            file.write(json.dumps({"received_at_ms": row.received_at_ms, "topic": topic, "payload": payload}) + "\n")
    return path


def _payload(row: Row) -> dict[str, Any]:
    content = {name: value for name in _SENT_FIELDS if (value := getattr(row, name)) is not None}
    if row.clock is Clock.RECEIVED:
        return content
    return {**content, "ts": _NO_TIME if row.event_time_ms is None else row.event_time_ms}
