"""Several bridges: backlogs, leases, fences of silent bridges, handover of sites, settings."""

import json
from itertools import count
from pathlib import Path

import pytest

from fleetpulse.core.rows import BRIDGE
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.leases import LEASE_MS, Lease, kept_sites, read_lease, write_lease
from fleetpulse.io.ingest.segments import (
    BridgeFencedError,
    BridgePosition,
    SegmentRow,
    bridge_position,
    list_segments,
    read_segment,
    remove_leftovers,
    rows_table,
    write_segment,
)
from fleetpulse.io.mqtt.subscriber import Arrived
from fleetpulse.settings import load_settings
from streaming.bridge.sequencer import BridgeSequencer
from streaming.landing.backlog import Bridges, delete_landed_segments
from streaming.landing.merge import Backlog, place
from tests.support.refusals import refused

NOW = 1_700_000_000_000
LATER = NOW + LEASE_MS + 1


def write(folder: Path, number: int, *stamps: int) -> None:
    folder.mkdir(exist_ok=True)
    rows = rows_table([SegmentRow(at, "fleet/s/d/heartbeat", b"{}", "mqtt") for at in stamps])
    write_segment(folder, number, rows, bridge=folder.name, last_canary_ms=NOW - 5)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Return the folders of bridge ``a`` (one segment) and ``b`` (two), whose leases are of NOW."""
    write(tmp_path / "a", 1, NOW - 9)
    write(tmp_path / "b", 1, NOW - 8, NOW - 7)
    write(tmp_path / "b", 2, NOW - 6)
    for name in "ab":
        write_lease(tmp_path / name, Lease(NOW, NOW))
    return {name: tmp_path / name for name in "ab"}


def read(bridges: Bridges, at_ms: int, rows: int = 100, **places: int) -> dict[str, tuple[list[int], Backlog]]:
    found = bridges.backlogs({"a": 0, "b": 0, **places}, at_ms, rows, 10**9)
    return {
        name: ([at for part in one.parts for at in part.rows["received_at_ms"].to_pylist()], one)
        for name, one in zip(bridges.folders, found, strict=True)
    }


# ---- backlogs and fences


def test_each_bridge_is_read_from_its_place_on(folders: dict[str, Path]) -> None:
    bridges = Bridges(folders, NOW)
    backlogs = read(bridges, NOW)
    assert {name: stamps for name, (stamps, _) in backlogs.items()} == {"a": [NOW - 9], "b": [NOW - 8, NOW - 7, NOW - 6]}
    assert [one.through_ms for _, one in backlogs.values()] == [NOW, NOW]
    assert read(bridges, NOW, b=place(1, 1))["b"][0] == [NOW - 7, NOW - 6]
    assert read(bridges, NOW, a=place(1, 1))["a"][0] == []
    stamps, one = read(bridges, NOW, rows=1)["b"]
    assert (stamps, one.more) == ([NOW - 8, NOW - 7], True)


def test_silent_bridge_is_fenced_once_by_a_gap_on_its_behalf(folders: dict[str, Path]) -> None:
    bridges = Bridges(folders, NOW)
    write_lease(folders["a"], Lease(LATER, LATER))
    backlogs = read(bridges, LATER)
    assert backlogs["b"][0] == [NOW - 8, NOW - 7, NOW - 6, NOW + 1]
    assert [one.through_ms for _, one in backlogs.values()] == [LATER, None]
    (row,) = read_segment(list_segments(folders["b"])[-1][1]).to_pylist()
    assert (row["topic"], json.loads(row["payload"])["from"]) == ("fleet/_/b/gap", NOW - 5)
    position = bridge_position(folders["b"])
    assert position is not None
    assert (position.gap_open, position.fence, position.last_canary_ms) == (True, True, NOW - 5)
    read(bridges, LATER + 1)
    assert len(list_segments(folders["b"])) == 3, "a gap is opened once"


def test_gap_on_behalf_of_a_bridge_names_its_sites(folders: dict[str, Path]) -> None:
    write_lease(folders["a"], Lease(LATER, LATER))
    read(Bridges(folders, NOW, sites={"b": ["oslo"]}), LATER)
    (gap,) = read_segment(list_segments(folders["b"])[-1][1]).to_pylist()
    assert json.loads(gap["payload"])["sites"] == ["oslo"]


@pytest.mark.parametrize(("takes_foreign", "sites"), [(False, {"except": ["oslo"]}), (True, {})])
def test_gap_of_the_first_bridge_names_the_sites_of_other_bridges(takes_foreign: bool, sites: dict[str, list[str]]) -> None:
    at = BridgePosition(1, NOW, last_canary_ms=NOW, shared=frozenset({"oslo"}))
    intake = BridgeSequencer("bridge-1", at, others=frozenset({"north"}), takes_foreign=takes_foreign)
    intake.go_live(LATER)
    (gap,) = intake.buffer.rows()
    content = json.loads(gap.payload)
    assert {name: content[name] for name in ("sites", "except") if name in content} == sites


def test_no_bridge_is_fenced_if_all_are_silent_or_landing_has_just_started(folders: dict[str, Path]) -> None:
    assert [one.through_ms for _, one in read(Bridges(folders, NOW), LATER).values()] == [None, None]
    assert bridge_position(folders["a"]) == BridgePosition(1, NOW - 9, last_canary_ms=NOW - 5, tail=(NOW - 9, 1))
    assert [one.through_ms for _, one in read(Bridges(folders, LATER), LATER).values()] == [NOW, NOW]


def test_cleanly_stopped_bridge_is_fenced_at_once(folders: dict[str, Path]) -> None:
    write_lease(folders["b"], Lease(NOW + 7, NOW + 7, stopped=True))
    assert read(Bridges(folders, NOW), NOW + 8)["b"][0][-1] == NOW + 8


@pytest.mark.parametrize("stopped", [False, True])
def test_bridge_that_is_back_without_a_new_lease_is_not_fenced_again(folders: dict[str, Path], stopped: bool) -> None:
    bridges = Bridges(folders, NOW)
    write_lease(folders["a"], Lease(LATER, LATER))
    write_lease(folders["b"], Lease(NOW, NOW, stopped=stopped))
    read(bridges, LATER)
    write(folders["b"], 4, LATER + 1)  # the segment closes the gap; the lease follows it
    read(bridges, LATER + 2)
    assert len(list_segments(folders["b"])) == 4
    write_lease(folders["a"], Lease(LATER + LEASE_MS, LATER + LEASE_MS))
    read(bridges, LATER + LEASE_MS + 2)
    assert len(list_segments(folders["b"])) == 5, "the bridge died after its return"


def test_landing_does_not_wait_for_a_single_bridge(tmp_path: Path) -> None:
    write(tmp_path / "a", 1, NOW)
    write_lease(tmp_path / "a", Lease(NOW - 100, NOW))
    (backlog,) = Bridges({"a": tmp_path / "a"}, NOW).backlogs({"a": 0}, LATER, 9, 9)
    assert backlog.through_ms is None


def test_the_newest_segment_stays_when_all_is_landed(folders: dict[str, Path]) -> None:
    for places in ({"a": place(1, 1), "b": place(2, 1)}, {"a": place(2, 0), "b": place(3, 0)}):  # after rows, after segments
        delete_landed_segments(folders, places)
        assert [[number for number, _ in list_segments(folder)] for folder in folders.values()] == [[1], [2]]


# ---- leases, segment numbers and handover


def test_unfinished_lease_of_a_killed_bridge_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lease(tmp_path, Lease(NOW, NOW))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_lease(tmp_path, Lease(LATER, LATER))
    assert len(list(tmp_path.iterdir())) == 2
    assert remove_leftovers(tmp_path) == 1
    assert read_lease(tmp_path) == Lease(NOW, NOW)


def test_segment_number_is_used_once(tmp_path: Path) -> None:
    write(tmp_path, 1, NOW)
    with pytest.raises(BridgeFencedError):
        write(tmp_path, 1, NOW + 1)
    assert read_segment(list_segments(tmp_path)[0][1])["received_at_ms"].to_pylist() == [NOW]
    assert [path.suffix for path in tmp_path.iterdir()] == [".arrow"]


def test_rows_after_a_promise_are_later_even_if_the_clock_is_set_back() -> None:
    intake = BridgeSequencer("b", None)
    intake.go_live(NOW)
    assert intake.promise(NOW) == NOW - 1
    intake.arrived(Arrived("fleet/s/d/heartbeat", b"{}", False, (1, 1)), NOW - 60_000)
    assert intake.last_ms == NOW
    assert intake.promise(NOW + 5) is None, "a row waits for its segment"
    intake.written()
    assert intake.promise(NOW - 60_000) == NOW
    intake.command("c", "fleet/_/_/policy", {}, NOW - 60_000)
    assert intake.last_ms == NOW + 1


def test_handover_of_sites_waits_for_a_canary_sent_after_it() -> None:
    intake = BridgeSequencer("bridge-1", None, others=frozenset({"north"}))
    intake.go_live(NOW)
    before = intake.canary(NOW)
    intake.share(frozenset({"oslo"}))
    after = intake.canary(NOW)
    number = 0

    def buffered_after(topic: str, payload: bytes = b"{}") -> int:
        nonlocal number
        number += 1
        intake.arrived(Arrived(topic, payload, False, (1, number)), NOW)
        return len(intake.buffer)

    assert buffered_after("fleet/_/north/tick") == 0
    assert buffered_after("fleet/oslo/d/heartbeat") == 1
    assert buffered_after(intake.canary_topic, before) == 2
    assert buffered_after("fleet/oslo/d/heartbeat") == 3, "it may have been published before the handover"
    assert buffered_after(intake.canary_topic, after) == 4
    assert buffered_after("fleet/oslo/d/heartbeat") == 4
    assert buffered_after("fleet/rome/d/heartbeat") == 5
    assert (intake.shared, intake.counts["elsewhere"]) == ({"oslo"}, 2)
    assert len(intake.written()) == number, "skipped messages are acknowledged, too"


@pytest.mark.parametrize("known", [False, True], ids=["new topic", "known topic"])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_handover_takes_effect_within_the_batch_of_the_canary(together: bool, known: bool) -> None:
    intake = BridgeSequencer("bridge-1", None, others=frozenset({"north"}))
    intake.go_live(NOW)
    numbers = count(1)

    def arrive(*messages: tuple[str, bytes]) -> list[str]:
        before = len(intake.buffer)
        arrived = [Arrived(*message, False, (1, next(numbers))) for message in messages]
        for batch in [arrived] if together else [[one] for one in arrived]:
            intake.arrived_together(batch, NOW)
        return [row.topic for row in intake.buffer.rows()][before:]

    oslo, rome = ("fleet/oslo/d/heartbeat", b"{}"), ("fleet/rome/d/heartbeat", b"{}")
    if known:
        assert arrive(oslo, rome) == [oslo[0], rome[0]]
    intake.share(frozenset({"oslo"}))
    canary = (intake.canary_topic, intake.canary(NOW))
    assert arrive(oslo, rome, canary, oslo, rome) == [oslo[0], rome[0], canary[0], rome[0]]
    assert arrive(oslo, rome, oslo) == [rome[0]]
    assert intake.counts["elsewhere"] == 3


def test_missing_or_truncated_lease_is_none(tmp_path: Path) -> None:
    assert read_lease(tmp_path) is None
    write_lease(tmp_path, Lease(1, 2, ("oslo",)))
    assert read_lease(tmp_path) == Lease(1, 2, ("oslo",))
    assert kept_sites([tmp_path, tmp_path / "none"]) == {"oslo"}
    (tmp_path / "lease.json").write_text('{"through_ms": 1')
    assert read_lease(tmp_path) is None


# ---- settings


def test_settings_name_bridges_and_their_sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings.toml").write_text('[bridges]\nnorth = ["oslo", "turku"]\n')
    assert load_settings(tmp_path).bridges == {"north": ("oslo", "turku")}
    monkeypatch.setenv("FLEET_BRIDGES", '{"south": ["rome"]}')
    assert load_settings(tmp_path / "other").bridges == {"south": ("rome",)}
    assert load_settings(tmp_path).bridges == {"north": ("oslo", "turku"), "south": ("rome",)}
    monkeypatch.setenv("FLEET_BRIDGES", "south")
    with refused("settings-faulty"):
        load_settings(tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('"bridge-1" = ["a"]', "a bridge name has"),
        ('"A b" = ["a"]', "a bridge name has"),
        ("north = []", 'bridge "north" has no sites'),
        ('north = ["a/#"]', "printable and without"),
        ('north = ["_"]', "is not a name"),
        ('north = ["a"]\nsouth = ["a"]', "a site has one bridge"),
        ("\n".join(f'b{one} = ["{one}"]' for one in range(499)), "at most 498 further bridges; got 499"),
    ],
)
def test_invalid_settings_of_bridges_are_refused(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(f"[bridges]\n{text}\n")
    with refused("settings-faulty", match=f"bridges: .*{fault}"):
        load_settings(tmp_path)


def test_a_site_keeps_its_bridge(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.prepare(None)
    assert home.bridges() == (BRIDGE,)
    home.divide({"north": ("oslo",)})
    home.divide({"north": ("turku", "oslo"), "south": ("rome",)})
    assert home.bridges() == (BRIDGE, "north", "south")
    for fewer in ({}, {"north": ("oslo",), "south": ("rome",)}, {"north": ("oslo", "turku"), "east": ("rome",)}):
        with refused("bridge-division-invalid"):
            home.divide(fewer)


def test_starting_bridge_keeps_an_unfinished_fence_of_landing(tmp_path: Path) -> None:
    (tmp_path / "000000000002.7.fence").touch()
    assert remove_leftovers(tmp_path) == 0
    Bridges({"a": tmp_path}, NOW)
    assert not list(tmp_path.iterdir())
