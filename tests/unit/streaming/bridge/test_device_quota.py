"""Quota of new devices: invented ids are refused, known and registered devices are not."""

from dataclasses import replace
from pathlib import Path

import pytest

from cli.commands.run.job import prepare_quota
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.messages.replay_envelope import Envelope, wrap
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.core.rows import BRIDGE, hash64
from fleetpulse.core.tables import DEVICES, MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.segments import read_segment, write_segment
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import Arrived
from fleetpulse.io.tables import tables
from streaming.bridge.bridge import Bridge, BridgeSettings
from streaming.bridge.buffer import FLOOD_ROWS
from streaming.bridge.device_quota import FILE, DeviceQuota, write_known
from streaming.bridge.sequencer import REASON_NEW, BridgeSequencer
from streaming.landing.merge import Part
from streaming.landing.rows import decode_parts

NOW = 1_700_000_000_000
HOUR_MS = 3_600_000


def _topic(device: int | str, site: str = "s") -> str:
    return f"fleet/{site}/{device}/heartbeat"


def _live(quota: DeviceQuota) -> BridgeSequencer:
    intake = BridgeSequencer("b", None, quota=quota)
    intake.go_live(NOW)
    return intake


def _send(intake: BridgeSequencer, topics: list[str], now_ms: int = NOW, *, together: bool = True) -> list[str | None]:
    """Return for each message why it is refused."""
    before = len(intake.buffer)
    messages = [Arrived(topic, b"{}", False, (1, number)) for number, topic in enumerate(topics)]
    if together:
        intake.arrived_together(messages, now_ms)
    else:
        for one in messages:
            intake.arrived(one, now_ms)
    return [row.refused for row in intake.buffer.rows()][before:]


@pytest.mark.parametrize("together", [True, False])
def test_new_devices_beyond_the_quota_are_refused_until_it_refills(together: bool) -> None:
    intake = _live(DeviceQuota(2))
    first = [_topic(number) for number in (1, 2, 3, 1, 3, 2)]
    assert _send(intake, first, together=together) == [None, None, REASON_NEW, None, REASON_NEW, None]
    assert intake.counts["new_devices"] == 2
    assert _send(intake, [_topic(3), _topic(4)], NOW + HOUR_MS // 2, together=together) == [None, REASON_NEW]
    assert _send(intake, [_topic(3, "t"), "zigbee/9", "fleet/9"], NOW + HOUR_MS // 2) == [None, None, None], "not a new device"


def test_site_is_a_part_of_the_identity_if_the_home_says_so() -> None:
    intake = _live(DeviceQuota(1, identity=DeviceIdentity.SITE_AND_ID))
    assert _send(intake, [_topic(1), _topic(1, "t"), _topic(1)]) == [None, REASON_NEW, None]


def test_registered_and_recorded_devices_are_not_new() -> None:
    intake = BridgeSequencer("b", None, quota=DeviceQuota(1))
    for line in range(2):
        envelope = Envelope(
            "r", line, None if line else NOW, None if line else _topic("recorded"), b"{}" * (not line), bool(line)
        )
        intake.arrived(Arrived("replay/r", wrap(envelope), False, (1, line)), NOW)
    intake.go_live(NOW + 1)
    intake.command("a.json", "fleet/s/registered/registry", {"op": "add"}, NOW + 1)
    topics = [_topic("recorded"), _topic("registered"), _topic("new"), _topic("newer")]
    assert _send(intake, topics, NOW + 2) == [None, None, None, REASON_NEW]


def test_dropped_and_redelivered_messages_are_counted_once() -> None:
    intake = _live(DeviceQuota(1))
    for _ in range(3):
        assert _send(intake, [_topic(1), _topic(2)]) == [None, REASON_NEW]
        assert intake.counts["new_devices"] == 1
        intake.lost(NOW)
        assert intake.counts["new_devices"] == 0


def test_invented_ids_cost_a_segment_few_rows(tmp_path: Path) -> None:
    intake = _live(DeviceQuota(1))
    _send(intake, [_topic(number) for number in range(2_001)])
    path = write_segment(tmp_path, 1, intake.buffer.table(), bridge="b", last_canary_ms=None)
    landed = decode_parts([Part("bridge-1", 1, 0, read_segment(path))], decode)
    assert landed.messages[0][2].num_rows == 1
    assert (len(landed.quarantine), sum(row["messages"] for row in landed.quarantine)) == (FLOOD_ROWS, 2_000)
    assert {row["reason"] for row in landed.quarantine} == {REASON_NEW}
    assert "max_new_devices" in landed.quarantine[0]["detail"]


def test_known_devices_survive_a_restart_and_an_interrupted_write(tmp_path: Path) -> None:
    path = tmp_path / FILE
    write_known(path, [hash64("a")])
    quota = DeviceQuota(3, path)
    assert [quota.admits(_topic(one), NOW) for one in "abc"] == [True, True, True]
    quota.save()
    path.write_bytes(path.read_bytes() + b"cut")
    again = DeviceQuota(2, path)
    assert [again.knows(_topic(one)) for one in "abcd"] == [True, True, True, False]
    assert again.admits(_topic("d"), NOW)
    again.save()
    again.save()
    assert path.stat().st_size == 4 * 8
    assert DeviceQuota(1, path).knows(_topic("d"))


def test_bridge_remembers_new_devices_with_their_first_segment(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    settings = BridgeSettings(
        home.segments, None, home.run("bridge"), BrokerAddress("127.0.0.1", 1), "session", max_new_devices=1
    )
    bridge = Bridge(replace(settings, replay=True))
    bridge.intake.go_live(NOW)
    assert _send(bridge.intake, [_topic(1), _topic(2)]) == [None, REASON_NEW]
    assert not (home.segments / FILE).exists()
    assert bridge.flush()
    after = DeviceQuota(1, home.segments / FILE)
    assert (after.knows(_topic(1)), after.knows(_topic(2))) == (True, False)
    prepare_quota(home, BRIDGE, 1)
    assert (home.segments / FILE).exists(), "a bridge keeps its own file"
    prepare_quota(home, BRIDGE, 0)
    assert not (home.segments / FILE).exists(), "without a quota it would become incomplete"


def test_devices_of_a_home_that_were_heard_or_registered_are_known(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    prepare_quota(home, BRIDGE, 1)
    assert (home.segments / FILE).read_bytes() == b""
    for table in (MESSAGES, DEVICES):
        tables.create(home, table)
    heard = {"device_id": "heard", "device_hash": hash64("heard"), "received_at_ms": NOW}
    tables.append(home, MESSAGES, tables.to_table(MESSAGES, [heard, heard]), "test", 1)
    tables.append(home, DEVICES, tables.to_table(DEVICES, [{"device_id": "registered", "received_at_ms": NOW}]), "test", 1)
    (home.segments / FILE).unlink()
    prepare_quota(home, BRIDGE, 1)
    intake = _live(DeviceQuota(1, home.segments / FILE))
    topics = [_topic(one) for one in ("heard", "new", "registered", "newer")]
    assert _send(intake, topics) == [None, None, None, REASON_NEW]
