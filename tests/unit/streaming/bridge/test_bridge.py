"""Segments of a bridge on a full disk and at their largest size; signatures of its canaries."""

import errno
import hashlib
import hmac
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetpulse.io.ingest.segments import list_segments
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import Arrived
from streaming.bridge.bridge import Bridge, BridgeSettings
from tests.support.fake_source import Records

pytestmark = pytest.mark.unit


def bridge(folder: Path, key: bytes, source: Records, **settings: Any) -> Bridge:
    paths = folder / "segments", None, folder / "run" / "status.json"
    address = BrokerAddress("h", 1, "fleet", "hunter2")
    return Bridge(BridgeSettings(*paths, address, "", source_factory=lambda: source, canary_key=key, **settings))


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


def heartbeats(*numbers: int) -> list[Arrived]:
    return [Arrived("fleet/s/d/heartbeat", b"{}", False, (1, number)) for number in numbers]


def test_a_message_is_acknowledged_only_after_the_full_disk_has_taken_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Records()
    filling = bridge(tmp_path, b"key", source, flush_interval_s=3600)
    filling.step()
    source.coming = heartbeats(1)
    filling.step()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("streaming.bridge.bridge.write_segment", fail)
        assert not filling.flush()
    assert (filling.problem, source.acknowledged) == ("disk full", [])
    assert filling.flush()
    assert filling.problem is None and (1, 1) in source.acknowledged


def test_a_segment_is_written_at_once_when_it_has_its_largest_number_of_rows(tmp_path: Path) -> None:
    source = Records()
    filling = bridge(tmp_path, b"key", source, flush_interval_s=3600, max_rows=3)
    filling.step()
    before = len(list_segments(filling.settings.segments_dir))
    written: list[int] = []
    for numbers in ((1, 2), (3,)):
        source.coming = heartbeats(*numbers)
        filling.step()
        written.append(len(list_segments(filling.settings.segments_dir)) - before)
    assert written == [0, 1] and {(1, 1), (1, 2), (1, 3)} <= {*source.acknowledged}


@pytest.mark.parametrize(("size", "written"), [(100, 0), (101, 1)])
def test_a_segment_is_written_at_once_when_it_exceeds_its_largest_size(size: int, written: int, tmp_path: Path) -> None:
    source, topic = Records(), "fleet/s/d/heartbeat"
    filling = bridge(tmp_path, b"key", source, flush_interval_s=3600, max_buffer_bytes=100)
    filling.step()
    before = len(list_segments(filling.settings.segments_dir))
    source.coming = [Arrived(topic, b" " * (size - len(topic)), False, (1, 1))]
    filling.step()
    assert len(list_segments(filling.settings.segments_dir)) - before == written


def test_a_message_waits_at_most_a_quarter_of_a_second_for_its_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, now_s = Records(), 1000.0
    monkeypatch.setattr("streaming.bridge.bridge.time", SimpleNamespace(monotonic=lambda: now_s, sleep=lambda pause_s: None))
    filling = bridge(tmp_path, b"key", source)
    filling.step()
    before = len(list_segments(filling.settings.segments_dir))
    source.coming = heartbeats(1)
    now_s = 1000.24
    filling.step()
    assert len(list_segments(filling.settings.segments_dir)) == before and (1, 1) not in source.acknowledged
    now_s = 1000.25
    filling.step()
    assert len(list_segments(filling.settings.segments_dir)) == before + 1 and (1, 1) in source.acknowledged
