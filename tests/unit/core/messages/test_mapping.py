"""Mappings: messages of foreign devices become rows, and an invalid mapping is refused."""

import json
import random
import tracemalloc
from collections import Counter
from itertools import product
from typing import Any

import pytest

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.decode import NO_TS, Rejection
from fleetpulse.core.messages.mapping import MAX_ITEMS, Mappings, rows_of
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.core.messages.topic_filters import covers
from fleetpulse.core.presence.gateways import GatewayEvent, Gateways
from fleetpulse.core.rows import Clock, Origin, Row, identity
from fleetpulse.io.ingest.payload_paths import compile_path

NOW = 1_789_000_000_000
S = NOW // 1_000
BY_WORD = {"values": {"Online": "birth", "Offline": "death"}}
BY_STATE = {"path": "state || @", "values": {"online": "birth", "offline": "death"}}
PRESENCE = "$aws/events/presence/{kind}/{device}"


def rule(topic: str, **options: Any) -> Mappings:
    """Return mappings of one rule; site h and kind telemetry are its defaults."""
    given = {"topic": topic, "site": "h", "kind": "telemetry", **options}
    return parse_mappings({"mapping": [{name: value for name, value in given.items() if value is not None}]}, compile_path)


def rows(mappings: Mappings, topic: str, payload: Any, at_ms: int = NOW) -> list[Row | Rejection]:
    """Return the results of a message; a payload other than bytes is written as JSON."""
    raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return list(rows_of(mappings.decode(topic, raw, at_ms, Origin.MQTT)))


def row(mappings: Mappings, topic: str, payload: Any) -> Row:
    [found] = rows(mappings, topic, payload)
    assert isinstance(found, Row), found
    return found


def test_fields_are_read_at_their_paths() -> None:
    found = rule(
        "a/{device}",
        **{name: f"data.{name}" for name in ("seq", "code", "boot", "session", "firmware")},
        gateway="rx[0].gatewayId",
        uptime_s="data.up",
        ts="data.at",
        ts_unit="s",
        metrics="data.values",
    )
    data = {"seq": "7", "code": 5, "boot": "b", "session": "s", "firmware": "1.2", "up": 3.0, "at": S, "values": {"t": 1.5}}
    one = row(found, "a/d", {"data": data, "rx": [{"gatewayId": "g"}]})
    assert (one.device_id, one.site, one.event_time_ms, one.seq, one.code, one.boot) == ("d", "h", NOW, 7, "5", "b")
    assert (one.session, one.firmware, one.gateway, one.uptime_s, one.metrics, one.note) == (
        "s",
        "1.2",
        "g",
        3,
        '{"t":1.5}',
        None,
    )


@pytest.mark.parametrize(
    ("kind", "payload", "expected"),
    [
        (BY_WORD, b"Online", "birth"),
        (BY_WORD, b"Offline", "death"),
        (BY_WORD, b'"Offline"', "death"),
        (BY_WORD, b"offline", None),
        ({**BY_WORD, "else": "heartbeat"}, b"offline", "heartbeat"),
        (BY_STATE, b'{"state": "offline"}', "death"),
        (BY_STATE, b"offline", "death"),
        ({"path": "up", "values": {"true": "birth", "0": "death"}}, b'{"up": true}', "birth"),
        ({"path": "up", "values": {"true": "birth", "0": "death"}}, b'{"up": 0}', "death"),
        ({"path": "up", "values": {"true": "birth"}}, b"\xff", None),
    ],
)
def test_a_value_decides_the_kind(kind: dict[str, Any], payload: bytes, expected: str | None) -> None:
    found = rows(rule("tele/{device}/LWT", kind=kind), "tele/plug/LWT", payload)
    assert [one.kind for one in found if isinstance(one, Row)] == ([] if expected is None else [expected])
    assert all(isinstance(one, Row) for one in found)


def test_the_first_rule_whose_condition_holds_takes_a_message() -> None:
    table = {"topic": "a/{device}", "site": "h"}
    mappings = parse_mappings(
        {
            "mapping": [
                {**table, "kind": "error", "when": "code && !ok", "code": "code"},
                {**table, "kind": "heartbeat", "when": "ok"},
            ]
        },
        compile_path,
    )
    assert row(mappings, "a/d", {"code": 7}).kind == "error"
    assert row(mappings, "a/d", {"code": 7, "ok": True}).kind == "heartbeat"
    assert rows(mappings, "a/d", {}) == []


@pytest.mark.parametrize(
    ("pattern", "topic", "device_id"),
    [
        ("{device}/status", "livingroom/status", "livingroom"),
        ("{device}/events/rpc", "shellyplus1-a8/events/rpc", "shellyplus1-a8"),
        ("zigbee2mqtt/{device...}", "zigbee2mqtt/living_room/x/doorsensor", "living_room:x:doorsensor"),
        ("zigbee2mqtt/{device...}", "zigbee2mqtt/lamp 1", "lamp 1"),
        ("a/{device...}/state", "a/b/c/state", "b:c"),
        ("/a/{device}", "/a/d", "d"),
        ("a/+/{device}", "a/any/d", "d"),
    ],
)
def test_a_pattern_finds_the_device(pattern: str, topic: str, device_id: str) -> None:
    assert row(rule(pattern), topic, {}).device_id == device_id


def test_a_gateway_path_that_yields_the_device_makes_its_will_a_gateways_death() -> None:
    mapped = rule("g/{device}", kind=BY_STATE, gateway="gatewayId")
    will = row(mapped, "g/g1", {"state": "offline", "gatewayId": "g1"})
    assert (will.kind, will.device_id, will.gateway) == ("death", "g1", "g1")
    gateways = Gateways(60_000)
    assert gateways.read(will) is GatewayEvent.DEATH
    assert gateways.read(row(mapped, "g/d", {"state": "offline", "gatewayId": "g1"})) is None, "a device behind it"


def test_patterns_with_spaces_are_named() -> None:
    assert rule("living room/{device}").patterns_with_spaces() == ("living room/{device}",)
    assert rule("+/{device}").patterns_with_spaces() == ()
    assert rule("living room/{device}", kind="ignore").patterns_with_spaces() == (), "it has no subscription"


@pytest.mark.parametrize("topic", ["fleet/status", "spBv1.0/status", "replay/status", "$SYS/status", "a/b/status", "status"])
def test_a_first_placeholder_matches_no_topic_of_another_kind(topic: str) -> None:
    assert rule("{device}/status").match(topic) == ()


def test_items_of_arrays_and_objects_are_messages_of_several_devices() -> None:
    each = rule("g/{gateway}", each="@", device={"path": "macid"}, ts="t", ts_unit="s")
    items = [{"macid": "A", "t": S}, {"macid": "B", "t": S - 60}, {"macid": ["no id"]}]
    a, b, refused_item = rows(each, "g/gw1", items)
    assert isinstance(a, Row) and isinstance(b, Row)
    assert [(one.device_id, one.event_time_ms, one.gateway) for one in (a, b)] == [("A", NOW, "gw1"), ("B", NOW - 60_000, "gw1")]
    assert isinstance(refused_item, Rejection) and refused_item.reason == "field"
    keyed = rule("g", each="@", device={"path": "key"}, ts="value[0].ts", ts_unit="s", metrics="value[0].values")
    found = rows(keyed, "g", {"A": [{"ts": S, "values": {"t": 1}}], "x/B": [{"ts": S}]})
    assert [(one.device_id, one.metrics) for one in found if isinstance(one, Row)] == [("A", '{"t":1}'), ("x:B", None)]
    assert rows(keyed, "g", []) == rows(keyed, "g", b"text") == []
    many = [{"macid": "A"}] * (MAX_ITEMS + 1)
    counted = [each.row_count("g/gw1", json.dumps(one).encode()) for one in (items, many[:-1], many, [], 7)]
    assert (counted, each.row_count("g/gw1", b""), each.row_count("h", b"[1, 2]")) == ([3, MAX_ITEMS, 1, 1, 1], 1, 1)
    [too_many] = rows(each, "g/gw1", many)
    assert isinstance(too_many, Rejection) and too_many.reason == "size"


def test_equal_items_and_values_of_one_instant_are_no_copies() -> None:
    plain = rule("e/{device}/{metric}/state")
    values = [row(plain, f"e/d/{name}/state", b"21.5") for name in ("inside", "outside")]
    assert [one.metrics for one in values] == ['{"inside":21.5}', '{"outside":21.5}']
    items = rows(rule("g", each="@", device={"path": "id"}), "g", [{"id": "A"}, {"id": "A"}])
    for one, other in (values, items):
        assert isinstance(one, Row) and isinstance(other, Row) and identity(one) != identity(other)


@pytest.mark.parametrize(
    ("unit", "zone", "ts"),
    [
        ("s", None, S),
        ("s", None, str(S)),
        ("s", None, float(S)),
        ("ms", None, f" {NOW} "),
        ("us", None, NOW * 1_000),
        ("ns", None, str(NOW * 1_000_000 + 999_999)),
        ("iso", None, "2026-09-10T00:26:40Z"),
        ("iso", None, "2026-09-10T02:26:40.000000000+02:00"),
        ("iso", "Europe/Oslo", "2026-09-10 02:26:40"),
        ("iso", "Europe/Oslo", "2026-09-10T00:26:40+00:00"),
    ],
)
def test_times_of_all_units_are_read(unit: str, zone: str | None, ts: Any) -> None:
    one = row(rule("a/{device}", ts="t", ts_unit=unit, ts_zone=zone), "a/d", {"t": ts})
    assert (one.event_time_ms, one.clock, one.note) == (NOW, Clock.DEVICE, None)


@pytest.mark.parametrize("ts", [3.45, 0, "soon", "nan", "-inf", "1e999", [], True, "2026-09-10T00:26:40", 10**30, "9" * 5_000])
def test_an_invalid_time_is_a_clock_fault_unless_the_time_of_receipt_replaces_it(ts: Any) -> None:
    unit = "iso" if isinstance(ts, str) and "T" in ts else "s"
    fault = row(rule("a/{device}", ts="t", ts_unit=unit), "a/d", {"t": ts})
    assert (fault.event_time_ms, fault.clock) == (None, Clock.INVALID)
    replaced = row(rule("a/{device}", ts="t", ts_unit=unit, ts_else="received"), "a/d", {"t": ts})
    assert (replaced.event_time_ms, replaced.clock) == (NOW, Clock.RECEIVED)
    assert fault.note == replaced.note and fault.note != NO_TS


@pytest.mark.parametrize(
    ("payload", "metrics"),
    [
        (b"21.5", {"value": 21.5}),
        (b"ON", {"value": "ON"}),
        (b"true", {"value": True}),
        (b'{"signal": NaN, "high": 1e400}', {"signal": None, "high": None}),
        (b"\xef\xbb\xbf{}", {}),
        (b"\x1f\x8b\x08", None),
        (b"x" * 1_000, None),
    ],
)
def test_any_payload_proves_its_device_alive(payload: bytes, metrics: Any) -> None:
    found = row(rule("a/{device}"), "a/d", payload)
    assert (None if found.metrics is None else json.loads(found.metrics)) == metrics


def test_an_ignoring_rule_excludes_topics_from_the_rules_below_it() -> None:
    below = {"topic": "a/{device...}", "site": "h", "kind": "telemetry"}
    mappings = parse_mappings({"mapping": [{"topic": "a/{device...}/set", "kind": "ignore"}, below]}, compile_path)
    assert rows(mappings, "a/b/set", b"ON") == []
    assert row(mappings, "a/b/state", b"ON").device_id == "b:state"
    assert mappings.subscriptions() == ("a/#",)
    assert mappings.filters_of_device("b") == ("a/b",)
    assert rule("a/+/set", site=None, kind="ignore").subscriptions() == ()


def test_an_empty_payload_is_no_signal() -> None:
    assert rows(rule("a/{device}"), "a/d", b"") == []


def test_an_invalid_value_costs_its_field() -> None:
    one = row(rule("a/{device}", seq="n", code="c"), "a/d", {"n": -1, "c": {}})
    assert (one.seq, one.code) == (None, None)
    assert "seq must be" in (one.note or "") and "code must be" in (one.note or "")


def test_presence_events_of_a_session_name_it() -> None:
    mappings = parse_mappings(
        {
            "mapping": [
                {"topic": f"$aws/events/presence/{word}/{{device}}", "site": "h", "kind": kind, "session": "sessionIdentifier"}
                for word, kind in (("connected", "birth"), ("disconnected", "death"))
            ]
        },
        compile_path,
    )
    assert mappings.subscriptions() == ("$aws/events/presence/connected/+", "$aws/events/presence/disconnected/+")
    found = row(mappings, "$aws/events/presence/disconnected/pump", {"sessionIdentifier": "s1", "timestamp": NOW})
    assert (found.kind, found.device_id, found.session) == ("death", "pump", "s1")


def test_a_topic_without_a_rule_is_decoded_as_the_own_format() -> None:
    assert row(rule("a/{device}"), "fleet/s/d/heartbeat", {}).site == "s"
    [rejected] = rows(rule("a/{device}"), "b/d", {})
    assert isinstance(rejected, Rejection) and rejected.reason == "topic"


def test_a_topic_that_only_the_subscription_of_a_rule_covers_is_ignored() -> None:
    mappings = rule("a/{device...}/state")
    assert mappings.subscriptions() == ("a/#",)
    assert rows(mappings, "a/d/set", b"ON") == []
    [rejected] = rows(mappings, "kafka/topic/key", {})
    assert isinstance(rejected, Rejection)


def test_subscriptions_leave_out_covered_filters() -> None:
    topics = ("a/{device...}", "a/{device}/state", "b/+/{device}", "b/{site}/{device}", "{device}/status")
    mappings = parse_mappings({"mapping": [_with_site({"topic": topic}) for topic in topics]}, compile_path)
    assert mappings.subscriptions() == ("a/#", "b/+/+", "+/status")


def test_filters_of_a_device_admit_no_other() -> None:
    rules = [
        {"topic": "tele/{device}/{metric}", "site": "h"},
        {"topic": "z/{device...}/state", "site": "h"},
        {"topic": "own/+", "site": "h", "device": "pump"},
        {"topic": "own/x", "site": "h", "device": "other"},
        {"topic": "gw/{gateway}", "site": "h", "device": {"path": "id"}},
    ]
    mappings = parse_mappings({"mapping": [{**one, "kind": "telemetry"} for one in rules]}, compile_path)
    assert mappings.filters_of_device("pump") == ("tele/pump/+", "z/pump/state")
    assert mappings.filters_of_device("other") == ("tele/other/+", "z/other/state")
    assert mappings.filters_of_device("a:b") == ("tele/a:b/+", "z/a/b/state")


@pytest.mark.parametrize(
    ("others", "filters"),
    [
        ([], ("a/pump/+",)),
        ([{"topic": "a/{device}/LWT"}], ("a/pump/+", "a/pump/LWT")),
        ([{"topic": "a/{device...}"}], ("a/pump",)),
        ([{"topic": "b/{device...}"}], ("a/pump/+", "b/pump")),
        ([{"topic": "a/+/{device}"}], ()),
        ([{"topic": "a/+/x", "device": {"path": "id"}}], ()),
        ([{"topic": "a/+/x", "device": "pump"}], ("a/pump/+",)),
        ([{"topic": "a/+/x", "device": "other"}], ()),
        ([{"topic": "{device}/pump/x"}], ("pump/pump/x",)),
        ([{"topic": "a/{site...}/{device}"}], ()),
        ([{"topic": "a/{site...}/{device}/x"}], ("a/pump/+",)),
        ([{"topic": "b/{device}/{metric...}"}], ("a/pump/+", "b/pump/#")),
        ([{"topic": "b/{device}/{metric...}"}, {"topic": "b/{device...}/x"}], ("a/pump/+", "b/pump/x")),
        ([{"topic": "b/{site...}/{device}"}], ("a/pump/+",)),
    ],
)
def test_a_filter_of_a_device_overlaps_with_no_rule_that_finds_another(
    others: list[dict[str, Any]], filters: tuple[str, ...]
) -> None:
    rules = [{"topic": "a/{device}/{metric}"}, *others]
    mappings = parse_mappings({"mapping": [_with_site(one) for one in rules]}, compile_path)
    assert mappings.filters_of_device("pump") == filters


def _with_site(table: dict[str, Any]) -> dict[str, Any]:
    has_site = "site" in table or "{site" in table["topic"]
    return {"kind": "telemetry", **table} if has_site else {"site": "h", "kind": "telemetry", **table}


@pytest.mark.parametrize(
    ("others", "filters"),
    [
        ([], ("a/oslo/pump",)),
        ([{"topic": "b/{site}/{device}/{metric}"}], ("a/oslo/pump", "b/oslo/pump/+")),
        ([{"topic": "b/{device}", "site": "oslo"}], ("a/oslo/pump", "b/pump")),
        ([{"topic": "b/{device}", "site": "turku"}], ("a/oslo/pump",)),
        ([{"topic": "b/{device}", "site": {"path": "s"}}], ("a/oslo/pump",)),
        ([{"topic": "a/+/{device}", "site": "turku"}], ()),
        ([{"topic": "a/+/{device}", "site": "oslo"}], ("a/oslo/pump",)),
        ([{"topic": "{site}/oslo/{device}"}], ("oslo/oslo/pump",)),
    ],
)
def test_a_filter_of_a_device_at_a_site_overlaps_with_no_rule_that_finds_another_site(
    others: list[dict[str, Any]], filters: tuple[str, ...]
) -> None:
    tables = [{"topic": "a/{site}/{device}"}, *others]
    mappings = parse_mappings({"mapping": [_with_site(one) for one in tables]}, compile_path)
    assert mappings.filters_of_device("oslo/pump") == filters


def test_no_topic_of_a_device_is_a_message_of_another() -> None:
    """Random rules over random topics: whatever the filters of a device match, each rule finds that device."""
    chance, rest = random.Random(3), ("a", "pump", "other", "+", "{site}", "{site...}", "{metric...}", "{kind}")
    topics = ["/".join(levels) for size in range(2, 6) for levels in product(("a", "pump", "other"), repeat=size)]
    checked = Counter[str]()
    for _ in range(300):
        drawn = [["a", *chance.sample([chance.choice(("{device}", "{device...}")), chance.choice(rest)], 2)] for _ in range(2)]
        tables = [{"topic": "/".join([*one, *chance.choices(("a", "+"), k=chance.randint(0, 1))])} for one in drawn]
        try:
            mappings = parse_mappings({"mapping": [_with_site(one) for one in tables]}, compile_path)
        except FleetError:  # two placeholders for several levels
            continue
        for device_id, names in (("pump", ("device",)), ("other/pump", ("site", "device"))):
            filters = mappings.filters_of_device(device_id)
            for topic in (one for one in topics if any(covers(allowed, one) for allowed in filters)):
                found = {"/".join(words[name] for name in names) for _, words in mappings.match(topic)}
                assert found <= {device_id}, (tables, filters, topic)
                checked[device_id] += 1
    assert min(checked["pump"], checked["other/pump"]) > 50, "the rules must grant something"


def test_topics_that_are_too_long_to_be_stored_take_no_memory() -> None:
    """One client could otherwise fill the memory of the bridge: it chooses the words of ``{metric}``."""
    found = rule("{device}/status/{metric}")
    tracemalloc.start()
    try:
        for number in range(20):
            assert found.row_count(f"d/status/{number:060000}", b"1") == 1
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
