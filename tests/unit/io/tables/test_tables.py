"""Reading of tables and checkpoints by commands, and incremental reading by mirrors."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from fleetpulse.core.catalog import TABLES
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES, QUARANTINE
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.delta.corruption import DamagedError
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables as delta
from fleetpulse.paths import ROOT
from fleetpulse.reports import frontiers
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def transition(device_id: str, at_ms: int) -> dict[str, object]:
    return {"kind": "transition", "device_id": device_id, "event_time_ms": at_ms, "transition_no": 1, "trigger": "signal"}


@pytest.mark.parametrize("name", ["plain", "two words", "year=2026", "größe", "it's #1, & more"])
def test_tables_are_readable_in_a_folder_of_any_name(name: str, tmp_path: Path) -> None:
    home = Home(tmp_path / name)
    delta.create(home, JUDGEMENTS)
    delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, [transition("a", 1), transition("b", 2)]), "test", 1)
    found = delta.query(home, "SELECT device_id, kind, epoch_ms(event_time) AS at_ms FROM transitions ORDER BY device_id")
    assert found == [
        {"device_id": "a", "kind": "transition", "at_ms": 1},
        {"device_id": "b", "kind": "transition", "at_ms": 2},
    ]


def test_missing_or_empty_table_reads_with_its_declared_columns(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for stage in ("missing", "log without an entry", "created"):
        for table in TABLES:
            if stage == "log without an entry":
                log = home.table(table.name) / "_delta_log"
                log.mkdir(parents=True)
                (log / ".00000000000000000000.json.1c.tmp").write_text("{")
                assert delta.files_of(home, table, table.columns[0].name) == [] and delta.stored_types(home, table) is None
            elif stage == "created":
                delta.create(home, table)
                assert delta.version(home.table(table.name)) == 0
            with delta.reading(home, [table.name]) as tables:
                described = delta.fetch(tables, f"DESCRIBE {table.name}")
                assert [row["column_name"] for row in described] == [column.name for column in table.columns]
                assert delta.fetch(tables, f"SELECT * FROM {table.name}") == []


def test_table_that_lost_its_log_entries_is_damaged_and_not_recreated(tmp_path: Path) -> None:
    home = Home(tmp_path)
    delta.create(home, JUDGEMENTS)
    delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, [transition("a", 1)]), "test", 1)
    for entry in (home.table("judgements") / "_delta_log").glob("*.json"):
        entry.unlink()
    with refused("file-damaged", DamagedError):
        delta.query(home, "SELECT * FROM transitions")
    with refused("file-damaged", DamagedError):
        delta.create(home, JUDGEMENTS)


def test_file_in_the_folder_of_tables_is_no_table(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (home.path / "tables").mkdir()
    (home.path / "tables" / "judgements").write_text("")
    assert not holds_table(home.table("judgements"))


def test_file_that_is_older_than_a_column_reads_it_as_null(tmp_path: Path) -> None:
    home = Home(tmp_path)
    older = delta.to_table(MESSAGES, [{"received_at_ms": 1, "kind": "tick", "device_id": "a"}]).drop_columns(["note"])
    write_deltalake(str(home.table("messages")), older)
    newer = delta.to_table(MESSAGES, [{"received_at_ms": 2, "kind": "tick", "device_id": "b", "note": "odd"}])
    write_deltalake(str(home.table("messages")), newer, mode="append", schema_mode="merge")
    found = delta.query(home, "SELECT device_id, note FROM messages ORDER BY received_at", tables=["messages"])
    assert found == [{"device_id": "a", "note": None}, {"device_id": "b", "note": "odd"}]


def test_timestamps_with_and_without_a_zone_are_read_as_utc(tmp_path: Path) -> None:
    home = Home(tmp_path)
    rows = delta.to_table(MESSAGES, [{"received_at_ms": 1_700_000_000_123, "kind": "tick", "device_id": "a"}])
    without_zone = rows.set_column(0, "received_at", rows["received_at"].cast(pa.timestamp("us")))
    for number, table in enumerate((rows, without_zone)):
        other = Home(home.path / str(number))
        write_deltalake(str(other.table("messages")), table)
        found = delta.query(other, "SELECT received_at FROM messages", tables=["messages"])
        assert found[0]["received_at"].timestamp() * 1000 == 1_700_000_000_123


def write_batch(checkpoint: Path, number: int, watermark_ms: int, *, committed: bool = True) -> None:
    for folder in ("offsets", "commits"):
        (checkpoint / folder).mkdir(parents=True, exist_ok=True)
    (checkpoint / "offsets" / str(number)).write_text('v1\n{"batchWatermarkMs": 0}\n{"version": 1}\n')
    if committed:
        (checkpoint / "commits" / str(number)).write_text(f'v1\n{{"nextBatchWatermarkMs": {watermark_ms}}}')


def test_judged_position_is_that_of_the_newest_committed_batch(tmp_path: Path) -> None:
    assert judged_up_to(tmp_path / "absent") is None
    write_batch(tmp_path, 0, 0)
    assert judged_up_to(tmp_path) == (0, 1)
    write_batch(tmp_path, 1, 5_000)
    write_batch(tmp_path, 2, 9_000, committed=False)
    (tmp_path / "commits" / ".1.crc").write_text("")
    assert judged_up_to(tmp_path) == (1, 5_001)


def test_inspection_commands_import_neither_spark_nor_pandas() -> None:
    script = (
        "import sys, cli.app, cli.commands.inspect.status, cli.commands.inspect.listen, cli.commands.fleet.device\n"
        "import fleetpulse.reports.judgements\n"
        "print(sorted({'pyspark', 'pandas', 'numba', 'py4j', 'paho'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_bridge_does_not_import_libraries_of_other_commands() -> None:
    script = (
        "import sys, cli.entry, cli.commands.run.job, streaming.bridge.bridge, fleetpulse.settings\n"
        "print(sorted({'pyspark', 'pandas', 'numba', 'deltalake', 'duckdb', 'cli.app'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_backtest_imports_neither_spark_nor_pandas_and_pandas_can_be_unblocked() -> None:
    script = (
        "import sys\n"
        "from fleetpulse.io.system.process import block_imports, unblock_imports\n"
        "block_imports('pandas')\n"
        "import cli.commands.batch.backtest, batch.backtest\n"
        "print(sorted({'pyspark', 'pandas', 'py4j', 'paho'} & set(sys.modules)))\n"
        "unblock_imports('pandas')\n"
        "import pandas"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_mirror_reads_new_files_and_reloads_after_compaction(tmp_path: Path) -> None:
    home = Home(tmp_path)
    mirror = delta.Mirror(home, ["judgements"])
    mirror.refresh()
    seen: list[list[str]] = []
    for number, device_id in enumerate("abc", 1):
        delta.create(home, JUDGEMENTS)
        delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, [transition(device_id, number)]), "test", number)
        mirror.refresh()
        mirror.refresh()
        found = delta.fetch(mirror.connection, "SELECT device_id FROM transitions ORDER BY device_id")
        seen.append([row["device_id"] for row in found])
    assert seen == [["a"], ["a", "b"], ["a", "b", "c"]]
    DeltaTable(str(home.table("judgements"))).optimize.compact()
    mirror.refresh()
    found = delta.fetch(mirror.connection, "SELECT device_id FROM transitions ORDER BY device_id")
    assert [row["device_id"] for row in found] == ["a", "b", "c"]


def test_mirror_keeps_only_the_requested_columns(tmp_path: Path) -> None:
    home = Home(tmp_path)
    delta.create(home, QUARANTINE)
    quarantined = {"received_at_ms": 1, "topic": "t", "payload": b"x" * 1_000, "reason": "json", "detail": "d", "bridge": "b"}
    delta.append(home, QUARANTINE, delta.to_table(QUARANTINE, [quarantined]), "test", 1)
    mirror = delta.Mirror(home, ["quarantine"], {"quarantine": ("reason",)})
    mirror.refresh()
    assert delta.fetch(mirror.connection, "SELECT reason, payload, detail FROM quarantine") == [
        {"reason": "json", "payload": None, "detail": None}
    ]


def test_mirror_keeps_only_the_requested_rows(tmp_path: Path) -> None:
    home = Home(tmp_path)
    delta.create(home, JUDGEMENTS)
    rows = [transition("a", 1), {"kind": "summary", "key_group": 1, "counts": "{}"}]
    delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, rows), "test", 1)
    mirror = delta.Mirror(home, ["judgements"], rows={"judgements": "kind != 'summary'"})
    mirror.refresh()
    assert delta.fetch(mirror.connection, "SELECT kind, device_id FROM judgements") == [{"kind": "transition", "device_id": "a"}]


def test_query_skips_files_that_cannot_contain_a_value(tmp_path: Path) -> None:
    home = Home(tmp_path)
    delta.create(home, MESSAGES)
    for number, kind in enumerate(("gap", "heartbeat", "gap"), 1):
        row = {"received_at_ms": number * 1_000, "kind": kind, "device_id": "d", "site": "s", "clock": "received"}
        delta.append(home, MESSAGES, delta.to_table(MESSAGES, [row]), "test", number)
    assert len(delta.files_of(home, MESSAGES, "kind", ["gap"])) == 2
    found = delta.query(
        home, "SELECT count(*) AS n FROM messages WHERE kind = 'gap'", tables=["messages"], only={"messages": ("kind", ["gap"])}
    )
    assert found == [{"n": 2}]
    assert [file.rows for file in delta.files_of(home, MESSAGES, "received_at")] == [1, 1, 1]


def test_frontier_of_the_first_batch_is_the_lowest_one_of_the_key_groups(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.prepare(None)
    assert frontiers.frontier_ms(home, None) is None
    delta.create(home, JUDGEMENTS)

    def summary(number: int, group: int, at_ms: int | None) -> None:
        row = {"kind": "summary", "device_id": "_", "key_group": group, "event_time_ms": at_ms}
        delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, [row]), "test", number)

    summary(1, 0, 5_000)
    assert frontiers.frontier_ms(home, None) == 5_000
    summary(2, 1, 3_000)
    assert frontiers.frontier_ms(home, None) == 3_000
    summary(3, 2, None)
    assert frontiers.frontier_ms(home, None) is None


def test_readings_of_a_block_share_an_instance_and_the_versions_of_the_tables(tmp_path: Path) -> None:
    home = Home(tmp_path)
    delta.create(home, JUDGEMENTS)
    for number in (1, 2):
        rows = delta.to_table(JUDGEMENTS, [transition(f"a{number}", number)])
        if number == 1:
            delta.append(home, JUDGEMENTS, rows, "test", number)
            continue
        with delta.one_instance():
            assert delta.query(home, "SELECT count(*) AS n FROM judgements") == [{"n": 1}]
            delta.append(home, JUDGEMENTS, rows, "test", number)
            with delta.reading(home, [JUDGEMENTS.name]) as one, delta.reading(home, [QUARANTINE.name]) as other:
                assert delta.fetch(one, "SELECT count(*) AS n FROM transitions") == [{"n": 1}]
                one.execute("CREATE TABLE own AS FROM judgements")
                assert delta.fetch(other, "SELECT table_name FROM duckdb_tables() WHERE database_name = current_database()") == []
    assert delta.query(home, "SELECT count(*) AS n FROM judgements") == [{"n": 2}]


def test_reading_of_a_device_skips_files_without_it(tmp_path: Path) -> None:
    home = Home(tmp_path)
    delta.create(home, JUDGEMENTS)
    for number, device_id in enumerate("ab", 1):
        delta.append(home, JUDGEMENTS, delta.to_table(JUDGEMENTS, [transition(device_id, number)]), "test", number)
    [other] = [file.path for file in delta.files_of(home, JUDGEMENTS, "device_id", ["b"])]
    other.write_bytes(b"damaged")
    with delta.reading(home, [JUDGEMENTS.name], device_id="a") as tables:
        assert delta.fetch(tables, "SELECT device_id FROM transitions") == [{"device_id": "a"}]
