"""Benchmark of state operations: it fails if the state has too many bytes per device."""

import pytest

from bench.state import BYTES_BAR, require_few_bytes
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def test_the_benchmark_fails_above_its_limit_of_bytes_per_device() -> None:
    size = {"what": "the state", "bytes_a_device": BYTES_BAR}
    require_few_bytes([size, {"what": "migrate", "times": 9.9}])
    with refused("state-too-large", match=f"at most {BYTES_BAR} bytes per device; got {BYTES_BAR + 0.1}"):
        require_few_bytes([{**size, "bytes_a_device": BYTES_BAR + 0.1}])
