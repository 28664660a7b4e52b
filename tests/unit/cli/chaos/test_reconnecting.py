"""Devices that reconnect: the instant for which a signal of a wrong clock proves presence."""

import pytest

from cli.chaos.reconnecting import LATENESS_MS, presence_ms

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("ahead_ms", "proven_ms"), [(0, 50_000), (3_600_000, 50_000), (-5_000, 45_000), (-LATENESS_MS, 50_000), (-600_000, 50_000)]
)
def test_a_clock_that_is_behind_proves_presence_at_its_own_time_unless_the_signal_is_late(ahead_ms: int, proven_ms: int) -> None:
    assert presence_ms(50_000, ahead_ms) == proven_ms
