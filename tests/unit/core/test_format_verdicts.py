"""Verdicts on messages of other formats: profiles and rules decode them, and the definition judges the rows.

Without a policy, the defaults hold: a timeout of an hour and a grace period of 30 seconds.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from fleetpulse.core.judgements import Judgement
from fleetpulse.core.messages.mapping import Mappings, rows_of
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Origin, Row
from fleetpulse.io.ingest import profiles
from fleetpulse.io.ingest.payload_paths import compile_path
from tests.support.histories.histories import START, changes, positioned, row, tick
from tests.support.histories.presence_cases import Change

pytestmark = pytest.mark.unit
END_S = 10_000
CONNECTED, DISCONNECTED = (f"$aws/events/presence/{word}connected/pump" for word in ("", "dis"))


class Message(NamedTuple):
    """Message of a device: seconds after START at which the bridge receives it, topic, and payload.

    A payload that is neither text nor bytes is written as JSON.
    """

    at_s: float
    topic: str
    payload: Any


def decoded(mappings: Mappings, messages: Sequence[Message]) -> list[Row]:
    rows: list[Row] = []
    for at_s, topic, payload in messages:
        text = payload if isinstance(payload, str | bytes) else json.dumps(payload)
        raw = text.encode() if isinstance(text, str) else text
        for one in rows_of(mappings.decode(topic, raw, START + int(at_s * 1000), Origin.MQTT)):
            assert isinstance(one, Row), one
            rows.append(one)
    return rows


def judged(rows: Sequence[Row]) -> list[Judgement]:
    return replay(positioned([*rows, tick(END_S)]), Deployment())


def verdicts(rows: Sequence[Row]) -> dict[str, list[Change]]:
    """Return the transitions of each device up to the end."""
    judgements = judged(rows)
    return {name: changes(one for one in judgements if one.device_id == name) for name in {one.device_id for one in rows}}


def online(at_s: float) -> Change:
    return at_s, "provisioned", "online", "signal"


def dead(at_s: float) -> Change:
    return at_s, "online", "offline", "death"


def silent(at_s: float) -> Change:
    return at_s, "online", "offline", "silence"


def event(session: str, at_s: float) -> dict[str, Any]:
    return {"clientId": "pump", "sessionIdentifier": session, "timestamp": START + int(at_s * 1000)}


def rule(topic: str, **options: Any) -> Mappings:
    return parse_mappings({"mapping": [{"topic": topic, "site": "hall", "kind": "telemetry", **options}]}, compile_path)


@pytest.mark.parametrize(
    ("profile", "messages", "want"),
    [
        pytest.param(
            "tasmota",
            [Message(0, "tele/plug/STATE", {"POWER": "ON"}), Message(60, "tele/plug/LWT", "Offline")],
            {"plug": [online(0), dead(90)]},
            id="a will by its value",
        ),
        pytest.param(
            "tasmota",
            [Message(0, "tele/plug/STATE", {"POWER": "ON"}), Message(60, "tele/plug/LWT", "Online")],
            {"plug": [online(0), silent(3_660)]},
            id="a birth on the topic of the will",
        ),
        pytest.param(
            "tasmota",
            [Message(0, "tele/plug/LWT", "Online"), Message(600, "tele/plug/LWT", "Offline")],
            {"plug": [online(0), dead(630)]},
            id="birth and will on one topic",
        ),
        pytest.param(
            "zigbee2mqtt",
            [
                Message(0, "zigbee2mqtt/lamp/availability", {"state": "online"}),
                Message(0, "zigbee2mqtt/kitchen/lamp/availability", "online"),
                Message(600, "zigbee2mqtt/kitchen/lamp/availability", {"state": "offline"}),
                Message(700, "zigbee2mqtt/lamp/availability", "offline"),
            ],
            {"lamp": [online(0), dead(730)], "kitchen:lamp": [online(0), dead(630)]},
            id="a state as an object and as a word",
        ),
        pytest.param(
            "homeassistant",
            [
                Message(0, "homeassistant/light/desk/availability", "online"),
                Message(600, "homeassistant/light/desk/availability", "offline"),
            ],
            {"light:desk": [online(0), dead(630)]},
            id="availability",
        ),
        pytest.param(
            "esphome",
            [Message(0, "livingroom/status", "online"), Message(600, "livingroom/status", "offline")],
            {"livingroom": [online(0), dead(630)]},
            id="the device is the first level",
        ),
        pytest.param(
            "aws-presence",
            [
                Message(0, CONNECTED, event("a", 0)),
                Message(600, CONNECTED, event("b", 600)),
                Message(601, DISCONNECTED, event("a", 599)),
            ],
            {"pump": [online(0), silent(4_200)]},
            id="the will of an older session",
        ),
        pytest.param(
            "aws-presence",
            [Message(0, CONNECTED, event("a", 0)), Message(601, DISCONNECTED, event("a", 601))],
            {"pump": [online(0), dead(631)]},
            id="the will of the session",
        ),
        pytest.param(
            "tasmota",
            [Message(0, "tele/plug/SENSOR", {"t": 21}), Message(5_000, "tele/plug/LWT", "")],
            {"plug": [online(0), silent(3_600)]},
            id="a cleared message of presence",
        ),
        pytest.param(
            "tasmota",
            [Message(0, "tele/plug/SENSOR", {"t": 21}), Message(5_000, "tele/plug/SENSOR", "")],
            {"plug": [online(0), silent(3_600)]},
            id="a cleared message of telemetry",
        ),
    ],
)
def test_presence_in_payloads_is_judged(profile: str, messages: list[Message], want: dict[str, list[Change]]) -> None:
    assert verdicts(decoded(profiles.load_profile(profile, "hall"), messages)) == want


def test_a_cleared_message_does_not_bring_a_removed_device_back() -> None:
    policy = parse_policy({"rules": {"forget_after": "2h"}}).normalised()
    in_force = row(-2, "fleet/_/_/policy", policy=policy, effective_from_s=-1_000)

    def after(payload: str) -> list[Change]:
        messages = [Message(0, "tele/plug/STATE", {}), Message(9_000, "tele/plug/LWT", payload)]
        return verdicts([in_force, *decoded(profiles.load_profile("tasmota", "hall"), messages)])["plug"]

    removed = [online(0), silent(3_600), (7_200, "offline", "forgotten", "forget")]
    assert after("") == removed
    assert after("Online") == [*removed, online(9_000)]


@pytest.mark.parametrize(
    ("payload", "options"),
    [
        pytest.param(b'{"signal": NaN}', {}, id="NaN"),
        pytest.param(b'{"signal": 1e400}', {}, id="infinity"),
        pytest.param(b'{"n": "7"}', {"seq": "n"}, id="a number as text"),
        pytest.param(b'{"n": -1}', {"seq": "n"}, id="a negative counter"),
        pytest.param(b'{"c": ""}', {"code": "c", "kind": "error"}, id="an empty code"),
        pytest.param(b'{"t": 0}', {"ts": "t", "ts_unit": "s"}, id="a clock that is not set"),
        pytest.param(b'{"t": 3.45}', {"ts": "t", "ts_unit": "s", "ts_else": "received"}, id="a clock from the start"),
        pytest.param(b'{"t": "2026-02-02T03:40:00"}', {"ts": "t", "ts_unit": "iso"}, id="a time without a zone"),
        pytest.param(b"\x1f\x8b\x08", {}, id="gzip"),
        pytest.param(b"\xa1\x61t\x18\x2a", {}, id="CBOR"),
    ],
)
def test_a_device_with_a_faulty_payload_stays_online(payload: bytes, options: dict[str, Any]) -> None:
    each_5_minutes = [Message(300 * number, "a/d", payload) for number in range(20)]
    found = verdicts(decoded(rule("a/{device}", **options), each_5_minutes))["d"]
    modes = {mode for _, _, mode, _ in found if mode != "degraded"}
    assert found[0] == online(0) and found[-1][0] == 300 * 19 + 3_600 and modes == {"online", "offline"}


def test_values_of_one_instant_are_no_copies() -> None:
    names = ("inside", "outside", "cellar")
    rows = decoded(profiles.load_profile("esphome", "hall"), [Message(0, f"hut/sensor/{one}/state", "21.5") for one in names])
    assert [one.metrics for one in rows] == [json.dumps({name: 21.5}, separators=(",", ":")) for name in names]
    listed = [one.kind for one in judged(rows) if one.device_id == "hut"]
    assert "duplicate" not in listed and "transition" in listed
    assert "duplicate" in [one.kind for one in judged([*rows, rows[0]])]
