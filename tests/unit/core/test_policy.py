"""Policies: they read back unchanged, and an invalid one is refused with all its faults."""

import json
import re
from typing import Any

import pytest

from fleetpulse.core.messages.decode import decode
from fleetpulse.core.policy import Policy, PolicyFault, from_normalised, from_row, parse_policy
from fleetpulse.core.rows import Origin, Row
from tests.support.refusals import refused

NOW = 1_700_000_000_000


def test_an_invalid_policy_is_refused_with_all_its_faults() -> None:
    with refused("policy-faulty", PolicyFault) as caught:
        parse_policy({"rules": {"timeout": "-5m", "degraded": {"errors": 99}}, "classes": {"m": {"tmeout": "1m"}}, "x": 1})
    assert len(caught.value.faults) == 4
    assert any('rules.timeout must not be negative; got "-5m"' in fault for fault in caught.value.faults)


def _classes(count: int, code: str = "E", name: str = "") -> dict[str, Any]:
    return {"classes": {f"{name}{number}": {"flagged": {"codes": [code] * 8}} for number in range(count)}}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (_classes(501), "a policy can have at most 500 classes; got 501"),
        (_classes(1, name="c" * 256), "the name of a class must have 1 to 256 printable characters"),
        ({"classes": {"": {}}}, "got '' with 0"),
        (_classes(90, "E" * 256), "a policy can have at most 200,000 bytes in its stored form; got 2"),
        ({"rules": {"flagged": {"codes": ["E" * 257]}}}, "1 to 8 error codes, each with 1 to 256 printable characters"),
        ({"rules": {"flagged": {"codes": ["E"] * 9}}}, "1 to 8 error codes"),
    ],
)
def test_a_policy_beyond_the_limits_of_a_key_group_is_refused(content: dict[str, Any], fault: str) -> None:
    with refused("policy-faulty", PolicyFault, match=re.escape(fault)) as caught:
        parse_policy(content)
    assert len(caught.value.faults) == 1 and len(caught.value.faults[0]) < 400


@pytest.mark.parametrize(
    "content", [_classes(500), _classes(80, "E" * 256), _classes(55, "\u00e9" * 64), _classes(9, name="c" * 255)]
)
def test_an_accepted_policy_fits_into_its_message(content: dict[str, Any]) -> None:
    policy = parse_policy(content)
    payload = json.dumps({"policy": policy.normalised(), "effective_from": NOW}).encode()
    received = decode("fleet/_/_/policy", payload, NOW, Origin.COMMAND)
    assert isinstance(received, Row)
    assert from_row(received.contents()["policy"]) == policy


def test_a_policy_version_does_not_depend_on_spelling() -> None:
    assert (
        parse_policy({"rules": {"timeout": "60m"}}).version
        == parse_policy({"rules": {"timeout": "1h"}}).version
        == Policy().version
    )
    assert parse_policy({"rules": {"timeout": "61m"}}).version != Policy().version


def test_a_stored_policy_reads_back_unchanged() -> None:
    policy = parse_policy({"rules": {"timeout": "5m"}, "classes": {"m": {"timeout": "7m"}}})
    assert from_normalised(json.loads(json.dumps(policy.normalised()))) == policy


def test_rules_about_sessions_do_not_change_the_version_of_policies_without_them() -> None:
    plain = parse_policy({"rules": {"timeout": "5m"}})
    assert (
        parse_policy({"rules": {"timeout": "5m", "session": {"idle": "30m"}, "velocity": {"events": 0}}}).version == plain.version
    )
    counting = parse_policy({"rules": {"velocity": {"events": 3, "code": "E"}}, "classes": {"m": {"velocity": {"events": 0}}}})
    assert (counting.rules.velocity_events, counting.of("m").velocity_events) == (3, None)
    assert from_row(json.loads(json.dumps(counting.normalised()))) == counting


@pytest.mark.parametrize(
    ("velocity", "fault"),
    [
        ({"events": 1_001}, "must be a whole number from 1 to 1000, or 0 to switch the rule off; got 1001"),
        ({"events": True}, "must be a whole number from 1 to 1000"),
        ({"kind": "death"}, "must be one of birth, error, heartbeat, telemetry; got death"),
        ({"kind": 7}, "must be one of birth, error, heartbeat, telemetry; got 7"),
        ({"code": "E" * 257}, "must be an error code with 1 to 256 printable characters"),
        ({"kind": "birth", "code": "E"}, "rules.velocity.code needs velocity.kind = \"error\"; got 'birth'"),
    ],
)
def test_an_invalid_rule_about_a_session_is_refused(velocity: dict[str, Any], fault: str) -> None:
    with refused("policy-faulty", PolicyFault, match=re.escape(fault)):
        parse_policy({"rules": {"velocity": velocity}})
