"""Canaries of a bridge: signed with the key of the home, and never with a password."""

import hashlib
import hmac
import json
from pathlib import Path

import pytest

from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import Arrived
from streaming.bridge.bridge import Bridge, BridgeSettings
from tests.support.fake_source import Records

pytestmark = pytest.mark.unit


def bridge(folder: Path, key: bytes, source: Records) -> Bridge:
    paths = folder / "segments", None, folder / "run" / "status.json"
    address = BrokerAddress("h", 1, "fleet", "hunter2")
    return Bridge(BridgeSettings(*paths, address, "", source_factory=lambda: source, canary_key=key))


def test_a_canary_does_not_disclose_the_password_of_the_broker(tmp_path: Path) -> None:
    text, _, signature = json.loads(bridge(tmp_path, b"key", Records()).intake.canary(1))["nonce"].rpartition("-")
    signed = {key: hmac.new(key, f"bridge-1 {text}".encode(), hashlib.sha256).hexdigest()[:24] for key in (b"key", b"hunter2")}
    assert signature == signed[b"key"] != signed[b"hunter2"]


@pytest.mark.parametrize(("key", "passed"), [(b"key", 1), (b"other", 0)])
def test_a_restarted_bridge_recognises_its_earlier_canaries_by_the_key(key: bytes, passed: int, tmp_path: Path) -> None:
    before = bridge(tmp_path / "before", b"key", Records()).intake
    source = Records()
    after = bridge(tmp_path / "after", key, source)
    source.coming = [Arrived(before.canary_topic, before.canary(1), False, (1, 1))]
    after.step()
    assert after.intake.counts["stale_canaries"] == passed
