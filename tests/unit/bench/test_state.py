"""The benchmark of moving the state: what it holds the state to."""

import pytest

from bench.state import BYTES_BAR, require_few_bytes
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def test_a_state_of_too_many_bytes_a_device_fails_the_benchmark_that_measures_it() -> None:
    size = {"what": "the state", "bytes_a_device": BYTES_BAR}
    require_few_bytes([size, {"what": "migrate", "times": 9.9}])
    with refused("state-too-large", match=f"at most {BYTES_BAR} bytes per device; got {BYTES_BAR + 0.1}"):
        require_few_bytes([{**size, "bytes_a_device": BYTES_BAR + 0.1}])
