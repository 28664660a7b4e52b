"""State changes of a running fleet in the browser: its verdicts are those of an undisturbed run."""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fleetpulse.io.checkpoints.checkpoint import committed_batches
from fleetpulse.io.home.desired_state import RUNNING, get_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.process import read_status
from fleetpulse.io.tables.snapshots import snapshots
from fleetpulse.paths import ROOT
from tests.support.airflow_browser import AirflowBrowser, airflow_browser
from tests.support.browser import NEEDS_CHROMIUM
from tests.support.fleet_command import await_none_left, begin
from tests.support.form import IS_DEFAULT
from tests.support.histories.definition import require_equal_to_definition
from tests.support.wait import PATIENCE_S, await_that

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(2400),  # each wait has its own, shorter limit
    NEEDS_CHROMIUM,
]
# Passes each call to the real command. While the file "damage" exists, it also damages the state of each new generation.
SABOTEUR = """#!{python} -IS
import json, pathlib, subprocess, sys
home, words = pathlib.Path({home!r}), sys.argv[1:]
done = subprocess.run([{fleet!r}, *words], stdout=subprocess.PIPE)
sys.stdout.buffer.write(done.stdout)
if "--hold" in words and done.returncode == 0 and (home.parent / "damage").exists():
    made = json.loads(done.stdout.splitlines()[-1])["generation"]
    for path in sorted((home / "checkpoints" / "lifecycle" / f"gen-{{made:04d}}" / "state").rglob("*")):
        if path.suffix in (".changelog", ".zip", ".sst") and path.stat().st_size > 200:
            content = bytearray(path.read_bytes())
            content[len(content) // 2 : len(content) // 2 + 16] = bytes(16)
            path.write_bytes(content)
            path.with_name(f".{{path.name}}.crc").unlink(missing_ok=True)
sys.exit(done.returncode)
"""


def _state(home: Home, old_pid: int) -> str | None:
    """Return the state of the lifecycle job; None if it still is the state of the process ``old_pid``.

    The state "given up" is always returned.
    """
    status = read_status(home.run("lifecycle"))
    return status.get("state") if status.get("state") == "given up" or status.get("pid") != old_pid else None


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a home whose run leaves a dead lifecycle job to the supervisor."""
    home = Home(tmp_path / "home")
    home.path.mkdir()
    (home.path / "settings.toml").write_text("restarts = 0\n")
    return home


@pytest.fixture
def fleet_with_airflow(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a fleet with Airflow; return the address of Airflow."""
    command = tmp_path / "fleet"
    command.write_text(SABOTEUR.format(python=sys.executable, fleet=str(ROOT / "fleet"), home=str(home.path)))
    command.chmod(0o755)
    monkeypatch.setenv("FLEET_COMMAND", str(command))
    running = begin("up", "--home", str(home.path), "--devices", "20", "--port", "0", "--airflow-port", "0", "--no-page")
    try:
        await_that(lambda: read_status(home.run("airflow")).get("state") == "running", what="Airflow", by=running, pause_s=0.5)
        yield read_status(home.run("airflow"))["url"]
    finally:
        running.terminate()
        output = running.communicate(timeout=PATIENCE_S)[0]
    assert running.returncode == 0, output
    assert "shown only once" in output


@pytest.fixture
def browser(fleet_with_airflow: str, home: Home) -> Iterator[AirflowBrowser]:
    """Return a browser with the administrator logged in."""
    with airflow_browser(home) as browser:
        assert browser.url == fleet_with_airflow
        yield browser


def test_state_changes_in_the_browser_keep_the_verdicts_correct(home: Home, browser: AirflowBrowser) -> None:
    page = browser.page
    page.goto(f"{browser.url}/dags")
    page.get_by_text("fleet_supervise").first.wait_for()
    browser.picture("dags")
    _open_operations_page(browser)

    assert browser.await_end("fleet_snapshot", browser.trigger("fleet_snapshot")) == "success"
    [taken, *_] = snapshots(home)
    if IS_DEFAULT:
        return  # one DAG in a real Airflow; each of the others starts Spark several times
    run = browser.trigger("fleet_bootstrap", version=str(taken.version))
    assert browser.await_end("fleet_bootstrap", run) == "success", browser.tasks("fleet_bootstrap", run)
    assert home.generation().made_by == "bootstrap" and home.generation().made_from["snapshot"] == taken.version
    assert home.generation().asked_by == f"admin, fleet_bootstrap {run}"

    run = browser.trigger("fleet_migrate", form="4")
    before = home.generation().number
    browser.answer("fleet_migrate", run, "Approve", "the next: 8 key groups, 2 partitions, stored form 4")
    assert browser.await_end("fleet_migrate", run) == "success", browser.tasks("fleet_migrate", run)
    assert (home.generation().number, home.generation().form) == (before + 1, 4)

    run = browser.trigger("fleet_repartition", partitions="3")
    browser.answer("fleet_repartition", run, "Reject", "partitions of the state: 2 before, 3 after")
    assert browser.await_end("fleet_repartition", run) == "success"
    assert browser.tasks("fleet_repartition", run)["stop"] == "skipped"
    assert (home.generation().number, get_desired(home).state) == (before + 1, RUNNING)

    (home.path.parent / "damage").touch()
    run = browser.trigger("fleet_migrate", form="5")
    browser.answer("fleet_migrate", run, "Approve", "the next:")
    assert browser.await_end("fleet_migrate", run) == "failed"
    states, log = browser.tasks("fleet_migrate", run), browser.log_of("fleet_migrate", run, "outcome")
    assert (states["act"], states["gate"], states["go_back"], states["outcome"]) == ("success", "failed", "success", "failed"), (
        log
    )
    assert states["switch"] in ("upstream_failed", None)
    assert re.search(r"gate: (generation \d+ cannot be read|suite)[^\n]*must not be used", log), log
    assert "discarded generation" in log
    browser.picture("refused")
    assert (home.generation().number, home.generation().form) == (before + 1, 4)
    assert get_desired(home).state == RUNNING
    (home.path.parent / "damage").unlink()

    await_that(lambda: read_status(home.run("lifecycle")).get("state") == "running", what="the stream runs", pause_s=0.5)
    judged, victim = committed_batches(home.checkpoint)[-1], read_status(home.run("lifecycle"))["pid"]
    for process in [*psutil.Process(victim).children(recursive=True), psutil.Process(victim)]:
        with suppress(ProcessLookupError):  # a child may end with its parent
            os.kill(process.pid, signal.SIGKILL)
    expected = ("given up", "starting", "running")  # the supervisor may have restarted it already
    await_that(
        lambda: _state(home, old_pid=victim) in expected, what="the job is left to the supervisor", limit_s=60, pause_s=0.5
    )
    await_that(lambda: _state(home, old_pid=victim) == "running", what="the supervisor restarts the job", pause_s=0.5)
    assert "supervise" in get_desired(home).by
    await_that(lambda: committed_batches(home.checkpoint)[-1] > judged, what="the job continues from its checkpoint", pause_s=0.5)
    page.goto(f"{browser.url}/dags/fleet_supervise")
    browser.picture("supervise")


def _open_operations_page(browser: AirflowBrowser) -> None:
    """Open the operations page from the navigation, and start a run by its button."""
    with browser.page.context.expect_page() as opened:
        browser.page.get_by_role("button", name="Plugins").click()
        browser.page.get_by_role("menuitem", name="Fleet", exact=True).click()
    page = opened.value
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.get_by_role("link", name="State", exact=True).click()
    page.get_by_role("heading", name="Generations").wait_for()
    page.get_by_role("button", name="Start fleet_report").click()
    run = page.get_by_role("link", name=re.compile("^manual__"))
    run.wait_for()
    assert (run.get_attribute("href") or "").startswith("/dags/fleet_report/runs/")
    runs = browser.ask("dags/fleet_report/dagRuns")["dag_runs"]
    assert [one["triggering_user_name"] for one in runs if one["dag_run_id"].startswith("manual__")] == ["admin"]
    assert not faults
    page.close()


@pytest.fixture(autouse=True)
def undisturbed(home: Home, request: pytest.FixtureRequest) -> Iterator[None]:
    """Check at the end: the verdicts equal the definition, and no process remains."""
    yield
    await_none_left(home.path)
    require_equal_to_definition(home)
