"""Record of generations: one is current, a switch is atomic, an incomplete one is removed."""

import json
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch.common.spark_session import plainly_named
from batch.state.prune import prune
from cli.commands.state.device_lists import read_devices
from fleetpulse.columnar.codec.versions import STORED_FORM
from fleetpulse.io.checkpoints.checkpoint import (
    is_settled,
    judged_up_to,
    position_after,
    query_id,
    read_start_position,
    relocate,
    unfinished,
    write_start_position,
)
from fleetpulse.io.checkpoints.generations import (
    Generation,
    Generations,
    checkpoint_of,
    discard_generation,
    load_generations,
    save_generations,
)
from fleetpulse.io.home.exclusive import exclusive_state_change, is_making
from fleetpulse.io.home.home import KEY_GROUPS, Home
from fleetpulse.io.maintenance.readers import reader_pins
from tests.support.homes.checkpoints import begun, write_batch
from tests.support.refusals import refused


@pytest.fixture
def home(home: Home) -> Home:
    home.lifecycle.mkdir(parents=True)
    return home


def test_new_home_has_generation_1_in_the_newest_stored_form(home: Home) -> None:
    assert home.generation() == Generation.first(KEY_GROUPS, STORED_FORM)
    assert home.checkpoint == checkpoint_of(home.lifecycle, 1)


def test_generation_that_is_built_changes_nothing_until_the_switch(home: Home) -> None:
    made = begun(home)
    assert (home.generation().number, home.key_groups()) == (1, KEY_GROUPS)
    save_generations(home.lifecycle, load_generations(home.lifecycle).switched(made.number, {"batch": 7}))
    assert (home.generation().number, home.key_groups()) == (2, 3)
    former = load_generations(home.lifecycle).predecessor()
    assert former is not None and (former.number, former.status, former.position) == (1, "retired", {"batch": 7})


def test_generations_with_chosen_devices_are_found_among_the_ancestors() -> None:
    made_from: list[dict[str, object]] = [
        {},
        {"snapshot": 0, "generation": 1, "only": "site = 'north'"},
        {"generation": 2, "batch": 9},
        {"generation": 1, "batch": 4},
        {"snapshot": 1, "generation": 4, "only": None},
        {"devices": "a.csv", "generation": 5},
    ]
    known = {number: Generation(number, 8, 4, "a verb", source) for number, source in enumerate(made_from, 1)}
    record = Generations(6, known)
    assert [set(record.with_chosen_devices(number)) for number in range(8)] == [set(), set(), {2}, {2}, set(), set(), {6}, set()]


def test_incomplete_generation_is_removed_when_the_next_one_is_built(home: Home) -> None:
    incomplete = checkpoint_of(home.lifecycle, begun(home).number)
    (incomplete / "state").mkdir(parents=True)
    again = begun(home)
    assert again.number == 3 and not incomplete.exists()
    discard_generation(home.lifecycle, again)
    assert {one.number: one.status for one in load_generations(home.lifecycle).known.values()} == {
        1: "current",
        2: "discarded",
        3: "discarded",
    }


def test_a_record_that_is_damaged_or_newer_is_refused(home: Home) -> None:
    made = begun(home)
    save_generations(home.lifecycle, load_generations(home.lifecycle).switched(made.number, {}))
    path = home.lifecycle / "generations.json"
    content = path.read_text()
    path.write_text(content.replace('"form": 4,\n   "made_by": "rescale"', '"form": 7,\n   "made_by": "rescale"'))
    with refused("state-version-unsupported"):
        home.generation()
    path.write_text(content[:40])
    with refused("generations-damaged"):
        home.generation()


def test_state_has_one_holder(home: Home) -> None:
    assert home.state_holder() is None
    with home.state_held("one"):
        assert (home.state_holder() or "").startswith("one (process")
        with refused("state-in-use"), home.state_held("two"):
            pass
    assert home.state_holder() is None


def test_checkpoint_has_a_position_and_is_settled_if_all_batches_are_committed(tmp_path: Path) -> None:
    with refused("checkpoint-empty"):
        position_after(tmp_path)
    write_batch(tmp_path, 4, 10, (100, 200))
    assert (position_after(tmp_path).version, position_after(tmp_path).newest_ms, judged_up_to(tmp_path)) == (10, 201, (4, 201))
    assert is_settled(tmp_path), "each batch judges all key groups up to its newest row"
    write_batch(tmp_path, 5, 10, (200, 200))
    assert is_settled(tmp_path)
    write_batch(tmp_path, 6, 12, (200, 300), committed=False)
    assert unfinished(tmp_path) == 6 and not is_settled(tmp_path)
    with refused("checkpoint-batch-missing"):
        position_after(tmp_path, 3)
    (tmp_path / "offsets" / "5").write_text('v1\n{"conf": {}}\n{"someone": "else"}')
    with refused("checkpoint-damaged"):
        position_after(tmp_path)


def test_new_checkpoint_is_judged_up_to_its_start_position(tmp_path: Path) -> None:
    write_batch(tmp_path, 0, 10, (0, 0))
    write_start_position(tmp_path, 5_000)
    assert read_start_position(tmp_path) == 5_000
    assert judged_up_to(tmp_path) == (0, 5_000)
    assert position_after(tmp_path).newest_ms == 5_000 and is_settled(tmp_path)
    write_start_position(tmp_path, None)
    assert read_start_position(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["begun-with.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"newest_ms": "soon"}', "\x00\x00"])
def test_damaged_start_position_is_refused(tmp_path: Path, content: str) -> None:
    write_batch(tmp_path, 0, 10, (0, 0))
    (tmp_path / "begun-with.json").write_text(content)
    for read in (read_start_position, judged_up_to, position_after):
        with refused("checkpoint-damaged"):
            read(tmp_path)


def test_relocated_checkpoint_names_the_schemas_in_its_own_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a home" / "state" / "0" / "_metadata" / "v2"
    folder.mkdir(parents=True)
    stores = [{"storeName": "default", "stateSchemaFilePaths": ["file:/elsewhere/state/0/_stateSchema/default/0_ab"]}]
    (folder / "0").write_text("v2\n" + json.dumps({"operatorInfo": {}, "stateStoreInfo": stores}))
    (folder / ".0.crc").write_bytes(b"checksum of the former content")
    relocate(tmp_path / "a home")
    [store] = json.loads((folder / "0").read_text().split("\n", 1)[1])["stateStoreInfo"]
    assert store["stateSchemaFilePaths"] == [f"file:{tmp_path}/a home/state/0/_stateSchema/default/0_ab"]
    assert not (folder / ".0.crc").exists()
    before = (folder / "0").stat().st_mtime_ns
    relocate(tmp_path / "a home")
    assert (folder / "0").stat().st_mtime_ns == before
    assert query_id(tmp_path / "a home") is None


@pytest.mark.parametrize("content", ["", "v2\n{", 'v2\n{"operatorInfo": {}}'], ids=["empty", "no JSON", "a key is missing"])
def test_damaged_checkpoint_metadata_affects_only_its_own_generation(tmp_path: Path, content: str) -> None:
    home = Home(tmp_path / "a home")
    stores = [{"stateSchemaFilePaths": ["file:/elsewhere/state/0/_stateSchema/default/0_ab"]}]
    files = [checkpoint_of(home.lifecycle, number) / "state" / "0" / "_metadata" / "v2" / "0" for number in (1, 2)]
    for path in files:
        path.parent.mkdir(parents=True)
        path.write_text("v2\n" + json.dumps({"stateStoreInfo": stores}))
    files[0].write_text(content)
    with refused("checkpoint-damaged", match=rf'^"{files[0]}" is not metadata of a Spark state store, .* bootstrap --damaged$'):
        relocate(checkpoint_of(home.lifecycle, 1))
    with plainly_named(home):  # a symbolic link, if needed; on exit, checkpoints are relocated to their own path
        pass
    assert files[0].read_text() == content
    [store] = json.loads(files[1].read_text().split("\n", 1)[1])["stateStoreInfo"]
    assert store["stateSchemaFilePaths"] == [f"file:{files[1].parents[2]}/_stateSchema/default/0_ab"]


def test_a_list_of_devices_is_read_or_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "devices.csv"
    path.write_text("device_id,site,registered_at\npump-1,oslo,2026-01-31T12:00:00Z\n")
    [device] = read_devices(path).to_pylist()
    assert (device["device_id"], device["site"], device["device_class"]) == ("pump-1", "oslo", None)
    path.write_text("device_id,site,registered_at\npump-1,oslo,yesterday\n")
    with refused("list-invalid"):
        read_devices(path)
    path.write_text("device_id,site,registered_at\npump-1,oslo,1769860800000\n")
    with refused("list-invalid"):
        read_devices(path)
    path.write_text("device_id,site,site,registered_at\npump-1,oslo,bergen,2026-01-31T12:00:00Z\n")
    with refused("list-invalid"):
        read_devices(path)
    with refused("list-missing"):
        read_devices(tmp_path / "absent.parquet")


def _listed(**more: Any) -> pa.Table:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    return pa.table({"device_id": ["pump-1"], "site": ["oslo"], "registered_at": [at], **more})


@pytest.mark.parametrize(
    "at",
    [
        pa.array(["2026-01-31T12:00:00Z"]),
        pa.array(["2026-01-31T13:00:00+01:00"], pa.large_string()),
        pa.array(["2026-01-31T12:00:00Z"]).dictionary_encode(),
        pa.array([1_769_860_800_000], pa.timestamp("ms")),
        pa.array([1_769_860_800], pa.timestamp("s", tz="Europe/Oslo")),
    ],
    ids=lambda at: str(at.type),
)
def test_timestamps_of_a_parquet_list_are_read_in_any_unit_and_zone(tmp_path: Path, at: pa.Array) -> None:
    pq.write_table(_listed(registered_at=at), tmp_path / "devices.parquet")
    [device] = read_devices(tmp_path / "devices.parquet").to_pylist()
    assert device["registered_at"] == datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (_listed(registered_at=[1_769_860_800_000]), r"holds timestamps, or text such as .*; got int64; cast it"),
        (_listed(registered_at=[1_769_860_800.5]), r"holds timestamps, or text such as .*; got double; cast it"),
        (_listed(registered_at=["yesterday"]), r"\(Failed to parse string: 'yesterday'.*registered_at like 2026"),
        (_listed(registered_at=["2026-01-31T12:00:00"]), r"expected a zone offset.*registered_at like 2026"),
        (_listed(device_id=[["pump-1"]]), r"\(Unsupported cast from list.*use the columns device_id, site"),
        (_listed(device_id=[b"\xff"]), r"\(Invalid UTF8 payload\); use the columns device_id, site"),
        (_listed().append_column("site", [["bergen"]]), r'must be unique; got "site" 2 times; keep one of them'),
        (_listed().drop_columns(["site"]), r"has the columns device_id, .*; absent: site$"),
    ],
)
def test_invalid_parquet_list_is_refused_with_the_reason(tmp_path: Path, table: pa.Table, reason: str) -> None:
    pq.write_table(table, tmp_path / "devices.parquet")
    with refused("list-invalid", match=rf'devices.parquet" is not a valid list of devices.*{reason}'):
        read_devices(tmp_path / "devices.parquet")


def test_unfinished_generation_pins_versions_only_during_a_state_change(home: Home) -> None:
    incomplete = begun(home)
    temporary = home.lifecycle / "scratch-0002"
    temporary.mkdir()
    with exclusive_state_change(home, "a test", lambda message: None):
        assert is_making(home)
        assert f"generation {incomplete.number}" in {pin.reader for pin in reader_pins(home)}
    assert not is_making(home)
    assert f"generation {incomplete.number}" not in {pin.reader for pin in reader_pins(home)}
    prune(home, 1, lambda message: None, dry=False)
    assert not temporary.exists()
    known = load_generations(home.lifecycle).of(incomplete.number)
    assert known is not None and known.status == "discarded"


def test_repartitioned_generation_is_traced_to_its_source(home: Home) -> None:
    record = load_generations(home.lifecycle)
    for number, verb, source in ((1, "up", 0), (2, "rescale", 1), (3, "repartition", 2), (4, "repartition", 3)):
        record = record.with_one(Generation(number, 8, 4, verb, {"generation": source}))
    assert record.repartitioned_from(4) == [4, 3, 2]
    assert record.repartitioned_from(2) == [2]


def test_generation_records_its_requester(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    home.prepare(None)
    home.lifecycle.mkdir(parents=True)
    monkeypatch.delenv("FLEET_ASKED_BY", raising=False)
    monkeypatch.setenv("LOGNAME", "ada")
    assert begun(home).asked_by == f"ada on {socket.gethostname()}"
    monkeypatch.setenv("FLEET_ASKED_BY", "ada, fleet_rescale manual__1")
    made = begun(home)
    assert load_generations(home.lifecycle).known[made.number].asked_by == "ada, fleet_rescale manual__1"
    content = json.loads((home.lifecycle / "generations.json").read_text())
    for one in content["generations"]:
        one.pop("asked_by")
    (home.lifecycle / "generations.json").write_text(json.dumps(content))
    assert load_generations(home.lifecycle).known[made.number].asked_by == ""
