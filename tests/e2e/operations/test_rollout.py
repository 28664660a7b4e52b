"""Firmware rollouts through the whole pipeline: a good version reaches every device, a bad one stops in its first cohort.

Rule: one fleet with Airflow runs for all tests of this file. Each test begins with devices that are all present, and rolls
out versions of its own.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.lifecycle import PRESENT
from fleetpulse.core.rollouts.cohorts import cohort_of
from fleetpulse.io.home.command_spool import spool
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.address import load_address
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.system.process import read_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.paths import ROOT
from fleetpulse.reports.frontiers import judged_frontier_ms
from fleetpulse.reports.operations.audit import audited_actions
from fleetpulse.reports.present.devices import devices
from streaming.simulator.devices import BAD
from streaming.simulator.scenario import Scenario, Sent, command_topics
from streaming.simulator.simulator import CommandAnswers
from tests.support.airflow_browser import airflow_browser
from tests.support.browser import NEEDS_CHROMIUM
from tests.support.wait import await_that

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(3600)]  # each wait has its own, shorter limit
DAG = "fleet_rollout"
SETTINGS = 'allowed_lateness = "2s"\ncanary_interval = "500ms"\nstreams = ["commands"]\nstreams_every = "4s"\n'
POLICY = '[rules]\ntimeout = "15s"\n'
SCENARIO = Scenario(seed=1, devices=50, start_ms=0)
COHORTS = (20, 60, 100)


class Field(threading.Thread):
    """Devices that beat each second, and take firmware as those of the simulator do.

    Args:
        home: home of the broker.
    """

    def __init__(self, home: Home) -> None:
        super().__init__(daemon=True)
        self._home, self._ended = home, threading.Event()
        self.names = [topic.rpartition("/")[0] for topic in sorted(command_topics(SCENARIO))]
        self._taken: dict[str, Any] = {}

    def firmware(self) -> dict[str, str | None]:
        """Return the version of each device that has taken a command."""
        return {device: taken["firmware"] for device, taken in self._taken.items()}

    @property
    def ids(self) -> set[str]:
        """Ids of all devices."""
        return {name.rpartition("/")[2] for name in self.names}

    def run(self) -> None:
        """Send and answer until `end`."""
        address = load_address(self._home.run("broker"))
        with Publisher(address, "field") as publisher:
            answers = CommandAnswers(self._home, SCENARIO, address, publisher)
            beat_at_ms = 0
            while not self._ended.is_set():
                answers.step(0.1)
                self._taken = answers.devices.to_plain()
                if (now_ms := wall_clock_ms()) >= beat_at_ms:
                    beat_at_ms = now_ms + 1_000
                    for name in self.names:
                        payload = json.dumps({"ts": now_ms}).encode()
                        if (sent := answers.devices.adapted(Sent(now_ms, f"{name}/heartbeat", payload))) is not None:
                            publisher.publish(sent.topic, sent.payload)
                    publisher.pump()
            answers.close()

    def end(self) -> None:
        """Stop the devices."""
        self._ended.set()
        self.join(60)


def call(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "cli", *arguments, "--home", str(home.path)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Start the pipeline and Airflow without simulated devices; users of Airflow cannot approve their own runs."""
    tmp_path = tmp_path_factory.mktemp("rollout")
    at, environment = Home(tmp_path / "home"), {**os.environ, "PYTHONPATH": str(ROOT), "FLEET_SELF_APPROVAL": "no"}
    at.path.mkdir()
    (at.path / "settings.toml").write_text(SETTINGS)
    (tmp_path / "policy.toml").write_text(POLICY)
    with (tmp_path / "up.log").open("w") as log:
        command = [sys.executable, "-P", "-m", "cli", "up", "--home", str(at.path)]
        options = ["--no-sim", "--airflow-port", "0", "--no-page", "--port", "0", "--policy", str(tmp_path / "policy.toml")]
        running = subprocess.Popen([*command, *options], stdout=log, stderr=log, env=environment, cwd=ROOT)
        try:
            await_that(lambda: running.poll() is not None or read_status(at.run("bridge")).get("connected"), what="the bridge")
            assert running.poll() is None, (tmp_path / "up.log").read_text()
            yield at
        finally:
            running.terminate()
            running.wait(120)


@pytest.fixture(scope="module")
def field(home: Home) -> Iterator[Field]:
    """Start the devices, and wait until all of them are online."""
    found = Field(home)
    found.start()
    try:
        await_that(lambda: _online(home) == found.ids, what="50 devices online", pause_s=2)
        yield found
    finally:
        found.end()


@pytest.fixture(autouse=True)
def recovered(home: Home, field: Field) -> None:
    """Give good firmware to the devices that have bad firmware of the test before, and wait until they are present."""
    bad = {device for device, version in field.firmware().items() if version is not None and BAD in version}
    content = {"op": "command", "id": "recovery", "name": "firmware", "payload": {"version": "recovered"}}
    if bad:
        spool(home, [(f"{name}/control", content) for name in field.names if name.rpartition("/")[2] in bad])
    await_that(lambda: not any(BAD in str(version) for version in field.firmware().values()), what="good firmware", pause_s=1)
    await_that(lambda: _present(home) == field.ids, what="all devices present", pause_s=2)


def _online(home: Home) -> set[str]:
    return {one["device_id"] for one in devices(home, judged_frontier_ms(home), mode="online")}


def _present(home: Home) -> set[str]:
    return {one["device_id"] for mode in PRESENT for one in devices(home, judged_frontier_ms(home), mode=mode)}


def plan(name: str, version: str) -> str:
    """Return a plan for all devices."""
    content = {"name": name, "version": version, "scope": "TRUE", "soak": "20s", "flash": "5s"}
    lines = [f"{key} = {json.dumps(value)}" for key, value in content.items()]
    return "\n".join([*lines, f"cohorts = {list(COHORTS)}", "least_devices = 5", ""])


def plan_file(tmp_path: Path, name: str, version: str) -> str:
    """Write a plan for all devices; return its path."""
    path = tmp_path / f"{name}.toml"
    path.write_text(plan(name, version))
    return str(path)


def cohorts(field: Field, name: str, through: int) -> set[str]:
    """Return the devices of the cohorts up to a number."""
    return {device for device in field.ids if cohort_of(name, device, COHORTS) <= through}


def test_a_good_version_reaches_every_device_and_a_bad_one_stops_in_its_first_cohort(
    home: Home, field: Field, tmp_path: Path
) -> None:
    def passed(name: str) -> bool:
        done = call(home, "rollout", "check", name)
        assert done.returncode == 0, done.stderr
        return done.stdout.startswith("passed")

    for number in (1, 2, 3):
        step = ["start", plan_file(tmp_path, "good", "2.0")] if number == 1 else ["advance", "good"]
        done = call(home, "rollout", *step)
        assert done.returncode == 0, done.stderr
        reached = cohorts(field, "good", number)
        await_that(lambda: passed("good"), what=f"cohort {number}", pause_s=5)
        assert field.firmware() == dict.fromkeys(reached, "2.0")
    [found] = [json.loads(line) for line in call(home, "rollout", "status", "good", "--json").stdout.splitlines()]
    assert (found["status"], found["cohort"]) == ("completed", 3)
    assert found["observed"]["answers"]["acknowledged"] == len(field.ids - cohorts(field, "good", 2))
    assert _online(home) == field.ids, "the announced update hides the restart, and no device is left in it"

    assert call(home, "rollout", "start", plan_file(tmp_path, "worse", "2.1-bad")).returncode == 0

    def stopped() -> str:
        done = call(home, "rollout", "check", "worse")
        return done.stderr if done.returncode else ""

    reason = await_that(stopped, what="the stop", pause_s=5)
    assert 'the rollout "worse" is stopped' in reason and "of the rest 0 of " in reason
    refused = call(home, "rollout", "advance", "worse")
    assert refused.returncode == 1 and "continues no more" in refused.stderr
    first = cohorts(field, "worse", 1)
    assert field.firmware() == {device: "2.1-bad" if device in first else "2.0" for device in field.ids}


@NEEDS_CHROMIUM
def test_a_person_approves_each_cohort_in_the_browser_and_a_bad_version_stops_by_itself(home: Home, field: Field) -> None:
    await_that(lambda: read_status(home.run("airflow")).get("state") == "running", what="Airflow", pause_s=1)
    before = field.firmware()
    with airflow_browser(home, "operator") as browser:
        run = browser.post(DAG, plan=plan("asked", "3.0"))
        for number in (1, 2, 3):
            shown = 'rollout "asked" (plan '
            browser.answer(DAG, run, "Approve", shown, task=f"approve_{number}")
            reached = cohorts(field, "asked", number)
            awaited = {**before, **dict.fromkeys(reached, "3.0")}
            await_that(lambda awaited=awaited: field.firmware() == awaited, what=f"cohort {number} has the firmware", pause_s=1)
        assert browser.await_end(DAG, run) == "success", browser.tasks(DAG, run)
        asked = [one for one in audited_actions(home) if one["action"].startswith("rollout ") and run in (one["asked_by"] or "")]
        assert {one["asked_by"].partition(",")[0] for one in asked} == {"admin"}

        run = browser.post(DAG, plan=plan("asked-worse", "3.1-bad"))
        browser.answer(DAG, run, "Approve", 'rollout "asked-worse"', task="approve_1")
        assert browser.await_end(DAG, run) == "failed"
        states, log = browser.tasks(DAG, run), browser.log_of(DAG, run, "outcome")
    assert (states["check_1"], states["start_2"], states["stop"]) == ("failed", "upstream_failed", "success")
    assert 'check_1: the rollout \\"asked-worse\\" is stopped' in log, log
    first = cohorts(field, "asked-worse", 1)
    assert field.firmware() == {device: "3.1-bad" if device in first else "3.0" for device in field.ids}
