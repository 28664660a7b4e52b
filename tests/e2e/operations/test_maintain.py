"""Maintenance beside a running fleet: no message is lost, and no verdict changes."""

from collections import Counter
from pathlib import Path

import pytest

from batch.maintenance.maintain import maintain
from batch.maintenance.plan import Keep
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.delta.log import holds_table
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.process import read_status
from fleetpulse.io.tables import tables
from tests.support.fleet_command import await_none_left, begin, fleet, rows_of
from tests.support.histories.definition import require_equal_to_definition
from tests.support.wait import PATIENCE_S, await_that

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800)]
STEPS = {("messages", "join"), ("messages", "checkpoint"), ("messages", "delete")}
KEEP = Keep(None, None, None, None, None, None, None, None, replaced_ms=30_000)  # longer than a batch


def test_maintenance_beside_a_running_fleet_stops_no_job_and_changes_no_verdict(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    running = begin("up", "--home", str(home.path), "--devices", "20", "--no-airflow", "--no-page", "--port", "0")
    pids: dict[str, set[int]] = {"landing": set(), "lifecycle": set()}
    done: Counter[tuple[str, str]] = Counter()

    def maintained() -> bool:
        """Run maintenance; return whether each kind of step has run, joins twice, and the job has judged."""
        for name, found in pids.items():
            found |= {pid for pid in [read_status(home.run(name)).get("pid")] if pid}
        if home.exists() and holds_table(home.table(MESSAGES.name)) and all(pids.values()):
            done.update((step.table, step.did) for step in maintain(home, KEEP, dry_run=False))
        return set(done) >= STEPS and done["messages", "join"] >= 2 and judged_up_to(home.checkpoint) is not None

    await_that(maintained, what="each kind of step", by=running, pause_s=2)
    running.terminate()
    output = running.communicate(timeout=PATIENCE_S)[0]
    assert running.returncode == 0, output
    await_none_left(home.path)
    assert {name: len(found) for name, found in pids.items()} == {"landing": 1, "lifecycle": 1}, "a job was restarted"
    require_equal_to_definition(home)
    segments = tables.query(home, "SELECT segment, max(line) AS line FROM messages GROUP BY 1 ORDER BY 1", tables=["messages"])
    lines = {one["segment"]: one["line"] for one in segments}
    ended = max(number for number, line in lines.items() if line is not None) + 1  # may hold no row but the end of the history
    assert {*range(min(lines), max(lines) + 1)} - {*lines} <= {ended}

    planned = rows_of("maintain", "--home", str(home.path), "--dry-run", "--json")
    assert rows_of("maintain", "--home", str(home.path), "--json") == [{**row, "dry_run": False} for row in planned]
    shown = fleet("maintain", "--home", str(home.path))
    assert shown.returncode == 0, shown.stderr
    assert "generation 1 needs version" in shown.stdout
    refused = fleet("maintain", "--home", str(tmp_path / "none"))
    assert refused.returncode == 1
    assert "there is no fleet" in refused.stderr
