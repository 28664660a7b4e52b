"""MQTT topic filters: one covers another, or two overlap."""

import pytest

from fleetpulse.core.messages.topic_filters import covers, overlap


@pytest.mark.parametrize(
    ("wide", "narrow", "covered"),
    [
        ("a/#", "a/b", True),
        ("a/+", "a/#", False),
        ("+/b", "$aws/b", False),
        ("#", "$aws/b", False),
        ("a/b", "a", False),
        ("#", "a", True),
    ],
)
def test_a_filter_covers_another(wide: str, narrow: str, covered: bool) -> None:
    assert covers(wide, narrow) is covered


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        *(("a/+", "+/b", True), ("a/#", "a", True), ("a/#", "a/b/c", True), ("#", "a/b", True), ("a/b", "a/b", True)),
        *(("a/+", "a/b/c", False), ("a/b", "a/c", False), ("a/#", "b/#", False), ("a/+/c", "a/b", False)),
    ],
)
def test_filters_overlap_if_a_topic_matches_both(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) is overlap(other, one) is expected
