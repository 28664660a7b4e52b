"""State changes of a running fleet in the browser: its verdicts are those of an undisturbed run."""

import json
import os
import re
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Page, sync_playwright

from fleetpulse.io.checkpoints.checkpoint import committed_batches
from fleetpulse.io.home.desired_state import RUNNING, get_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.system.process import read_status
from fleetpulse.io.tables.snapshots import snapshots
from fleetpulse.paths import ROOT
from tests.support.fleet_command import await_none_left, begin
from tests.support.form import IS_DEFAULT
from tests.support.histories.definition import require_equal_to_definition

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = os.environ.get("FLEET_PICTURES")  # folder for new pictures of the documentation
PICTURED = ("dags", "bootstrap-form", "migrate-approval", "refused", "supervise")
PATIENCE_S = 600  # a run of a DAG starts Spark several times
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(2400),  # each wait has its own, shorter limit
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: on Debian and Ubuntu, apt install chromium"),
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


@dataclass
class Browser:
    """A browser with a logged-in user."""

    page: Page
    url: str
    token: str

    def picture(self, name: str) -> None:
        """Take a picture, if new pictures of the documentation are requested."""
        if PICTURES and name in PICTURED:
            self.page.wait_for_timeout(1500)  # animations end
            self.page.screenshot(path=Path(PICTURES) / f"airflow-{name}.png")

    def ask(self, path: str) -> Any:
        """Return a response of the API."""
        request = urllib.request.Request(f"{self.url}/api/v2/{path}", headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def trigger(self, dag: str, **form: str) -> str:
        """Trigger a DAG by its form; return the run's id."""
        self.page.goto(f"{self.url}/dags/{dag}")
        self.page.get_by_role("button", name="Trigger").first.click()
        dialog = self.page.get_by_role("dialog")
        for name, value in form.items():
            dialog.locator(f"input[name=element_{name}]").fill(value)
        self.page.wait_for_timeout(500)  # the form accepts a value after the typing has ended
        self.picture(f"{dag.removeprefix('fleet_')}-form")
        dialog.get_by_role("button", name="Trigger", exact=True).click()
        self.page.wait_for_url(f"**/dags/{dag}/runs/**")
        return self.page.url.rpartition("/runs/")[2].partition("/")[0].partition("?")[0]

    def await_end(self, dag: str, run: str) -> str:
        """Wait for the end of a run; return its state."""
        self.page.goto("about:blank")  # the page of an active run uses a fifth of a core
        limit = time.monotonic() + PATIENCE_S
        while (state := self.ask(f"dags/{dag}/dagRuns/{run}")["state"]) not in ("success", "failed"):
            assert time.monotonic() < limit, f"{dag} is {state} after {PATIENCE_S} s: {self.tasks(dag, run)}"
            time.sleep(2)
        self.page.goto(f"{self.url}/dags/{dag}/runs/{run}")
        self.page.get_by_text("Success" if state == "success" else "Failed").first.wait_for()
        return state

    def tasks(self, dag: str, run: str) -> dict[str, str]:
        """Return the state of each task of a run."""
        found = self.ask(f"dags/{dag}/dagRuns/{run}/taskInstances")["task_instances"]
        return {one["task_id"]: one["state"] for one in found}

    def log_of(self, dag: str, run: str, task: str) -> str:
        """Return the log of the first try of a task."""
        content = self.ask(f"dags/{dag}/dagRuns/{run}/taskInstances/{task}/logs/1?full_content=true")["content"]
        return "\n".join(json.dumps(line) for line in content)


def _await(what: str, reached: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    limit = time.monotonic() + patience_s
    while not reached():
        assert time.monotonic() < limit, f"{what}: not within {patience_s} s"
        time.sleep(0.5)


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
        _await("airflow runs", lambda: running.poll() is not None or read_status(home.run("airflow")).get("state") == "running")
        assert running.poll() is None, running.communicate()[0]
        yield read_status(home.run("airflow"))["url"]
    finally:
        running.terminate()
        output = running.communicate(timeout=PATIENCE_S)[0]
    assert running.returncode == 0, output
    assert "shown only once" in output


@pytest.fixture
def browser(fleet_with_airflow: str, home: Home) -> Iterator[Browser]:
    """Return a browser with the administrator logged in."""
    password = json.loads((home.path / "airflow" / "passwords.json").read_text())["admin"]
    body = json.dumps({"username": "admin", "password": password}).encode()
    request = urllib.request.Request(f"{fleet_with_airflow}/auth/token", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        token = json.load(answer)["access_token"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # tests may run as root
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(120_000)
        page.goto(fleet_with_airflow)
        page.get_by_label("Username").fill("admin")
        page.get_by_label("Password").fill(password)
        page.get_by_role("button", name="Sign in").click()
        page.get_by_role("link", name="Dags").first.wait_for()
        yield Browser(page, fleet_with_airflow, token)
        chromium.close()


def test_state_changes_in_the_browser_keep_the_verdicts_correct(home: Home, browser: Browser) -> None:
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
    _answer(browser, "fleet_migrate", run, "Approve", "the next: 8 key groups, 2 partitions, stored form 4")
    assert browser.await_end("fleet_migrate", run) == "success", browser.tasks("fleet_migrate", run)
    assert (home.generation().number, home.generation().form) == (before + 1, 4)

    run = browser.trigger("fleet_repartition", partitions="3")
    _answer(browser, "fleet_repartition", run, "Reject", "partitions of the state: 2 before, 3 after")
    assert browser.await_end("fleet_repartition", run) == "success"
    assert browser.tasks("fleet_repartition", run)["stop"] == "skipped"
    assert (home.generation().number, get_desired(home).state) == (before + 1, RUNNING)

    (home.path.parent / "damage").touch()
    run = browser.trigger("fleet_migrate", form="5")
    _answer(browser, "fleet_migrate", run, "Approve")
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

    _await("the stream runs", lambda: read_status(home.run("lifecycle")).get("state") == "running")
    judged, victim = committed_batches(home.checkpoint)[-1], read_status(home.run("lifecycle"))["pid"]
    for process in [*psutil.Process(victim).children(recursive=True), psutil.Process(victim)]:
        with suppress(ProcessLookupError):  # a child may end with its parent
            os.kill(process.pid, signal.SIGKILL)
    expected = ("given up", "starting", "running")  # the supervisor may have restarted it already
    _await("the job is left to the supervisor", lambda: _state(home, old_pid=victim) in expected, 60)
    _await("the supervisor restarts the job", lambda: _state(home, old_pid=victim) == "running")
    assert "supervise" in get_desired(home).by
    _await("the job continues from its checkpoint", lambda: committed_batches(home.checkpoint)[-1] > judged)
    page.goto(f"{browser.url}/dags/fleet_supervise")
    browser.picture("supervise")


def _open_operations_page(browser: Browser) -> None:
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


def _answer(browser: Browser, dag: str, run: str, answer: str, plan: str = "the next:") -> None:
    """Wait until a run asks for approval, read its plan, and answer; answer again if Airflow has lost the answer."""
    limit = time.monotonic() + PATIENCE_S
    while (state := browser.tasks(dag, run)["approve"]) != "success":
        assert time.monotonic() < limit and state != "failed", f"approve is {state}"
        if state in ("deferred", "awaiting_input"):
            browser.page.goto(f"{browser.url}/dags/{dag}/runs/{run}/required_actions")
            browser.page.get_by_text(plan).first.wait_for()
            browser.picture(f"{dag.removeprefix('fleet_')}-approval")
            browser.page.get_by_role("button", name=answer).click()
            _await("the answer is taken", lambda: browser.tasks(dag, run)["approve"] not in ("deferred", "awaiting_input"), 60)
            browser.page.goto("about:blank")
        time.sleep(1)


@pytest.fixture(autouse=True)
def undisturbed(home: Home, request: pytest.FixtureRequest) -> Iterator[None]:
    """Check at the end: the verdicts equal the definition, and no process remains."""
    yield
    await_none_left(home.path)
    require_equal_to_definition(home)
