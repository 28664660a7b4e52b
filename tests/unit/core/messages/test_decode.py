"""Decoding of messages: any input becomes a row, or a rejection with a reason."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetpulse.core.messages.decode import NO_TS, Rejection, decode, program_command
from fleetpulse.core.rows import Clock, Origin, Row
from fleetpulse.core.streams.commands import COMMAND_FIELDS, delivery

NOW = 1_700_000_000_000


@given(st.text(max_size=40) | st.just("fleet/a/b/heartbeat"), st.binary(max_size=60))
def test_any_topic_and_payload_become_a_row_or_a_rejection(topic: str, payload: bytes) -> None:
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


_FIELDS = st.none() | st.integers() | st.text(max_size=3) | st.just("command") | st.dictionaries(st.text(max_size=2), st.none())


@given(st.sampled_from(["oslo", "_"]), st.dictionaries(st.sampled_from(["op", *COMMAND_FIELDS, "until", "site"]), _FIELDS))
def test_a_command_of_a_program_is_a_control_row_of_the_command_line_or_a_rejection(site: str, content: dict[str, Any]) -> None:
    topic, payload = f"fleet/{site}/pump-1/control", json.dumps(content).encode()
    found, refused = program_command(topic, payload), decode(topic, payload, NOW)
    assert isinstance(refused, Rejection), "only the bridge takes it"
    if isinstance(found, Rejection):
        assert refused == found
    else:
        assert set(found) <= {"op", *COMMAND_FIELDS} and refused.reason == "reserved"
        assert isinstance(decode(topic, json.dumps(found).encode(), NOW, Origin.COMMAND), Row)
        assert delivery(topic, found, NOW) is not None


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
        ("fleet/a/b/heartbeat", b'{"a":' * 20 + b"1" + b"}" * 20, "depth"),
        ("fleet/a/b/heartbeat", b" " * 300_000, "size"),
        ("fleet/a/b/control", b"{}", "reserved"),
        ("fleet/a/b/control", b"[]", "json"),
        ("fleet/a/b/control", b'{"op":"command","id":"c","name":"set"}', "reserved"),
        ("fleet/_/_/policy", b"{}", "reserved"),
    ],
)
def test_a_rejection_gives_its_reason(topic: str, payload: bytes, reason: str) -> None:
    rejected = decode(topic, payload, NOW)
    assert isinstance(rejected, Rejection)
    assert rejected.reason == reason


@pytest.mark.parametrize(
    ("name", "value"),
    [("seq", -1), ("seq", "7"), ("uptime_s", 1.5), ("code", ""), ("boot", []), ("firmware", 7), ("metrics", 3)],
)
def test_an_invalid_value_costs_its_field_with_a_note(name: str, value: Any) -> None:
    content = {"ts": NOW, "session": "s1", name: value}
    row = decode("fleet/s/d/heartbeat", json.dumps(content).encode(), NOW)
    assert isinstance(row, Row)
    assert (row.event_time_ms, row.session, getattr(row, name)) == (NOW, "s1", None)
    assert row.note is not None and row.note.startswith(f"{name} must be ") and row.note.endswith("; it is left out")


def test_notes_of_several_fields_are_joined() -> None:
    row = decode("fleet/s/d/heartbeat", b'{"seq": -1, "code": ""}', NOW)
    assert isinstance(row, Row)
    assert (row.note or "").count("; it is left out") == 2 and (row.note or "").startswith(NO_TS)


def test_numbers_that_json_does_not_have_are_null() -> None:
    row = decode("fleet/s/d/telemetry", b'{"ts": NaN, "metrics": {"a": NaN, "b": -Infinity, "c": 1e400, "d": 1.5}}', NOW)
    assert isinstance(row, Row)
    assert (row.event_time_ms, row.note) == (NOW, NO_TS)
    assert json.loads(row.metrics or "") == {"a": None, "b": None, "c": None, "d": 1.5}


@pytest.mark.parametrize(("name", "value"), [("device_id", "other"), ("site", "other"), ("kind", "birth"), ("device_id", 7)])
def test_a_payload_that_contradicts_its_topic_is_rejected(name: str, value: Any) -> None:
    rejected = decode("fleet/s/d/heartbeat", json.dumps({name: value}).encode(), NOW)
    assert isinstance(rejected, Rejection)
    assert (rejected.reason, name in rejected.detail) == ("disagreement", True)


def test_a_payload_may_repeat_fields_of_its_topic() -> None:
    assert isinstance(decode("fleet/s/d/heartbeat", b'{"device_id":"d","site":"s","kind":"heartbeat"}', NOW), Row)


ISO_HINT = 'looks like ISO 8601: send epoch milliseconds, or map it with ts_unit = "iso" (and ts_zone, if it names no time zone)'


@pytest.mark.parametrize(
    ("ts", "hint"),
    [
        (1_700_000_000, "looks like seconds"),
        ("2023-11-14T22:13:20Z", ISO_HINT),
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


def test_an_answer_is_a_row_with_its_content_as_body() -> None:
    content = {"ts": NOW - 5, "id": 7, "status": "accepted", "reported": {"b": 1, "a": None}, "firmware": "2.0", "other": 1}
    row = decode("fleet/s/d/ack", json.dumps(content).encode(), NOW)
    assert isinstance(row, Row)
    assert (row.kind, row.event_time_ms, row.firmware, row.note) == ("ack", NOW - 5, "2.0", None)
    assert row.body == '{"id":"7","reported":{"a":null,"b":1},"status":"accepted"}'


@pytest.mark.parametrize(
    ("change", "note", "body"),
    [
        ({"status": "done"}, "status must be one of accepted, rejected", None),
        ({"id": ""}, "id must be a printable text", None),
        ({"id": None}, "id must name a command", None),
        ({"reason": ""}, "reason must be a printable text", '{"id":"c","status":"accepted"}'),
        ({"reported": [1]}, "reported must be a JSON object", '{"id":"c","status":"accepted"}'),
    ],
)
def test_an_invalid_answer_still_proves_its_device_alive(change: dict[str, Any], note: str, body: str | None) -> None:
    row = decode("fleet/s/d/ack", json.dumps({"ts": NOW, "id": "c", "status": "accepted", **change}).encode(), NOW)
    assert isinstance(row, Row)
    assert note in (row.note or "") and row.body == body


@pytest.mark.parametrize("change", [{"id": None}, {"name": None}, {"name": "a\n"}, {"payload": 3}])
def test_a_command_without_id_and_name_or_with_a_payload_that_is_no_object_is_rejected(change: dict[str, Any]) -> None:
    content = {"op": "command", "id": "c", "name": "set", "payload": {"a": 1}}
    assert isinstance(decode("fleet/s/d/control", json.dumps(content).encode(), NOW, Origin.COMMAND), Row)
    rejected = decode("fleet/s/d/control", json.dumps({**content, **change}).encode(), NOW, Origin.COMMAND)
    assert isinstance(rejected, Rejection) and rejected.reason == "field"
