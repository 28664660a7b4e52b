"""Devices that reconnect: the instant for which a signal of a wrong clock proves presence."""

import json

import pytest

from cli.chaos.reconnecting import LATENESS_MS, presence_ms

pytestmark = pytest.mark.unit


NOW = 1_700_000_000_000


@pytest.mark.parametrize(
    ("ahead_ms", "proven_ms"), [(0, 0), (1_000, 0), (3_600_000, 0), (-5_000, -5_000), (-LATENESS_MS, 0), (-600_000, 0)]
)
def test_a_clock_that_is_behind_proves_presence_at_its_own_time_unless_the_signal_is_late(ahead_ms: int, proven_ms: int) -> None:
    payload = json.dumps({"ts": NOW + ahead_ms}).encode()
    assert presence_ms("fleet/s/d/heartbeat", payload, NOW) - NOW == proven_ms
