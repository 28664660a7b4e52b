"""Comparison of the judgements of the job with those of the definition."""

from collections import Counter
from typing import Any

import pytest

from fleetpulse.reports.operations.agreement import differences

pytestmark = pytest.mark.unit


def test_each_verdict_on_one_side_only_is_a_difference() -> None:
    def verdict(device: str) -> tuple[Any, ...]:
        return ("transition", device, *[None] * 19)

    found = differences(Counter({verdict("a"): 2, verdict("b"): 1}), Counter([verdict("a"), verdict("c")]))
    assert sorted((one["side"], one["device_id"]) for one in found) == [("defined", "c"), ("emitted", "a"), ("emitted", "b")]
