"""Capacity plans: predicted bytes are within a fifth of real ones, and formulas keep their bounds."""

import json
from pathlib import Path

import pytest

from batch.calibrate import load, newest_file, piece_bytes, sample_key_group, save, signals, snapshot_files, transitions
from cli.commands.inspect.plan import show_plan
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Origin
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES, MODE_HOURLY_SITE, QUARANTINE, STREAM_HEALTH
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.segments import SegmentRow, rows_table, write_segment
from fleetpulse.io.tables import tables
from fleetpulse.planning.model import (
    DEVICES_A_GROUP,
    Figures,
    Fleet,
    Parquet,
    batch_cpu_s,
    batch_time_s,
    cores_needed,
    first_key_groups,
    group_bytes,
    key_groups,
    plan,
    snapshot_bytes,
    snapshots_kept,
)
from fleetpulse.planning.partition_skew import busiest
from fleetpulse.reports.present.replaced import replace_file
from streaming.landing.landing import Landing
from tests.support.histories.histories import START, signal
from tests.support.homes.homes import commit_batch, landed_home
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
FIGURES = Figures()
WITHIN = 0.2


def _is_near(predicted: float, actual: float) -> bool:
    return abs(predicted / actual - 1) < WITHIN


@pytest.mark.parametrize(
    ("devices", "calls", "errors", "away"),
    [(1_500, 20, 0.0, 0.0), (6_000, 20, 0.0, 0.2), (12_000, 18, 0.05, 0.1), (4_000, 30, 0.3, 0.8)],
)
def test_bytes_of_a_key_group_are_predicted(devices: int, calls: int, errors: float, away: float) -> None:
    group, _ = sample_key_group(devices, calls, errors, away)
    fleet = Fleet(devices, error_share=errors)
    heard = calls - 1 - 10 * away  # the last call is pending, and devices that are away miss ten
    assert _is_near(group_bytes(devices, heard, away, fleet, FIGURES), len(group.to_bytes()))


def test_bytes_of_pending_rows_are_predicted() -> None:
    group, step = sample_key_group(5_000, 2, 0.0, 0.0)
    assert _is_near(sum(map(len, group.waiting)) * FIGURES.waiting_bytes, sum(len(rows) for _, rows in step.chunks))


@pytest.mark.parametrize(("devices", "rows"), [(300, 3_000), (9_000, 18_000)])
def test_bytes_of_landed_bronze_are_predicted(devices: int, rows: int, tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(Deployment())
    sent: list[SegmentRow] = []
    for call in range(-(-rows // devices)):
        batch = signals(devices, call, 0.0).select(["received_at_ms", "presence_ms", "device_id", "gateway"])
        for one in batch.to_pylist()[: rows - len(sent)]:
            content = {"ts": one["presence_ms"], "seq": call, "boot": "b1", "gateway": one["gateway"]}
            payload = json.dumps(content).encode()
            topic = f"fleet/main/{one['device_id']}/heartbeat"
            sent.append(SegmentRow(one["received_at_ms"], topic, payload, Origin.MQTT.value))
    write_segment(home.segments, 1, rows_table(sent), bridge="bridge-1", last_canary_ms=None)
    assert Landing(home).step() == 1
    assert _is_near(FIGURES.landed.size(rows, devices), newest_file(home, MESSAGES.name))


@pytest.mark.parametrize(("devices", "rows"), [(800, 36_000), (30_000, 90_000)])
def test_bytes_of_a_compacted_piece_of_bronze_are_predicted(devices: int, rows: int, tmp_path: Path) -> None:
    assert _is_near(FIGURES.piece.size(rows, devices), piece_bytes(Home(tmp_path / "home"), rows, devices))


@pytest.mark.parametrize("devices", [500, 6_000])
def test_bytes_of_judgements_are_predicted(devices: int, tmp_path: Path) -> None:
    rows = transitions(devices)
    assert rows.num_rows > devices
    home = Home(tmp_path / "home")
    home.prepare(Deployment())
    tables.create(home, JUDGEMENTS)
    tables.append(home, JUDGEMENTS, rows, "test", 1)
    assert _is_near(FIGURES.judgements.size(rows.num_rows), newest_file(home, JUDGEMENTS.name))


@pytest.mark.parametrize(("devices", "away"), [(1_500, 0.0), (6_000, 0.1), (15_000, 0.4)])
def test_bytes_of_a_snapshot_are_predicted(devices: int, away: float, tmp_path: Path) -> None:
    rows, sizes = snapshot_files(tmp_path, devices, away)
    fleet = Fleet(devices, lateness_ms=1_000, interval_ms=round(1_000 * devices / rows["signal"]), copy_share=0)
    assert _is_near(snapshot_bytes(fleet, FIGURES), sum(sizes.values()))


def test_planned_storage_includes_snapshots_and_the_checkpoint_for_rollback() -> None:
    fleet = Fleet(100_000)
    planned = plan(fleet, FIGURES)
    assert snapshots_kept(fleet, 30) == 24 + 29, "all snapshots of the last day, and one of each day before"
    assert snapshots_kept(Fleet(100_000, keep_snapshot_days=7), 30) == 24 + 6
    assert planned.storage["device_snapshots"] == 53 * snapshot_bytes(fleet, FIGURES)
    assert planned.storage["checkpoints"] == 2 * planned.checkpoint_bytes
    assert (
        plan(Fleet(100_000, lateness_ms=3_600_000), FIGURES).storage["device_snapshots"] > 2 * planned.storage["device_snapshots"]
    )


@pytest.mark.parametrize("devices", [1, 100, 40_000, 100_000, 1_000_000, 20_000_000])
def test_key_groups_have_a_bounded_size_and_fill_every_partition(devices: int) -> None:
    planned = plan(Fleet(devices), FIGURES)
    least, most = DEVICES_A_GROUP
    fewest = max(-(-devices // most), min(planned.partitions, 2) if devices < least * planned.partitions else planned.partitions)
    assert planned.devices_a_group <= most
    assert fewest <= planned.key_groups <= max(fewest + 3, fewest * 5 // 4)
    assert planned.key_groups >= planned.partitions or devices < least * planned.partitions
    assert key_groups(devices, 2) <= key_groups(devices * 2, 2)


@pytest.mark.parametrize(("devices", "partitions"), [(100, 2), (100_000, 2), (1_000_000, 2), (100_000, 4), (1_000_000, 16)])
def test_key_groups_balance_partitions_at_least_as_well_as_the_fewest(devices: int, partitions: int) -> None:
    fewest, chosen = max(-(-devices // DEVICES_A_GROUP[1]), 2), key_groups(devices, partitions)
    assert fewest <= chosen
    assert busiest(chosen, partitions) <= busiest(fewest, partitions)
    assert (key_groups(10_000, 2), key_groups(1_000_000, 2)) == (5, 32)
    assert busiest(key_groups(100_000, 2), 2) == 1.0, "with the fewest, four, one partition would have three"


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8, 16, 32, 128])
def test_new_home_has_key_groups_for_its_cores(cores: int) -> None:
    groups = first_key_groups(cores)
    assert groups >= max(8, 2 * cores)
    assert cores <= 2 or groups <= 5 * cores
    assert round(busiest(groups, cores), 1) <= round(busiest(max(8, 2 * cores), cores), 1)
    assert groups == 8 or all(
        round(busiest(groups, cores), 1) <= round(busiest(count, cores), 1) for count in range(2 * cores, 5 * cores + 1, 7)
    )
    assert [first_key_groups(few) for few in (1, 2)] == [8, 8], "existing homes of two cores do not differ from new ones"


def test_plan_for_more_cores_keeps_them_busy() -> None:
    for devices in (100_000, 1_000_000):
        fleet = Fleet(devices, interval_ms=1_000, held_ms=0)
        few, many = plan(fleet, FIGURES), plan(fleet, FIGURES, cores=32)
        assert (many.cores, many.partitions, many.executors) == (32, 32, 8)
        assert many.groups_a_core == many.key_groups / 32 >= 2
        assert many.key_groups >= max(few.key_groups, first_key_groups(32))
        assert many.skew == busiest(many.key_groups, 32) < busiest(32, 32)
        assert many.as_rows()["groups_a_core"] == round(many.groups_a_core, 3), "a fraction, not a whole number"
        assert many.batch_s < few.batch_s


def test_batch_is_as_long_as_its_fixed_work_and_its_busiest_partition() -> None:
    fleet = Fleet(1_000_000, interval_ms=10_000, batch_every_ms=200, held_ms=0)
    even, skewed = batch_time_s(fleet, FIGURES, 16), batch_time_s(fleet, FIGURES, 16, 2.0)
    assert even < skewed, "the core of the busiest partition ends last"
    assert batch_time_s(fleet, FIGURES, 1_024) >= FIGURES.batch_s / 2, "more cores do not shorten the fixed work of a batch"


@pytest.mark.parametrize("devices", [100, 100_000, 5_000_000])
def test_batch_processes_the_messages_received_during_the_previous_batch(devices: int) -> None:
    fleet = Fleet(devices, held_ms=0)
    cores = cores_needed(fleet, FIGURES)
    batch_s = batch_time_s(fleet, FIGURES, cores)
    assert batch_s == pytest.approx(batch_cpu_s(fleet, FIGURES, batch_s) / cores, rel=0.01)
    assert batch_time_s(Fleet(50_000_000, interval_ms=1_000), FIGURES, 2) == float("inf")


def test_batch_starts_after_the_hold_time_or_when_it_is_full() -> None:
    small, large = (batch_time_s(Fleet(devices, 60_000, held_ms=6_000), FIGURES, 4) for devices in (100, 300_000))
    assert (small, large) == pytest.approx((6.0, 4.0), rel=0.02)


def test_batch_interval_of_a_small_fleet_follows_its_setting() -> None:
    for every_ms in (200, 5_000):
        batch_s = batch_time_s(Fleet(100, batch_every_ms=every_ms, held_ms=0), FIGURES, 2)
        assert batch_s == pytest.approx(max(every_ms / 1000, FIGURES.batch_s / 2), rel=0.01)


def test_larger_load_never_needs_fewer_resources() -> None:
    small = plan(Fleet(50_000), FIGURES)
    for larger in (
        Fleet(100_000),
        Fleet(50_000, interval_ms=10_000),
        Fleet(50_000, changes_a_day=5),
        Fleet(50_000, lateness_ms=600_000),
    ):
        planned = plan(larger, FIGURES)
        assert planned.state_bytes >= small.state_bytes
        assert planned.cores >= small.cores
        assert sum(planned.storage.values()) >= 0.99 * sum(small.storage.values())
    assert plan(Fleet(50_000, keep_days=1), FIGURES).storage["messages"] < small.storage["messages"] / 20


def test_bytes_of_the_modes_by_hour_are_an_upper_bound(tmp_path: Path) -> None:
    home, days, changes = Home(tmp_path / "home"), 2, 40_000
    fleet = Fleet(10_000, changes_a_day=changes / 10_000 / days)
    planned = plan(fleet, FIGURES, days).storage
    sql = f"""SELECT to_timestamp(3600 * (n * 7919 % {24 * days})) AS hour, 's' || n * 104729 % 50 AS site,
              'default' AS device_class, ['online', 'offline'][1 + n % 2] AS mode, sum(1 - 2 * (n % 2)) AS devices_delta
              FROM range({2 * changes}) AS t(n) GROUP BY ALL"""
    with tables.connect() as connection:
        rows = replace_file(home, connection, MODE_HOURLY_SITE, (sql, []), "site, device_class, mode, hour", ("test", ""))
    assert rows
    stored = sum(path.stat().st_size for path in home.table(MODE_HOURLY_SITE.name).glob("*.parquet"))
    assert planned["mode_hourly_site"] * rows / (2 * changes) * 0.2 < stored < planned["mode_hourly_site"]
    assert planned["device_current"] == 10_000 * FIGURES.current_bytes


def test_calibration_figures_round_trip(tmp_path: Path) -> None:
    assert load(tmp_path) == Figures()
    own = Figures(source="here", device_bytes=99, landed=Parquet(1, 2, 3))
    save(own, tmp_path / "cache")
    assert load(tmp_path / "cache") == own
    (tmp_path / "cache" / "planning.json").write_text('{"unknown": 1}')
    with refused("calibration-unreadable"):
        load(tmp_path / "cache")


def test_plan_command_shows_actual_use_next_to_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [signal(10 * beat + number, f"d{number}") for beat in range(30) for number in range(5)]
    home = landed_home(tmp_path / "home", rows, Deployment())
    for table in (JUDGEMENTS, QUARANTINE, STREAM_HEALTH):
        tables.create(home, table)
    commit_batch(home.checkpoint, 0, START)
    show_plan(home=home.path, json_lines=True)
    [shown] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert shown["fleet"]["devices"] == 5
    assert shown["fleet"]["interval_ms"] == pytest.approx(10_000, rel=0.05)
    assert (shown["now"]["key_groups"], shown["now"]["partitions"]) == (home.key_groups(), 2)
    assert shown["now"]["storage_bytes"]["messages"] > 0
    assert shown["now"]["storage_bytes"].keys() == shown["plan"]["storage_bytes"].keys()
    assert shown["now"]["storage_bytes"]["checkpoints"] > 0
    show_plan(home=home.path)
    assert "messages per second" in (text := capsys.readouterr().out)
    assert " 0.51 " in text
    (home.path / "settings.toml").write_text('heap = "3g"\n')
    show_plan(home=home.path, json_lines=True)
    [larger] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert larger["plan"]["memory_bytes"] - shown["plan"]["memory_bytes"] == 2 * 1024**3
