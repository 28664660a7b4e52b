"""Crash recovery of maintenance: a killed and repeated run ends as an undisturbed one."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from deltalake import DeltaTable

from cli.commands.batch.maintain import _segments as landed_segments
from fleetpulse.core.tables import DEVICE_SNAPSHOTS, MESSAGES
from fleetpulse.io.checkpoints.generations import begin_generation, checkpoint_of, load_generations, save_generations
from fleetpulse.io.home.home import BRIDGE, Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.row_accounting import removed_in
from fleetpulse.io.tables.snapshots import snapshots
from fleetpulse.paths import ROOT
from streaming.landing.landing import LANDED
from streaming.landing.merge import MAX_SEGMENT_ROWS
from tests.support.form import IS_DEFAULT
from tests.support.histories.histories import START
from tests.support.homes.homes import take_snapshot
from tests.support.homes.maintained import DAYS, EACH, KEEP_LITTLE, Read, date, four_days, judged_up_to, read_on, run_maintain

pytestmark = pytest.mark.unit
VERSIONS: Final = DAYS * EACH
# Changes before which a run is killed, in order: pattern of the change, and number of its occurrence.
# Each run starts where the previous one was killed.
KILLED_AT: Final = (
    ("os.rename .*/generations.json.new", 2),  # the pruning is not recorded yet
    ("os.[a-z]+ .*/gen-0001/?", 1),  # the pruning is recorded, and nothing is removed yet
    ("os.[a-z]+ .*/gen-0001/?", 5),
    ("os.remove .*/device_snapshots/part=", 1),
    ("os.remove .*/device_snapshots/part=", 3),
    ("os.rename .*/kept", 1),
    ("os.rename .*/messages/history/.before", 1),
    ("os.link .*/messages/_delta_log/", 1),
    ("os.remove .*/messages/_delta_log/.*tmp", 1),  # the commit is made, and compaction continues
    ("os.rename .*/messages/history/.versions", 2),
    ("os.remove .*/messages/part-", 1),
    ("os.remove .*/messages/part-", 20),
    ("os.remove .*/messages/_delta_log/[0-9]+.json", 20),
    ("os.remove .*/segments/", 1),
    ("os.remove .*/segments/", 3),
)
KILLED_AT_IN_DEFAULT: Final = (KILLED_AT[8], KILLED_AT[11])  # after a commit, and between removals
CHILD: Final = """
import os, re, signal, sys
from pathlib import Path
from batch.maintenance.maintain import maintain
from cli.commands.batch.maintain import _segments
from fleetpulse.io.home.home import Home
from tests.support.homes.maintained import KEEP_LITTLE, NOW_S
import duckdb
home, change, remaining = Home(Path(sys.argv[1])), re.compile(sys.argv[2]), int(sys.argv[3])
def hook(event, arguments):
    global remaining
    if event not in ("os.rename", "os.link", "os.remove", "os.rmdir"):
        return
    folder = arguments[-1] if event in ("os.remove", "os.rmdir") else -1  # rmtree passes names relative to an open folder
    parent = "" if folder == -1 else os.readlink(f"/proc/self/fd/{folder}")
    if change.match(f"{event} {Path(parent, os.fsdecode(arguments[0]))}"):
        remaining -= 1
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
list(maintain(home, KEEP_LITTLE, dry_run=False, now_s=NOW_S))
list(_segments(home, dry_run=False))
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Create four days of bronze, with old snapshots, an old generation, and landed segments."""
    made = four_days(tmp_path / "home")
    (checkpoint_of(made.lifecycle, 1) / "state" / "0").mkdir(parents=True)
    for name in range(3):
        (checkpoint_of(made.lifecycle, 1) / "state" / "0" / f"{name}.changelog").write_text("old")
    for _ in range(2):
        generation = begin_generation(made.lifecycle, made.generation(), key_groups=8, form=4, made_by="test", made_from={})
        judged_up_to(made, VERSIONS + 1, generation=checkpoint_of(made.lifecycle, generation.number).name)
        record = load_generations(made.lifecycle).switched(generation.number, {"retired_at_ms": START})
        save_generations(made.lifecycle, record)
    for number in range(1, 6):
        take_snapshot(made, number, bronze=VERSIONS)
    date(made.table(DEVICE_SNAPSHOTS.name), {version: START + version * 1000 for version in range(4)})
    made.segments_of(BRIDGE).mkdir(parents=True, exist_ok=True)
    for number in range(1, 8):
        (made.segments_of(BRIDGE) / f"{number:012d}.arrow").write_bytes(b"landed")
    for table in LANDED:
        tables.append(made, table, tables.to_table(table, []), f"rows:{BRIDGE}", 7 * MAX_SEGMENT_ROWS)
    return made


def _contents(home: Home) -> tuple[Counter[str], dict[int, str], dict[int, int], Read]:
    """Return the files by folder, status by generation, rows by snapshot, and rows of bronze."""
    folders = Counter(str(path.parent.relative_to(home.path)) for path in home.path.rglob("*") if path.is_file())
    statuses = {number: one.status for number, one in load_generations(home.lifecycle).known.items()}
    table = str(home.table(DEVICE_SNAPSHOTS.name))
    versions = {one.version or 0: DeltaTable(table, one.version).to_pyarrow_table().num_rows for one in snapshots(home)}
    return folders, statuses, versions, read_on(home, 1 + 2 * EACH)


def test_killed_and_repeated_maintenance_ends_as_an_undisturbed_run(home: Home, tmp_path: Path) -> None:
    undisturbed = Home(tmp_path / "undisturbed")
    shutil.copytree(home.path, undisturbed.path)
    expected = read_on(home, 1 + 2 * EACH)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for change, nth in KILLED_AT_IN_DEFAULT if IS_DEFAULT else KILLED_AT:
        command = [sys.executable, "-c", CHILD, str(home.path), change, str(nth)]
        process = subprocess.run(command, env=environment, cwd=ROOT, timeout=60, check=False)
        assert process.returncode == -signal.SIGKILL, f"no change matched {change}"
        assert read_on(home, 1 + 2 * EACH) == expected
    for one in (home, undisturbed):
        run_maintain(one, KEEP_LITTLE)
        list(landed_segments(one, dry_run=False))
        assert run_maintain(one, KEEP_LITTLE) == [] == list(landed_segments(one, dry_run=False))
    contents = _contents(home)
    assert contents == _contents(undisturbed)
    folders, statuses, versions, rows = contents
    assert statuses == {1: "pruned", 2: "retired", 3: "current"} and versions.keys() == {4, 5} and rows == expected
    assert folders["segments/bridge-1"] == 1 and not [name for name in folders if "gen-0001" in name]
    found = tables.query(home, "SELECT count(*) AS n, count(DISTINCT received_at) AS d FROM messages", tables=["messages"])
    assert found == [{"n": len(expected) + 2, "d": len(expected) + 2}]
    removed = DAYS * EACH * 3 + 1 - found[0]["n"]
    assert [removed_in(tables.newest(one, MESSAGES)) for one in (home, undisturbed)] == [removed, removed], (
        "removed rows are counted once"
    )
