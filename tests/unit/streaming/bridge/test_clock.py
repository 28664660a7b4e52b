"""A bridge that stood still, and a clock that was set: what came meanwhile is excused, and nothing is stamped ahead of time."""

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
    """The wall's clock, which can be set, and one that nobody sets."""

    def __init__(self) -> None:
        self.wall_ms, self.steady_ms = NOW, 5_000

    def pass_ms(self, span_ms: int) -> None:
        self.wall_ms += span_ms
        self.steady_ms += span_ms


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr("streaming.bridge.clock.wall_clock_ms", lambda: made.wall_ms)
    monkeypatch.setattr("streaming.bridge.clock._steady_ms", lambda: made.steady_ms)
    return made


@pytest.fixture
def line() -> Records:
    return Records()


@pytest.fixture
def bridge(tmp_path: Path, clocks: Clocks, line: Records) -> Bridge:
    """A live bridge that has heard a device, and a canary of its own."""
    where = tmp_path / "segments", None, tmp_path / "run" / "status.json"
    made = Bridge(BridgeSettings(*where, BrokerAddress("h", 1), "", source_factory=lambda: line))
    made.step()
    line.coming = [heartbeat(1), *line.canaries]
    line.canaries.clear()
    made.step()
    return made


def heartbeat(number: int) -> Arrived:
    return Arrived("fleet/s/d/heartbeat", b"{}", False, (1, number))


def told(bridge: Bridge) -> list[tuple[str, int, dict[str, Any]]]:
    """Close the bridge, and return kind, instant (since NOW) and content of its rows."""
    bridge.close()
    rows = [row for _, path in list_segments(bridge.settings.segments_dir) for row in read_segment(path).to_pylist()]
    return [(row["topic"].rsplit("/", 1)[1], row["received_at_ms"] - NOW, json.loads(row["payload"])) for row in rows]


@pytest.mark.parametrize("flown", [False, True], ids=["alone", "beside a canary"])
def test_what_a_line_kept_while_the_bridge_stood_still_comes_behind_the_gap(
    bridge: Bridge, line: Records, clocks: Clocks, flown: bool
) -> None:
    if flown:  # sent just before it stood still: it is in the socket with the rest, and no sign of listening since
        bridge._canary_at_s = 0.0  # pyright: ignore[reportPrivateUsage]
        bridge.step()
        assert line.canaries
    clocks.pass_ms(HOUR)
    line.coming = [heartbeat(2), *line.canaries]
    bridge.step()
    rows = told(bridge)
    assert [kind for kind, _, _ in rows] == ["heartbeat", "tick", "gap", "heartbeat"] + ["tick"] * flown
    canary_ms, (_, gap_ms, gap), (_, heard_ms, _) = rows[1][1], rows[2], rows[3]
    assert (gap["op"], gap["from"] - NOW) == ("open", canary_ms)
    assert HOUR <= gap_ms < heard_ms
    assert bridge.intake.gap_open


def test_a_pause_that_a_canary_allows_for_is_no_gap(bridge: Bridge, line: Records, clocks: Clocks) -> None:
    clocks.pass_ms(14_000)
    line.coming = [heartbeat(2)]
    bridge.step()
    assert "gap" not in [kind for kind, _, _ in told(bridge)]


def test_a_clock_that_is_ahead_for_a_moment_stamps_nothing(bridge: Bridge, line: Records, clocks: Clocks) -> None:
    clocks.wall_ms += 24 * HOUR
    line.coming = [heartbeat(2)]
    bridge.step()
    assert line.coming  # left where it is
    bridge.report()
    assert json.loads(bridge.settings.status_path.read_text())["problem"] == SET_FORWARD
    clocks.pass_ms(2_000)
    clocks.wall_ms -= 24 * HOUR
    bridge.step()
    assert not line.coming
    rows = told(bridge)
    assert [kind for kind, _, _ in rows] == ["heartbeat", "tick", "heartbeat"]
    assert rows[-1][1] == 2_000


def test_a_clock_that_stays_ahead_is_believed_behind_a_gap(bridge: Bridge, line: Records, clocks: Clocks) -> None:
    clocks.wall_ms += HOUR
    line.coming = [heartbeat(2)]
    bridge.step()
    clocks.pass_ms(HOLDS_MS)
    bridge.step()
    rows = told(bridge)
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
