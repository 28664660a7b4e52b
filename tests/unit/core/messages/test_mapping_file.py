"""Mapping files: an invalid rule is refused, with all faults of its file."""

from typing import Any

import pytest

from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.io.ingest.payload_paths import compile_path
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"topic": "fleet/{device}"}, "must not begin with"),
        ({"topic": "$SYS/{device}"}, "must not begin with"),
        ({"topic": "shelly-+/online"}, "a wildcard is a whole level"),
        ({"topic": "a/#"}, "a wildcard is a whole level"),
        ({"topic": "a/{device}-x"}, "a placeholder is a whole level"),
        ({"topic": "a/{thing}"}, "a placeholder is a whole level"),
        ({"topic": "a/{device...}/{site...}"}, "at most one placeholder"),
        ({"topic": "a/{device}/{device}"}, "device has 2 sources"),
        ({"device": {"path": "a"}}, "device has 2 sources"),
        ({"device": {"value": "a"}}, "device has 2 sources"),
        ({"topic": "a/{device}/{site}/{site...}"}, "site has 3 sources"),
        ({"topic": "a/{device}/{site}", "site": "h"}, "site has 2 sources"),
        ({"topic": "{device...}/x"}, "fixed number of levels"),
        ({"topic": "{device}/a/b/+"}, "must end with a word"),
        ({"topic": ""}, "must be a pattern"),
        ({"topic": 7}, "must be a pattern"),
        ({"kind": "dance"}, "kind must be one of"),
        ({"kind": {"values": {"a": "gap"}}}, "kind must be one of"),
        ({"kind": "ack"}, "kind must be one of"),
        ({"kind": {"path": "a"}}, "kind must be a text, or a table"),
        ({"seq": "rxInfo.0.x"}, "write an index in brackets"),
        ({"seq": {"value": "7"}}, "only site, device, kind and gateway can be constants"),
        ({"topic": "a/b", "device": {"path": "a", "value": "b"}}, "a table with one of"),
        ({"when": 3}, "when must be a path"),
        ({"ts_unit": "h"}, "ts_unit must be one of"),
        ({"ts_zone": "Mars/Base"}, "ts_zone must be a name"),
        ({"ts_else": "now"}, "ts_else must be one of"),
        ({"site": None}, "site is missing"),
        ({"unknown": 1}, "is unknown"),
    ],
)
def test_an_invalid_rule_is_refused_with_its_fault(options: dict[str, Any], fault: str) -> None:
    with refused("mapping-faulty", match=fault):
        given = {"topic": "a/{device}", "site": "h", "kind": "telemetry", **options}
        parse_mappings({"mapping": [{name: value for name, value in given.items() if value is not None}]}, compile_path)


def test_all_faults_of_a_mapping_file_are_listed() -> None:
    with refused("mapping-faulty") as caught:
        parse_mappings({"mapping": [{"topic": "a/{thing}", "ts_unit": "h"}], "more": 1}, compile_path)
    assert len(str(caught.value).splitlines()) == 7
    for content in ({}, {"mapping": 3}, {"mapping": [3]}, {"mapping": [{}] * 501}):
        with refused("mapping-faulty"):
            parse_mappings(content, compile_path)
