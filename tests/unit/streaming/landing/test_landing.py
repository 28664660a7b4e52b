"""Landing of several bridges: restarts after a kill, invalid segment rows, and late rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from fleetpulse.core.messages.decode import Rejection, digest64
from fleetpulse.core.rows import BRIDGE, KEPT_BYTES
from fleetpulse.core.tables import MESSAGES, QUARANTINE
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.leases import Lease, read_lease, write_lease
from fleetpulse.io.ingest.segments import SegmentRow, rows_table
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.subscriber import Arrived
from fleetpulse.io.tables import tables
from fleetpulse.reports import judgements
from fleetpulse.reports.present import devices
from streaming.bridge.bridge import Bridge, BridgeSettings
from streaming.landing import landing as landing_module
from streaming.landing.landing import Landing
from streaming.landing.merge import Part
from streaming.landing.rows import decode_parts
from tests.support.homes.landing import TOPIC, beat, heartbeats, land_all, landed, now_ms, write
from tests.support.refusals import refused
from tests.support.sequencers import Broker

pytestmark = pytest.mark.unit


@pytest.fixture
def home(home: Home) -> Home:
    """Return a home with the bridges ``bridge-1`` and ``north``."""
    home.divide({"north": ["oslo"]})
    home.segments_of("north").mkdir(parents=True)
    return home


@pytest.fixture
def max_rows(monkeypatch: pytest.MonkeyPatch) -> int:
    """Limit a commit to 20 rows, and return the limit."""
    monkeypatch.setattr(landing_module, "COMMIT_ROWS", 20)
    return 20


def test_landing_killed_before_deleting_segments_resumes(home: Home, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    begin_ms = now_ms() - 100_000
    write(home, "bridge-1", 1, [SegmentRow(begin_ms - 1, "fleet/_/bridge-1/tick", b'{"bridge":"bridge-1"}', "bridge")])
    for number in range(1, 21):
        write(home, "north", number, heartbeats(begin_ms + number * 1_000, 3 if number == 1 else 5))
    with monkeypatch.context() as patched:
        patched.setattr(landing_module, "delete_landed_segments", killed)
        for _ in range(2):  # processes
            beat(home)
            with pytest.raises(KeyboardInterrupt):
                Landing(home).step()
    assert 1 < landed(home) < 99
    land_all(home)
    assert landed(home) == 99, "including the tick"


def test_landing_fails_if_another_one_commits_during_its_start(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """A straggler of a killed run commits once more after the next landing has read the positions."""
    write(home, "bridge-1", 1, heartbeats(now_ms() - 1_000, 3))
    straggler, read_places = Landing(home), landing_module.landed_places

    def landed_places(*arguments: Any) -> dict[str, int]:
        places = read_places(*arguments)
        monkeypatch.setattr(landing_module, "landed_places", read_places)
        beat(home)
        assert straggler.step()
        return places

    monkeypatch.setattr(landing_module, "landed_places", landed_places)
    starting = Landing(home)
    beat(home)
    with refused("appender-superseded"):
        starting.step()
    assert landed(home) == 3


def test_late_rows_of_several_commits_land_after_the_landed_rows_in_order(home: Home, max_rows: int) -> None:
    begin_ms = now_ms() - 100_000
    write(home, "bridge-1", 1, [SegmentRow(begin_ms, "fleet/_/bridge-1/tick", b'{"bridge":"bridge-1"}', "bridge")])
    land_all(home)
    for number in range(1, 6):
        write(home, "north", number, heartbeats(begin_ms - 50_000 + number * 1_000, 3 * max_rows))
    land_all(home)
    rows = tables.query(
        home,
        "SELECT epoch_ms(received_at) AS at, epoch_ms(stamped_at) AS stamped FROM messages WHERE bridge = 'north' ORDER BY 1, 2",
        tables=["messages"],
    )
    assert len(rows) == 15 * max_rows
    assert [row["stamped"] for row in rows] == sorted(row["stamped"] for row in rows), "their order is kept"
    assert begin_ms < rows[0]["at"] <= rows[-1]["at"] <= begin_ms + 30


@pytest.mark.parametrize("payload", [b"garbage", b"[]", b"\xff", b"[" * 5_000, b'{"op":"open"}'])
@pytest.mark.parametrize("origin", ["mqtt", "replay", "command"])
def test_gap_row_of_another_origin_does_not_stop_landing(home: Home, payload: bytes, origin: str) -> None:
    begin_ms = now_ms() - 100_000
    write(home, "north", 1, [SegmentRow(begin_ms, "fleet/_/north/gap", payload, origin), *heartbeats(begin_ms + 1, 1)])
    write(home, "bridge-1", 1, heartbeats(begin_ms, 1))
    land_all(home)
    found = tables.query(home, "SELECT count(*) AS rows FROM quarantine", tables=[QUARANTINE.name])[0]["rows"]
    assert landed(home) + found == 3
    assert landed(home) >= 2


def test_lease_promises_history_up_to_its_newest_line(home: Home) -> None:
    """The bridge has an old lease, and replays a recording that is newer than the lease."""
    long_ago_ms, first_ms = now_ms() - 86_400_000, now_ms() - 3_600_000
    write(home, "bridge-1", 1, [SegmentRow(long_ago_ms, "fleet/_/bridge-1/tick", b'{"bridge":"bridge-1"}', "bridge")])
    write_lease(home.segments_of("bridge-1"), Lease(long_ago_ms + 5, long_ago_ms + 5, (), stopped=True))
    bridge = Bridge(
        BridgeSettings(
            home.segments,
            home.commands,
            home.run("bridge"),
            BrokerAddress("127.0.0.1", 1),
            "session",
            "secret",
            replay=True,
            live_after_replay=False,
            others={"north": home.segments_of("north")},
        )
    )
    broker = Broker()
    for line in range(5):
        bridge.intake.arrived(broker.line(line, first_ms + line // 2), now_ms())
    assert bridge.flush()
    lease = read_lease(home.segments)
    assert lease is not None and lease.through_ms == first_ms + 1, "the next line may share the instant of the last"
    bridge.intake.arrived(broker.line(5, end=True), now_ms())
    assert bridge.flush()
    bridge.flush()
    landing = Landing(home)
    for _ in range(10):
        landing.step()
    assert (
        tables.query(home, "SELECT count(*) AS rows FROM messages WHERE origin = 'replay'", tables=[MESSAGES.name])[0]["rows"]
        == 5
    )


def test_a_recorded_line_may_have_the_topic_of_a_recording(home: Home) -> None:
    begin_ms = now_ms() - 1_000
    rows = [
        SegmentRow(begin_ms, "replay/other", b"{}", "replay", recording="r", line=0),
        SegmentRow(begin_ms, "replay/r", b"", "replay", recording="r", line=1),
    ]
    write(home, "bridge-1", 1, rows)
    write(home, "north", 1, heartbeats(begin_ms, 1))
    land_all(home)
    quarantined = tables.query(home, "SELECT topic, reason FROM quarantine", tables=[QUARANTINE.name])
    assert quarantined == [{"topic": "replay/other", "reason": "topic"}]


def test_quarantine_keeps_the_beginning_of_a_payload_and_the_number_of_messages(home: Home) -> None:
    begin_ms, payload = now_ms() - 1_000, b"x" * 300_000
    rows = [
        SegmentRow(begin_ms, TOPIC, payload, "mqtt"),
        SegmentRow(begin_ms, TOPIC, b"beg", "mqtt", refused="flood", payload_bytes=900, payload_digest=5, messages=7),
    ]
    write(home, "bridge-1", 1, rows)
    write(home, "north", 1, heartbeats(begin_ms, 1))
    land_all(home)
    by_reason = {row["reason"]: row for row in judgements.quarantine(home)}
    kept = ("payload", "payload_bytes", "payload_digest", "messages")
    assert [by_reason["size"][name] for name in kept] == ["x" * KEPT_BYTES, 300_000, digest64(payload), 1]
    assert [by_reason["flood"][name] for name in kept] == ["beg", 900, 5, 7]
    assert devices.counts(home, None)["quarantine"] == {"flood": 7, "size": 1}


def test_refused_rows_of_one_message_store_its_payload_once() -> None:
    part = Part(BRIDGE, 1, 0, rows_table([SegmentRow(1, "plant/all", b"x" * 9, "mqtt")]))
    landed = decode_parts([part], lambda *_: (Rejection("field", "a"), Rejection("field", "b")))
    assert [(row["payload"], row["payload_bytes"], row["detail"]) for row in landed.quarantine] == [
        (b"x" * 9, 9, "a"),
        (b"", 9, "b"),
    ]


def test_canary_with_a_lone_surrogate_is_an_ordinary_message(home: Home) -> None:
    bridge = Bridge(BridgeSettings(home.segments, home.commands, home.run("bridge"), BrokerAddress("127.0.0.1", 1), "s", "r"))
    bridge.intake.go_live(now_ms())
    bridge.intake.arrived(
        Arrived(bridge.intake.canary_topic, json.dumps({"nonce": "a-\ud800"}).encode(), False, (1, 1)), now_ms()
    )
    assert len(bridge.intake.buffer) == 1


def test_landing_continues_after_property_changes_and_compaction_of_its_table(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(None)
    landing, path = Landing(home), str(home.table(MESSAGES.name))
    changes = [
        lambda: DeltaTable(path).alter.set_table_properties({"delta.logRetentionDuration": "interval 9 days"}),
        lambda: DeltaTable(path).optimize.compact(target_size=1 << 27),
        lambda: DeltaTable(path).create_checkpoint(),
    ]
    for number, change in enumerate(changes, 1):
        write(home, BRIDGE, number, heartbeats(number * 1_000, 5))
        assert landing.step() == 1
        change()
    write(home, BRIDGE, 4, heartbeats(4_000, 5))
    assert landing.step() == 1
    assert (landed(home), Landing(home).places) == (20, landing.places)


def test_recorded_gap_gets_its_position_from_the_row_before_it(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(None)
    gap = "fleet/_/bridge-1/gap"
    contents = [{}, {"after": 7}, {"after": 99_000}]  # the second refers to a row of the home that recorded it
    payloads = [json.dumps({"op": "open", "from": 5000, **one}).encode() for one in contents]
    payloads += [b'{"op":"close","until":5000}', b"{"]
    rows = [SegmentRow(9_000, TOPIC, b"{}", "mqtt")]
    rows += [SegmentRow(10_000 + at, gap, payload, "replay", "r", at) for at, payload in enumerate(payloads)]
    write(home, BRIDGE, 1, rows)
    assert Landing(home).step() == 1
    found = tables.query(home, "SELECT body FROM messages WHERE kind = 'gap' ORDER BY received_at", tables=["messages"])
    bodies = [json.loads(one["body"]) for one in found]
    assert [one.get("after") for one in bodies] == [9_000, 10_000, 99_000, None]
