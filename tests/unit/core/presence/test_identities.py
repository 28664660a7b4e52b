"""Identity by site and id: one id at two sites is two devices, from landing to operators' commands."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.commands.fleet.device import add, decommission, import_, release
from fleetpulse.core.messages.decode import Rejection, decode
from fleetpulse.core.presence.identities import DeviceIdentity, device_of, identified, topic_of
from fleetpulse.core.replay import Deployment, replay
from fleetpulse.core.rows import Origin, Row, hash64
from fleetpulse.io.home.command_spool import devices_with_pending_commands
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.segments import SegmentRow, rows_table, write_segment
from fleetpulse.io.tables import tables
from streaming.bridge.rate_limit import BURST_S, RateLimiter, SparedMessages
from streaming.landing.landing import Landing
from tests.support.histories import histories
from tests.support.histories.histories import START
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
BY_SITE = DeviceIdentity.SITE_AND_ID


@pytest.fixture
def home(tmp_path: Path) -> Home:
    created = Home(tmp_path / "home")
    created.prepare(None, BY_SITE)
    return created


def _landed(home: Home, *messages: tuple[str, dict[str, Any], Origin]) -> Home:
    rows = [SegmentRow(START + at, topic, json.dumps(payload).encode(), origin.value)
            for at, (topic, payload, origin) in enumerate(messages)]  # fmt: skip
    write_segment(home.segments, 1, rows_table(rows), bridge="bridge-1", last_canary_ms=None)
    Landing(home).step()
    return home


def test_one_id_at_two_sites_is_two_devices(home: Home) -> None:
    sent = [(f"fleet/{site}/pump-1/heartbeat", {"gateway": "gw"}, Origin.MQTT) for site in ("oslo", "rome")]
    undated = [("fleet/oslo/pump-1/error", {"ts": "noon", "code": "E1"}, Origin.MQTT)]  # read row by row
    will = [("fleet/oslo/gw/death", {"gateway": "gw"}, Origin.MQTT)]
    _landed(home, *sent, *undated, *will)
    found = tables.query(home, "SELECT * FROM messages ORDER BY received_at", tables=["messages"])
    assert [one["device_id"] for one in found] == ["oslo/pump-1", "rome/pump-1", "oslo/pump-1", "oslo/gw"]
    assert [one["gateway"] for one in found] == ["oslo/gw", "rome/gw", None, "oslo/gw"]
    assert [one["device_hash"] for one in found] == [hash64(one["device_id"]) for one in found]
    assert found[-1]["gateway_event"] == "death", "the gateway is its own gateway"


def test_internal_rows_name_the_site_of_their_device_except_rows_of_bridges(home: Home) -> None:
    entries = [("fleet/oslo/pump-1/registry", {"op": "add"}, Origin.COMMAND), ("fleet/_/pump-1/control", {}, Origin.COMMAND)]
    gap = ("fleet/_/bridge-1/gap", {"op": "open", "from": START}, Origin.BRIDGE)
    _landed(home, *entries, gap)
    found = tables.query(home, "SELECT device_id FROM messages ORDER BY received_at", tables=["messages"])
    assert [one["device_id"] for one in found] == ["oslo/pump-1", "bridge-1"]
    assert tables.query(home, "SELECT device_id FROM devices", tables=["devices"]) == [{"device_id": "oslo/pump-1"}]
    quarantined = tables.query(home, "SELECT reason, detail FROM quarantine", tables=["quarantine"])
    assert [(one["reason"], "without a site" in one["detail"]) for one in quarantined] == [("topic", True)]


def test_identity_by_id_keeps_rows_and_identity_by_site_requires_a_site() -> None:
    row = decode("fleet/oslo/pump-1/heartbeat", b'{"gateway": "gw"}', START)
    assert isinstance(row, Row)
    assert identified(row, DeviceIdentity.ID) is row
    assert isinstance(identified(decoded("fleet/_/d/control"), BY_SITE), Rejection)


def decoded(topic: str) -> Row:
    row = decode(topic, b"{}", START, Origin.COMMAND)
    assert isinstance(row, Row)
    return row


@pytest.mark.parametrize(("device_id", "identity"), [("pump-1", DeviceIdentity.ID), ("oslo/pump-1", BY_SITE)])
def test_a_topic_reads_back_as_the_id_of_its_device(device_id: str, identity: DeviceIdentity) -> None:
    assert device_of(topic_of(device_id, "control"), identity) == device_id
    assert decoded(topic_of(device_id, "control")).kind == "control"


def test_commands_accept_ids_with_their_site(home: Home, tmp_path: Path) -> None:
    add("oslo/pump-1", home=home.path)
    add("pump-2", site="rome", home=home.path)
    add("pump-3", home=home.path)
    listed = tmp_path / "devices.csv"
    listed.write_text("device_id,site\noslo/pump-4,\npump-5,rome\n")
    import_(listed, home=home.path)
    release("oslo/pump-1", home=home.path)
    decommission("rome/pump-2", home=home.path)
    expected = {"oslo/pump-1", "rome/pump-2", "main/pump-3", "oslo/pump-4", "rome/pump-5"}
    assert devices_with_pending_commands(home) == expected
    with refused("device-id-without-site"):
        release("pump-1", home=home.path)
    with refused("limit-invalid"):
        add("oslo/pump-1", timeout="1ms", home=home.path)
    with refused("device-site-differs"):
        add("oslo/pump-1", site="rome", home=home.path)


def test_a_home_keeps_its_identity(home: Home, tmp_path: Path) -> None:
    home.prepare(None)
    home.prepare(None, BY_SITE)
    with refused("home-identity-differs"):
        home.prepare(None, DeviceIdentity.ID)
    other = Home(tmp_path / "other")
    other.prepare(None)
    assert other.identity() is DeviceIdentity.ID


def test_a_gateway_belongs_to_the_site_of_its_device_unless_its_id_has_a_site(home: Home) -> None:
    entries = [(f"fleet/oslo/p{number}/registry", {"op": "add", "gateway": gateway}, Origin.COMMAND)
               for number, gateway in enumerate(("gw", "oslo/gw", "rome/gw"))]  # fmt: skip
    signals = [("fleet/oslo/p3/heartbeat", {"gateway": "rome/gw"}, Origin.MQTT)]
    undated = [("fleet/oslo/p4/heartbeat", {"gateway": "rome/gw", "ts": "noon"}, Origin.MQTT)]  # read row by row
    _landed(home, *entries, ("fleet/oslo/p5/registry", {"op": "add"}, Origin.COMMAND), *signals, *undated)
    registered = tables.query(home, "SELECT gateway FROM devices ORDER BY device_id", tables=["devices"])
    assert [one["gateway"] for one in registered] == ["oslo/gw", "oslo/gw", "rome/gw", None]
    heard = tables.query(home, "SELECT gateway, body FROM messages ORDER BY received_at", tables=["messages"])
    assert [json.loads(one["body"]).get("gateway") for one in heard[:4]] == ["oslo/gw", "oslo/gw", "rome/gw", None]
    assert [one["gateway"] for one in heard[4:]] == ["rome/gw", "rome/gw"]


def test_a_registered_device_is_unreachable_when_its_sites_gateway_dies() -> None:
    def sent(at_s: float, topic: str, **payload: Any) -> Row:
        row = identified(histories.row(at_s, topic, **payload), BY_SITE)
        assert isinstance(row, Row)
        return row

    rows = [sent(0, "fleet/oslo/p/heartbeat"), sent(1, "fleet/oslo/p/registry", op="add", gateway="gw")]
    rows += [sent(100, f"fleet/{site}/gw/death", gateway="gw") for site in ("rome", "oslo")]
    found = replay(histories.positioned([*rows, histories.tick(300)]), Deployment(60_000))
    assert histories.changes(found)[1:] == [(130, "online", "unreachable", "gateway_death")]
    assert [one.gateway for one in found if one.to_mode == "unreachable"] == ["oslo/gw"]


def test_a_flood_at_one_site_does_not_limit_a_device_at_another() -> None:
    limiter = RateLimiter(1, BY_SITE)
    oslo, rome = ["fleet/oslo/d/heartbeat"] * (BURST_S + 1), ["fleet/rome/d/heartbeat"]
    (beyond,) = limiter.exceeding([*oslo, *rome], START).items()
    assert beyond == (BURST_S, limiter.sender(oslo[0]))
    spared, topics = SparedMessages(), [oslo[0], rome[0], oslo[0]]
    newest = [spared.newest(limiter.sender(topic), topic, START, place) for place, topic in enumerate(topics)]
    assert newest == [None, None, 0]
