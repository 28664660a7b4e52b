"""Recordings of simulated fleets, as a person would have them of a real one."""

import gzip
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

from fleetpulse.core.scenario import Scenario, simulate


def record(path: Path, scenario: Scenario) -> Path:
    """Write what a simulated fleet sends in its history, garbage included; return the path."""
    end_ms = scenario.start_ms + scenario.history_ms
    with gzip.open(path, "wt") as file:
        for sent in takewhile(lambda one: one.received_at_ms < end_ms, simulate(scenario)):
            try:
                payload: Any = json.loads(sent.payload)
            except ValueError:
                payload = sent.payload.decode()
            file.write(json.dumps({"received_at_ms": sent.received_at_ms, "topic": sent.topic, "payload": payload}) + "\n")
    return path
