"""Commands of the README, the tutorials and the how-to guides, run in their order against a simulated fleet.

Every command must succeed, except those in `REFUSED`: a guide assumes a state of the fleet. `ELSEWHERE` names the tests that run
the commands that are skipped here.
"""

import json
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.address import load_address
from fleetpulse.io.system.process import read_status
from fleetpulse.paths import ROOT
from streaming.simulator.scenario import Scenario
from tests.support.documents import shell_lines
from tests.support.histories.histories import START
from tests.support.histories.recordings import record
from tests.support.processes import register_process
from tests.support.wait import await_that

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.timeout(3000),  # each command has its own, shorter limit
    pytest.mark.skipif(shutil.which("mosquitto_pub") is None, reason="needs mosquitto-clients"),
]
# The last command of the first fleet is "down", and the next page starts a fleet without simulated devices.
PAGES = [ROOT / "README.md", *(ROOT / "docs/tutorial" / f"{name}.md" for name in ("first-policy", "first-fleet", "own-device"))]
GUIDES = sorted((ROOT / "docs/how-to").glob("*.md"))
ELSEWHERE = {
    "./fleet test": "cli/dev/test_run.py",
    "./fleet lint": ".ci/run",
    "./fleet bench": "tests/spark/bench/lifecycle/test_compare.py",
    "./fleet chaos": "tests/e2e/pipeline/test_chaos.py",
    "./fleet drill": "tests/e2e/operations/test_drill.py",
    "./fleet fetch": "tests/e2e/deployment/test_image.py",
    "./fleet state bootstrap --damaged": "tests/spark/batch/state/test_recover.py",
    "./fleet quality": "tests/unit/batch/quality/test_run.py",
    "./fleet state": "tests/e2e/state/test_state.py",
    "./fleet stream": "tests/e2e/state/test_state.py",
    "./fleet service": "tests/e2e/deployment/test_services.py",
    "./fleet map test mapping.toml --messages": "tests/unit/cli/commands/fleet/test_mapping.py",
    "mosquitto_sub -t '#'": "tests/unit/cli/commands/fleet/test_mapping.py",
    "mosquitto_sub -h broker.example": "tests/e2e/ingest/test_verdicts.py",
    "mosquitto_pub -h broker.example": "tests/e2e/ingest/test_certificates.py",
    "openssl": "tests/e2e/ingest/test_certificates.py",
    "mkdir": "tests/e2e/ingest/test_clients.py",
    "AIRFLOW_HOME=": "tests/dags/test_db_cleanup.py",
}
DEPLOYED = {  # pages whose commands need root, Docker, other hosts or a server that runs on, and their tests
    "deploy.md": "tests/unit/repository/test_deployment.py",
    "airflow-users.md": "tests/unit/repository/test_deployment.py",
    "spark-cluster.md": "tests/e2e/cluster/test_standalone.py",
    "kubernetes.md": "tests/unit/repository/test_kubernetes.py",
    "page.md": "tests/unit/web/test_server.py",
}
# Commands of a guide that the state of this fleet does not allow: its pump-1 is registered later, and was not judged by then.
REFUSED = frozenset(
    {
        "./fleet rewind --to 2026-01-31T12:00:00Z --device pump-1",
        "./fleet device correct pump-1 --from 2026-01-31T12:00:00Z --class compressor",
    }
)
LIMIT_S = 600
FOLLOWS = ("--follow", "./fleet listen", "./fleet map watch", "mosquitto_sub")


class Reader:
    """A user who runs the commands of pages in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Home(folder / ".fleet")
        self.up: subprocess.Popen[str] | None = None
        self.password, self.faults, self.ran = "", list[str](), 0

    def start(self, line: str) -> None:
        """Start a fleet, unless it runs with the same --no-sim, and wait until devices can connect."""
        if self.up is not None and self.up.poll() is None:
            if ("--no-sim" in line) == ("--no-sim" in self.up.args):  # pyright: ignore[reportOperatorIssue]
                return
            self.stop()
        words = ["--no-airflow", "--no-page", "--port", "0", *(["--no-sim"] if "--no-sim" in line else ["--devices", "12"])]
        log = (self.folder / "up.log").open("w")
        command = [str(ROOT / "fleet"), "up", *words]
        self.up = register_process(subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, text=True))
        await_that(lambda: read_status(self.home.run("bridge")).get("connected"), what="the bridge", by=self.up)

    def stop(self) -> None:
        if self.up is not None and self.up.poll() is None:
            self.up.terminate()
            assert self.up.wait(120) == 0

    def newest_transition(self) -> str | None:
        command = [str(ROOT / "fleet"), "transitions", "--json"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout.splitlines()[-1])["event_time"] if done.stdout else None

    def filled_in(self, line: str) -> str:
        """Return a command with the values that a reader would fill in."""
        later = (datetime.now(UTC) + timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
        line = re.sub(r"(--until )\S+", rf"\g<1>{later}", line)
        line = re.sub(r"--day \S+", f"--day {datetime.now(UTC):%Y-%m-%d}", line)
        if "--until" not in line and re.search(r"TIME\b|\b20\d\d-\d\d-\d\dT", line):
            newest = await_that(self.newest_transition, limit_s=LIMIT_S, what="a transition", pause_s=2)
            assert newest is not None
            instant = f"{datetime.fromisoformat(newest):%Y-%m-%dT%H:%M:%SZ}"
            line = re.sub(r"TIME\b|\b20\d\d-\d\d-\d\dT[\d:]+Z", instant, line)
        line = line.replace("PASSWORD", self.password)
        return line.replace("-p 1883", f"-p {load_address(self.home.run('broker')).port}") if "1883" in line else line

    def run(self, page: Path, line: str) -> None:
        """Run a line; note it if it fails."""
        self.ran += 1
        words = shlex.split(self.filled_in(line))
        words[0] = str(ROOT / "fleet") if words[0] == "./fleet" else words[0]
        if any(one in line for one in FOLLOWS):
            running = register_process(
                subprocess.Popen(words, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
            time.sleep(3)  # as long as a reader watches
            running.terminate()
            _, errors = running.communicate(timeout=60)
            code = 0 if running.returncode == -signal.SIGTERM else running.returncode
        else:
            done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            code, errors = done.returncode, done.stderr
            if line.startswith("./fleet access grant") and done.stdout:
                self.password = done.stdout.split()[-1]
        if code != int(line in REFUSED) or "Traceback" in errors:
            self.faults.append(f"{page.name}: {line}: {code}: {errors}")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    (tmp_path / "policy.toml").write_text('[rules]\ntimeout = "60m"\n\n[classes.camera]\ntimeout = "10m"\n')
    (tmp_path / "devices.csv").write_text("device_id,site,class\npump-7,oslo,pump\n")
    (tmp_path / "mapping.toml").write_text('[[mapping]]\ntopic = "zigbee/{device}/state"\nsite = "home"\nkind = "telemetry"\n')
    record(tmp_path / "fleet.ndjson.gz", Scenario(3, 4, START, 600_000))
    yield made
    made.stop()


def skipped(page: Path, line: str) -> bool:
    return page.name in DEPLOYED or any(line.startswith(prefix) for prefix in ELSEWHERE)


def test_the_commands_of_readme_tutorials_and_guides_run(reader: Reader) -> None:
    reader.start("./fleet up")
    for page in [*PAGES, *GUIDES]:
        if page == GUIDES[0]:
            reader.start("./fleet up")  # the tutorial before it needs no simulated devices
        for line in shell_lines(page):
            if skipped(page, line):
                continue
            if line.startswith("./fleet up"):
                if "--broker" not in line:
                    reader.start("./fleet up" if page in GUIDES else line)  # guides need simulated devices
                continue
            if line.startswith("./fleet down"):
                reader.run(page, line)
                assert reader.up is not None and reader.up.wait(120) == 0
                continue
            reader.run(page, line)
    assert reader.faults == []
    assert reader.ran >= 50


def test_the_tests_that_run_the_other_commands_exist() -> None:
    assert [name for name in (*ELSEWHERE.values(), *DEPLOYED.values()) if not (ROOT / name).exists()] == []
