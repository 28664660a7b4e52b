"""Clock of the bridge: a standstill opens a gap, and a clock that jumps forward stamps no row."""

import json
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.io.ingest.segments import list_segments, read_segment
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import Arrived
from streaming.bridge.bridge import Bridge, BridgeSettings
from streaming.bridge.clock import HOLDS_MS, SET_FORWARD, STEP_MS, GuardedClock
from tests.support.fake_source import Records

pytestmark = pytest.mark.unit
NOW = 1_700_000_000_000
HOUR = 3_600_000


class Clocks:
    """Wall clock that a test can set, and a monotonic clock."""

    def __init__(self) -> None:
        self.wall_ms, self.steady_ms = NOW, 5_000

    def pass_ms(self, span_ms: int) -> None:
        self.wall_ms += span_ms
        self.steady_ms += span_ms


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    stub = Clocks()
    monkeypatch.setattr("streaming.bridge.clock.wall_clock_ms", lambda: stub.wall_ms)
    monkeypatch.setattr("streaming.bridge.clock._steady_ms", lambda: stub.steady_ms)
    return stub


@pytest.fixture
def source() -> Records:
    return Records()


@pytest.fixture
def bridge(tmp_path: Path, clocks: Clocks, source: Records) -> Bridge:
    """Return a live bridge that has received a heartbeat and its own canary."""
    paths = tmp_path / "segments", None, tmp_path / "run" / "status.json"
    bridge = Bridge(BridgeSettings(*paths, BrokerAddress("h", 1), "", source_factory=lambda: source))
    bridge.step()
    source.coming = [heartbeat(1), *source.canaries]
    source.canaries.clear()
    bridge.step()
    return bridge


def heartbeat(number: int) -> Arrived:
    return Arrived("fleet/s/d/heartbeat", b"{}", False, (1, number))


def rows_of(bridge: Bridge) -> list[tuple[str, int, dict[str, Any]]]:
    """Close the bridge; return kind, instant (since NOW) and content of its rows."""
    bridge.close()
    rows = [row for _, path in list_segments(bridge.settings.segments_dir) for row in read_segment(path).to_pylist()]
    return [(row["topic"].rsplit("/", 1)[1], row["received_at_ms"] - NOW, json.loads(row["payload"])) for row in rows]


@pytest.mark.parametrize("canary_sent", [False, True], ids=["without canary", "with canary"])
def test_messages_queued_during_a_standstill_come_after_the_gap(
    bridge: Bridge, source: Records, clocks: Clocks, canary_sent: bool
) -> None:
    if canary_sent:  # just before the standstill: queued with the other messages, it does not prove listening
        bridge._canary_at_s = 0.0  # pyright: ignore[reportPrivateUsage]
        bridge.step()
        assert source.canaries
    clocks.pass_ms(HOUR)
    source.coming = [heartbeat(2), *source.canaries]
    bridge.step()
    rows = rows_of(bridge)
    assert [kind for kind, _, _ in rows] == ["heartbeat", "tick", "gap", "heartbeat"] + ["tick"] * canary_sent
    canary_ms, (_, gap_ms, gap), (_, received_ms, _) = rows[1][1], rows[2], rows[3]
    assert (gap["op"], gap["from"] - NOW) == ("open", canary_ms)
    assert HOUR <= gap_ms < received_ms
    assert bridge.intake.gap_open


def test_pause_within_the_limit_of_canaries_is_no_gap(bridge: Bridge, source: Records, clocks: Clocks) -> None:
    clocks.pass_ms(14_000)
    source.coming = [heartbeat(2)]
    bridge.step()
    assert "gap" not in [kind for kind, _, _ in rows_of(bridge)]


def test_clock_that_is_briefly_ahead_stamps_no_row(bridge: Bridge, source: Records, clocks: Clocks) -> None:
    clocks.wall_ms += 24 * HOUR
    source.coming = [heartbeat(2)]
    bridge.step()
    assert source.coming  # not received yet
    bridge.report()
    assert json.loads(bridge.settings.status_path.read_text())["problem"] == SET_FORWARD
    clocks.pass_ms(2_000)
    clocks.wall_ms -= 24 * HOUR
    bridge.step()
    assert not source.coming
    rows = rows_of(bridge)
    assert [kind for kind, _, _ in rows] == ["heartbeat", "tick", "heartbeat"]
    assert rows[-1][1] == 2_000


def test_clock_that_stays_ahead_is_accepted_after_a_gap(bridge: Bridge, source: Records, clocks: Clocks) -> None:
    clocks.wall_ms += HOUR
    source.coming = [heartbeat(2)]
    bridge.step()
    clocks.pass_ms(HOLDS_MS)
    bridge.step()
    rows = rows_of(bridge)
    assert [kind for kind, _, _ in rows] == ["heartbeat", "tick", "gap", "heartbeat"]
    assert rows[2][1] == HOUR + HOLDS_MS


@pytest.mark.parametrize(("step_ms", "doubted"), [(STEP_MS, False), (STEP_MS + 1, True), (-HOUR, False)])
def test_only_a_step_forward_is_doubted(clocks: Clocks, step_ms: int, doubted: bool) -> None:
    wall = GuardedClock()
    clocks.pass_ms(HOUR)
    assert (wall.now_ms(), wall.doubted) == (NOW + HOUR, False)
    clocks.wall_ms += step_ms
    assert wall.now_ms() == NOW + HOUR + (0 if doubted else step_ms)
    assert wall.doubted is doubted
    clocks.pass_ms(HOLDS_MS)
    assert (wall.now_ms(), wall.doubted) == (NOW + HOUR + step_ms + HOLDS_MS, False)
