"""Decoding, policies, durations and mappings: bad input is a value with a reason."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.messages.decode import Rejection, decode
from fleetpulse.core.messages.mapping import decode_mapped, parse_mappings
from fleetpulse.core.policy import Policy, PolicyFault, from_normalised, from_row, parse_policy
from fleetpulse.core.presence.coverage import Coverage, ShardProgress
from fleetpulse.core.replay import Deployment, outcome
from fleetpulse.core.rows import Clock, Origin, Row
from fleetpulse.core.times import format_duration, format_instant, parse_duration_ms, parse_instant_ms
from tests.support.histories.histories import START, row, signal, tick
from tests.support.refusals import refused

NOW = 1_700_000_000_000


@given(st.text(max_size=40) | st.just("fleet/a/b/heartbeat"), st.binary(max_size=60))
def test_whatever_comes_becomes_a_row_or_a_rejection(topic: str, payload: bytes) -> None:
    assert isinstance(decode(topic, payload, NOW), Row | Rejection)


@given(
    st.dictionaries(
        st.sampled_from(["ts", "seq", "boot", "code", "metrics", "gateway"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_any_json_becomes_a_row_or_a_rejection(content: dict[str, Any]) -> None:
    row = decode("fleet/a/b/telemetry", json.dumps(content).encode(), NOW)
    if isinstance(row, Row):
        assert row.event_time_ms is not None or row.clock is Clock.INVALID
        assert row.seq is None or 0 <= row.seq < 2**63


@pytest.mark.parametrize(
    ("topic", "payload", "reason"),
    [
        ("other/a/b/heartbeat", b"{}", "topic"),
        ("fleet/a/heartbeat", b"{}", "topic"),
        ("fleet/a/b/dance", b"{}", "topic"),
        ("fleet/_/b/heartbeat", b"{}", "topic"),
        ("fleet/_/_/registry", b"{}", "topic"),
        ("fleet/_/_/control", b"{}", "topic"),
        ("fleet/a/" + "b" * 129 + "/heartbeat", b"{}", "topic"),
        ("fleet/a/b/heartbeat", b"\xff", "json"),
        ("fleet/a/b/heartbeat", b"[]", "json"),
        ("fleet/a/b/heartbeat", b'{"ts": NaN}', "json"),
        ("fleet/a/b/heartbeat", b'{"seq": -1}', "field"),
        ("fleet/a/b/heartbeat", b'{"seq": "1"}', "field"),
        ("fleet/a/b/heartbeat", b'{"metrics": 3}', "field"),
        ("fleet/a/b/heartbeat", b'{"a":' * 20 + b"1" + b"}" * 20, "depth"),
        ("fleet/a/b/heartbeat", b" " * 300_000, "size"),
        ("fleet/a/b/control", b"{}", "reserved"),
        ("fleet/_/_/policy", b"{}", "reserved"),
    ],
)
def test_what_cannot_be_decoded_says_why(topic: str, payload: bytes, reason: str) -> None:
    rejected = decode(topic, payload, NOW)
    assert isinstance(rejected, Rejection)
    assert rejected.reason == reason


@pytest.mark.parametrize(("name", "said"), [("device_id", "other"), ("site", "other"), ("kind", "birth"), ("device_id", 7)])
def test_a_payload_that_names_another_than_the_topic_is_refused(name: str, said: Any) -> None:
    refused = decode("fleet/s/d/heartbeat", json.dumps({name: said}).encode(), NOW)
    assert isinstance(refused, Rejection)
    assert (refused.reason, name in refused.detail) == ("disagreement", True)


def test_a_payload_may_repeat_what_the_topic_says() -> None:
    assert isinstance(decode("fleet/s/d/heartbeat", b'{"device_id":"d","site":"s","kind":"heartbeat"}', NOW), Row)


@pytest.mark.parametrize(
    ("ts", "hint"),
    [
        (1_700_000_000, "looks like seconds"),
        ("2023-11-14T22:13:20Z", "looks like ISO 8601"),
        ("1700000000000", "in quotes"),
        (NOW * 1000, "micro"),
    ],
)
def test_a_ts_in_another_unit_gets_a_hint(ts: Any, hint: str) -> None:
    row = decode("fleet/a/b/heartbeat", json.dumps({"ts": ts}).encode(), NOW)
    assert isinstance(row, Row)
    assert row.clock is Clock.INVALID
    assert hint in (row.note or "")


def test_event_time_is_whole_milliseconds_rounded_down() -> None:
    row = decode("fleet/a/b/heartbeat", b'{"ts": 1700000000000.9}', NOW)
    assert isinstance(row, Row)
    assert row.event_time_ms == NOW


def test_a_policy_names_all_its_faults_at_once() -> None:
    with refused("policy-faulty", PolicyFault) as caught:
        parse_policy({"rules": {"timeout": "-5m", "degraded": {"errors": 99}}, "classes": {"m": {"tmeout": "1m"}}, "x": 1})
    assert len(caught.value.faults) == 4
    assert any('rules.timeout must not be negative; got "-5m"' in fault for fault in caught.value.faults)


def _classes(count: int, code: str = "E", name: str = "") -> dict[str, Any]:
    return {"classes": {f"{name}{one}": {"flagged": {"codes": [code] * 8}} for one in range(count)}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (_classes(501), "a policy lists at most 500 classes; got 501"),
        (_classes(1, name="c" * 256), "the name of a class has 1 to 256 printable characters"),
        ({"classes": {"": {}}}, "got '', which has 0"),
        (_classes(90, "E" * 256), "a policy has at most 200,000 bytes as it is stored; got 2"),
        ({"rules": {"flagged": {"codes": ["E" * 257]}}}, "1 to 8 error codes, each of 1 to 256 printable characters"),
        ({"rules": {"flagged": {"codes": ["E"] * 9}}}, "1 to 8 error codes"),
    ],
)
def test_a_policy_beyond_what_a_key_group_keeps_is_refused_wherever_it_is_read(content: dict[str, Any], says: str) -> None:
    with refused("policy-faulty", PolicyFault, match=re.escape(says)) as caught:
        parse_policy(content)
    assert len(caught.value.faults) == 1 and len(caught.value.faults[0]) < 400


@pytest.mark.parametrize(
    "content", [_classes(500), _classes(80, "E" * 256), _classes(55, "\u00e9" * 64), _classes(9, name="c" * 255)]
)
def test_a_policy_that_is_taken_fits_into_the_message_that_carries_it(content: dict[str, Any]) -> None:
    policy = parse_policy(content)
    payload = json.dumps({"policy": policy.normalised(), "effective_from": NOW}).encode()
    came = decode("fleet/_/_/policy", payload, NOW, Origin.COMMAND)
    assert isinstance(came, Row)
    assert from_row(came.contents()["policy"]) == policy


def test_a_policy_version_does_not_depend_on_spelling() -> None:
    assert (
        parse_policy({"rules": {"timeout": "60m"}}).version
        == parse_policy({"rules": {"timeout": "1h"}}).version
        == Policy().version
    )
    assert parse_policy({"rules": {"timeout": "61m"}}).version != Policy().version


def test_a_stored_policy_reads_back_as_it_was() -> None:
    policy = parse_policy({"rules": {"timeout": "5m"}, "classes": {"m": {"timeout": "7m"}}})
    assert from_normalised(json.loads(json.dumps(policy.normalised()))) == policy


@given(st.integers(min_value=0, max_value=10**12))
def test_durations_and_instants_read_back_as_they_were(ms: int) -> None:
    assert parse_duration_ms(format_duration(ms)) == ms
    assert parse_instant_ms(format_instant(ms)) == ms


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60)), max_size=4), st.integers(0, 300))
def test_covered_time_has_its_inverses(gaps: list[tuple[int, int]], instant: int) -> None:
    coverage = Coverage(10)
    for opened, length in sorted(gaps):
        coverage = coverage.open_gap(opened, "b").close_gap(opened + length, "b")
    missed = sum(coverage.covered(t + 1) == coverage.covered(t) for t in range(10, instant)) if instant > 10 else 0
    assert coverage.covered(instant) == max(0, instant - 10 - missed)
    covered = coverage.covered(instant)
    earliest, greatest = coverage.earliest(covered), coverage.greatest(covered)
    assert earliest is not None
    assert greatest is not None
    assert coverage.covered(earliest) == coverage.covered(greatest) == covered
    assert earliest <= max(instant, 10) <= greatest
    assert coverage.covered(greatest + 1) == covered + 1
    later = coverage.forget_before(instant)
    assert [later.covered(t) for t in range(instant, instant + 100)] == [
        coverage.covered(t) for t in range(instant, instant + 100)
    ]


def test_a_gap_never_reaches_behind_the_frontier() -> None:
    listening = ShardProgress.begin(0).read(1_000, 100)
    assert listening.frontier_ms == 900
    listening = listening.open_gap(1_001, 500, "b").read(2_000, 100)
    assert listening.frontier_ms == 900
    assert listening.coverage.gaps == ((900, None),)


@given(st.lists(st.tuples(st.integers(10, 200), st.integers(0, 60), st.sampled_from("abc")), max_size=6), st.integers(0, 300))
def test_a_gap_is_what_any_bridge_says_of_itself(spans: list[tuple[int, int, str]], instant: int) -> None:
    said = sorted([(since, True, by) for since, _, by in spans] + [(since + length, False, by) for since, length, by in spans])
    coverage, deaf, missed = Coverage(10), dict[str, int](), set[int]()
    for at, opens, by in said:
        coverage = coverage.open_gap(at, by) if opens else coverage.close_gap(at, by)
        if opens:
            deaf.setdefault(by, at)
        elif by in deaf:
            missed |= set(range(deaf.pop(by), at))
    for since in deaf.values():
        missed |= set(range(since, 301))
    assert coverage.covered(instant) == max(0, instant - 10 - len([t for t in missed if t < instant]))


def test_a_bridge_that_was_deaf_for_longer_lets_an_open_gap_begin_earlier() -> None:
    coverage = Coverage(0).open_gap(50, "a").open_gap(30, "b").close_gap(90, "b")
    assert (coverage.gaps, coverage.deaf) == (((30, None),), ("a",))
    assert coverage.close_gap(70, "a").gaps == ((30, 90),)


def test_the_row_that_opens_a_gap_does_not_judge_the_span_that_it_excuses() -> None:
    before = [signal(0, received_s=0), tick(2)]
    opened = row(600, "fleet/_/b/gap", op="open", from_s=2, why="broker")
    told = outcome([*before, opened, signal(601)], Deployment(1_000))
    assert told.shards is not None
    assert told.shards.frontier_ms == START + 1_000
    assert told.shards.listenings[0].coverage.gaps == ((START + 2_000, None),)


def test_a_mapping_takes_in_a_foreign_device() -> None:
    mappings = parse_mappings(
        {
            "mapping": [
                {
                    "topic": "zigbee/{device}/state",
                    "site": "home",
                    "kind": "telemetry",
                    "ts": "meta.at",
                    "ts_unit": "s",
                    "seq": "n",
                }
            ]
        }
    )
    row = decode_mapped(mappings, "zigbee/lamp/state", b'{"meta": {"at": 1700000000}, "n": 7}', NOW, Origin.MQTT)
    assert isinstance(row, Row)
    assert (row.device_id, row.site, row.event_time_ms, row.seq) == ("lamp", "home", NOW, 7)
    assert mappings[0].subscription == "zigbee/+/state"


def test_a_mapping_names_all_its_faults() -> None:
    with refused("mapping-faulty") as caught:
        parse_mappings({"mapping": [{"topic": "a/{thing}", "ts_unit": "h"}]})
    assert len(str(caught.value).splitlines()) == 6
