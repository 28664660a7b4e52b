"""Late delivery through the whole pipeline: a device is judged offline, amended and corrected."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.address import load_address
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.system.process import read_status
from fleetpulse.paths import ROOT
from fleetpulse.reports import judgements
from tests.support.wait import await_that

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800)]  # each wait has its own, shorter limit
SETTINGS = 'allowed_lateness = "2s"\ncanary_interval = "500ms"\n'
POLICY = '[rules]\ntimeout = "20s"\n'
DELAY_MS = 4_000  # more than the lateness


def fleet(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "cli", *arguments]


def call(home: Home, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = fleet(*arguments, "--home", str(home.path))
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120).stdout


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    at, environment = Home(tmp_path / "home"), {**os.environ, "PYTHONPATH": str(ROOT)}
    at.path.mkdir()
    (at.path / "settings.toml").write_text(SETTINGS)
    (tmp_path / "policy.toml").write_text(POLICY)
    with (tmp_path / "up.log").open("w") as log:
        command = fleet("up", "--home", str(at.path), "--no-sim", "--no-airflow", "--no-page", "--port", "0")
        running = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
        try:
            await_that(lambda: running.poll() is not None or read_status(at.run("bridge")).get("connected"), what="the bridge")
            assert running.poll() is None, (tmp_path / "up.log").read_text()
            call(at, "policy", "apply", str(tmp_path / "policy.toml"))
            yield at
        finally:
            running.terminate()
            running.wait(60)


def test_a_device_with_only_late_messages_is_amended_and_corrected(home: Home) -> None:
    def amended() -> bool:
        """Run amend; return whether it sends a correction."""
        done = [json.loads(line) for line in call(home, "amend", "--json").splitlines()]
        assert [one["device_id"] for one in done] == ["d"]
        return done[0]["corrected"]

    with Publisher(load_address(home.run("broker")), "late") as publisher:

        def publish_until(reached: Callable[[], Any], *, delay_ms: int = DELAY_MS) -> Any:
            def publish_and_check() -> Any:
                """Publish a heartbeat, and check the condition."""
                payload = json.dumps({"ts": time.time_ns() // 1_000_000 - delay_ms, "gateway": "g"}).encode()
                publisher.publish("fleet/site/d/heartbeat", payload)
                publisher.flush(30)
                return reached()

            return await_that(publish_and_check, pause_s=1)

        def judged() -> list[tuple[str, str]]:
            rows = judgements.transitions(home, "d", everything=True)
            return [(one["to_mode"], one["trigger"]) for one in rows if one["kind"] == "transition"]

        def corrected() -> bool:
            return ("online", "amended") in judged()

        publish_until(judged, delay_ms=0)
        time.sleep(DELAY_MS / 1000)  # an event from before the first one on time would add a transition
        publish_until(lambda: ("offline", "silence") in judged())
        publish_until(lambda: amended() or corrected())
        publish_until(corrected)

        def shown() -> list[tuple[str, str]]:
            amended()
            return [(one["to_mode"], one["trigger"]) for one in judgements.transitions(home, "d")]

        publish_until(lambda: shown() == [("online", "signal")])
    [status] = [json.loads(line) for line in call(home, "device", "d", "--json").splitlines()]
    retracted = status["retracted_offline"]
    assert retracted[0]["since"] < retracted[0]["until"]
    everything = [json.loads(line) for line in call(home, "transitions", "--all", "--json").splitlines()]
    assert {one["kind"] for one in everything} == {"transition", "retract"}
