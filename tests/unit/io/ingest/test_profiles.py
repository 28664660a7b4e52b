"""Profiles: samples of each product become the expected rows.

``tests/golden/profiles/<profile>.json`` has samples with the shapes of the product's documentation or
sources, whose addresses are in ``sources``. ``event_time_ms`` null is the time of receipt; ``metrics`` is a part
of the row's. Optional fields that a sample does not name are null.
"""

import base64
import json
import tomllib
from functools import cache
from typing import Any

import pytest

from fleetpulse.core.messages.mapping import Mappings, rows_of
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.core.messages.topic_filters import covers
from fleetpulse.core.rows import Clock, Origin, Row
from fleetpulse.io.ingest import profiles
from fleetpulse.io.ingest.payload_paths import compile_path
from fleetpulse.paths import ROOT

pytestmark = pytest.mark.unit
NOW = 1_789_000_000_000
GOLDEN = ROOT / "tests" / "golden" / "profiles"
PAGE = ROOT / "docs" / "how-to" / "profiles.md"
OPTIONAL = ("gateway", "boot", "session", "seq", "uptime_s", "code", "firmware")
MAX_ABOUT = 120
Sample = dict[str, Any]


@cache
def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text())


@cache
def rules(name: str) -> Mappings:
    return profiles.load_profile(name, "hall")


def payload(sample: Sample) -> bytes:
    return base64.b64decode(sample["base64"]) if "base64" in sample else sample["payload"].encode()


SAMPLES = [pytest.param(name, one, id=f"{name}: {one['what']}") for name in profiles.names() for one in golden(name)["samples"]]
each_profile = pytest.mark.parametrize("name", profiles.names())


@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_a_sample_becomes_its_rows(name: str, sample: Sample) -> None:
    assert sample["source"] in golden(name)["sources"]
    found = rows_of(rules(name).decode(sample["topic"], payload(sample), NOW, Origin.MQTT))
    assert len(found) == len(sample["expected"]), found
    for one, expected in zip(found, sample["expected"], strict=True):
        assert isinstance(one, Row), one
        assert (one.site, one.device_id, one.kind) == ("hall", expected["device_id"], expected["kind"])
        at_ms = expected["event_time_ms"]
        assert (one.event_time_ms, one.clock) == ((NOW, Clock.RECEIVED) if at_ms is None else (at_ms, Clock.DEVICE))
        assert {field: getattr(one, field) for field in OPTIONAL} == {field: expected.get(field) for field in OPTIONAL}
        assert (one.metrics is None) is ("metrics" not in expected), one.metrics
        metrics = json.loads(one.metrics or "{}")
        assert metrics | expected.get("metrics", {}) == metrics
        if "note" in expected or at_ms is not None:
            assert one.note == expected.get("note")


@each_profile
def test_each_rule_takes_a_sample(name: str) -> None:
    mappings = rules(name)
    taken = [mappings.taken_by(mappings.match(one["topic"]), payload(one)) for one in golden(name)["samples"]]
    numbers = {mappings.rules.index(one[0]) for one in taken if one is not None}
    assert [rule.pattern for number, rule in enumerate(mappings.rules) if number not in numbers] == []


@each_profile
def test_subscriptions_are_as_narrow_as_the_samples_require(name: str) -> None:
    subscriptions = rules(name).subscriptions()
    assert list(subscriptions) == golden(name)["subscriptions"]
    topics = {one["topic"] for one in golden(name)["samples"] if one["expected"]}
    for subscription in subscriptions:
        of_others = [other for other in subscriptions if other != subscription]
        own = {topic for topic in topics if covers(subscription, topic) and not any(covers(one, topic) for one in of_others)}
        assert own, f"{subscription} adds no sample"
        levels = {topic.count("/") for topic in own}
        assert not subscription.endswith("#") or len(levels) > 1, f"{subscription} has samples of one number of levels"
        assert subscription not in ("#", "+/#")


@each_profile
def test_a_profile_is_described(name: str) -> None:
    about = profiles.about(name)
    assert about and "\n" not in about and len(about) <= MAX_ABOUT and not about.startswith("#")
    assert f"\n| `{name}` |" in PAGE.read_text(), f"{PAGE} must have a row for the profile"


def test_all_profiles_have_samples_and_fit_into_one_home() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.json")) == list(profiles.names())
    text = "\n".join(profiles.read_profile(name, "hall") for name in profiles.names())
    assert "SITE" not in text
    parse_mappings(tomllib.loads(text), compile_path)
