"""Times: durations and instants read back unchanged, and coverage gaps are not covered time."""

from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.times import format_duration, format_instant, parse_duration_ms, parse_instant_ms


@given(st.integers(min_value=0, max_value=10**12))
def test_durations_and_instants_read_back_unchanged(ms: int) -> None:
    assert parse_duration_ms(format_duration(ms)) == ms
    assert parse_instant_ms(format_instant(ms)) == ms
