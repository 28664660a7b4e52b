"""Hash of a device id, which stored states and rows contain, and its key group."""

import pytest

from fleetpulse.core.rows import hash64, key_group

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("device_id", "expected"),
    [("sensor-00003", 8_961_573_986_102_282_757), ("Zähler/7", -4_017_827_399_784_258_303), ("", -5_426_141_060_434_712_860)],
)
def test_the_hash_of_a_device_is_that_of_existing_homes(device_id: str, expected: int) -> None:
    assert hash64(device_id) == expected
    assert key_group(device_id, 7) == expected % 7
