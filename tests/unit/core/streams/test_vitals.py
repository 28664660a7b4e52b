"""Vitals of a policy: parsing, bounds, stored form, and the spans for which they count."""

import json
from typing import Any

import pytest

from fleetpulse.core.policy import Policy, PolicyFault, from_normalised, from_row, parse_policy
from fleetpulse.core.streams.vitals import Vital, VitalsSpan, spans_of

BATTERY = {"battery": {"window": "10m", "below": 3.2, "for": "20m"}}


def test_vitals_of_a_file_have_defaults_and_survive_the_stored_form() -> None:
    content = {"vitals": BATTERY | {"load": {"window": "10m", "slide": "5m"}, "heat": {"window": "1h", "above": 80}}}
    policy = parse_policy(content)
    assert policy.vitals == {
        "battery": Vital(600_000, 600_000, below=3.2, for_ms=1_200_000),
        "load": Vital(600_000, 300_000),
        "heat": Vital(3_600_000, 3_600_000, above=80, for_ms=3_600_000),
    }
    assert {metric: vital.described() for metric, vital in policy.vitals.items()} == {
        "battery": "window 10m, below 3.2 for 20m",
        "load": "window 10m, slide 5m",
        "heat": "window 1h, above 80 for 1h",
    }
    stored = json.loads(json.dumps(policy.normalised()))
    assert from_normalised(stored) == policy
    assert from_row(stored).version == policy.version


def test_a_policy_without_vitals_keeps_its_version() -> None:
    assert "vitals" not in Policy().normalised()
    assert parse_policy({"vitals": BATTERY}).version != Policy().version == parse_policy({"vitals": {}}).version


@pytest.mark.parametrize(
    ("vitals", "fault"),
    [
        ([], "vitals must be tables: [vitals.METRIC]"),
        ({"load": 5}, "[vitals.load] must be a table; got 5"),
        ({"load": {}}, 'vitals.load.window is missing; add a duration such as "10m"'),
        ({"load": {"window": 5}}, 'vitals.load.window must be a duration such as "10m"; got 5'),
        ({"load": {"window": "x"}}, "vitals.load.window must be a duration such as \"10m\"; got 'x'"),
        ({"load": {"window": "1m", "width": 1}}, '"vitals.load.width" is unknown; use one of window, slide, for, below, above'),
        ({"load": {"window": "500ms"}}, "vitals.load.window must lie between 1s and 1d; got 500ms"),
        ({"load": {"window": "10m", "slide": "3m"}}, "load.slide must divide the window (10m) into at most 12 parts; got 3m"),
        ({"load": {"window": "10m", "slide": "10s"}}, "into at most 12 parts; got 10s"),
        ({"load": {"window": "10m", "slide": "0s"}}, "into at most 12 parts; got 0s"),
        ({"load": {"window": "1m", "below": 1, "above": 2}}, "vitals.load can have below or above; got both"),
        ({"load": {"window": "1m", "for": "1m"}}, "vitals.load.for needs below or above"),
        ({"load": {"window": "1m", "below": True}}, "the bound of vitals.load must be a number between -1.8e308 and"),
        ({"load": {"window": "1m", "below": float("nan")}}, "vitals.load must be a number between -1.8e308 and 1.8e308; got nan"),
        ({"load": {"window": "1m", "below": -(10**400)}}, f"must be a number between -1.8e308 and 1.8e308; got -1{'0' * 98}"),
        ({"load": {"window": "1m", "above": float("1e400")}}, "must be a number between -1.8e308 and 1.8e308; got inf"),
        ({"load": {"window": "1m", "below": 1, "for": "30s"}}, "load.for must lie between the window (1m) and 30d; got 30s"),
        ({"\n": {"window": "1m"}}, "the name of a metric must have 1 to 256 printable characters"),
        ({str(one): {"window": "1m"} for one in range(21)}, "vitals of at most 20 metrics; got 21"),
        ({str(one): {"window": f"{one}m"} for one in range(1, 6)}, "at most 4 windows and slides; got 5"),
    ],
)  # fmt: skip
def test_faults_name_the_key_and_the_rule(vitals: Any, fault: str) -> None:
    with pytest.raises(PolicyFault) as error:
        parse_policy({"vitals": vitals})
    assert fault in str(error.value)


@pytest.mark.parametrize(
    "vitals",
    [
        [], {"load": None}, {"load": {"window_ms": "1m", "slide_ms": 1}}, {"load": {"window_ms": 60_000, "slide_ms": True}},
        {"load": {"window_ms": 60_000}}, {"load": {"window_ms": 60_000, "slide_ms": 60_000, "below": "low", "for_ms": 60_000}},
        {"load": {"window_ms": 60_000, "slide_ms": 60_000, "below": 1}},
        {"load": {"window_ms": [1], "slide_ms": [1]}, "heat": {"window_ms": 60_000, "slide_ms": {}}},
        {"load": {"window_ms": 60_000, "slide_ms": 60_000, "below": 10**400, "for_ms": 60_000}},
        {"load": {"window_ms": 60_000, "slide_ms": 60_000, "above": float("1e400"), "for_ms": 60_000}},
        {"load": {"window_ms": 10**400, "slide_ms": 60_000}}, {"load": {"window_ms": 60_000, "slide_ms": -(10**400)}},
    ],
)  # fmt: skip
def test_any_stored_vitals_are_refused_without_another_error(vitals: Any) -> None:
    with pytest.raises(PolicyFault):
        from_row(Policy().normalised() | {"vitals": vitals})


def test_spans_follow_the_effective_instants_but_not_before_receipt() -> None:
    one, two, three = ({name: Vital(60_000, 60_000)} for name in ("one", "two", "three"))
    assert spans_of([(100, 50, one), (0, 200, two), (300, 120, three), (400, 130, three), (500, 140, {})]) == (
        VitalsSpan(100, one),
        VitalsSpan(300, three),
        VitalsSpan(500, {}),
    )
    assert spans_of([(10, 30, one), (20, 30, two)]) == (VitalsSpan(31, two),)
    assert spans_of([(10, 5, {})]) == ()
