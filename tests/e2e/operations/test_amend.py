"""A device whose gateway hands in its messages late, through the whole pipeline: judged offline, amended, corrected."""

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

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(900)]  # each wait has its own, shorter limit
SETTINGS = 'allowed_lateness = "2s"\ncanary_interval = "500ms"\n'
POLICY = '[rules]\ntimeout = "20s"\n'
DELAY_MS = 4_000  # more than the lateness


def fleet(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "cli", *words]


def call(home: Home, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = fleet(*words, "--home", str(home.path))
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120).stdout


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    at, environment = Home(tmp_path / "home"), {**os.environ, "PYTHONPATH": str(ROOT)}
    at.path.mkdir()
    (at.path / "settings.toml").write_text(SETTINGS)
    (tmp_path / "policy.toml").write_text(POLICY)
    with (tmp_path / "up.log").open("w") as log:
        command = fleet("up", "--home", str(at.path), "--no-sim", "--no-airflow", "--port", "0")
        running = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
        try:
            await_that(lambda: running.poll() is not None or read_status(at.run("bridge")).get("connected"), what="the bridge")
            assert running.poll() is None, (tmp_path / "up.log").read_text()
            call(at, "policy", "apply", str(tmp_path / "policy.toml"))
            yield at
        finally:
            running.terminate()
            running.wait(60)


def test_a_device_that_is_heard_late_alone_is_taken_back_and_corrected(home: Home) -> None:
    def amended() -> bool:
        """Amend; return whether what corrects the device is on its way."""
        done = [json.loads(line) for line in call(home, "amend", "--json").splitlines()]
        assert [one["device_id"] for one in done] == ["d"]
        return done[0]["corrected"]

    with Publisher(load_address(home.run("broker")), "late") as publisher:

        def speak_until(reached: Callable[[], Any], *, delay_ms: int = DELAY_MS) -> Any:
            def spoken() -> Any:
                """Speak, and look."""
                payload = json.dumps({"ts": time.time_ns() // 1_000_000 - delay_ms, "gateway": "g"}).encode()
                publisher.publish("fleet/site/d/heartbeat", payload)
                publisher.flush(30)
                return reached()

            return await_that(spoken, pause_s=1)

        def judged() -> list[tuple[str, str]]:
            rows = judgements.transitions(home, "d", everything=True)
            return [(one["to_mode"], one["trigger"]) for one in rows if one["kind"] == "transition"]

        def corrected() -> bool:
            return ("online", "amended") in judged()

        speak_until(judged, delay_ms=0)
        speak_until(lambda: ("offline", "silence") in judged())
        speak_until(lambda: amended() or corrected())
        speak_until(corrected)

        def shown() -> list[tuple[str, str]]:
            amended()
            return [(one["to_mode"], one["trigger"]) for one in judgements.transitions(home, "d")]

        speak_until(lambda: shown() == [("online", "signal")])
    [standing] = [json.loads(line) for line in call(home, "device", "d", "--json").splitlines()]
    away = standing["retracted_offline"]
    assert away[0]["since"] < away[0]["until"]
    everything = [json.loads(line) for line in call(home, "transitions", "--all", "--json").splitlines()]
    assert {one["kind"] for one in everything} == {"transition", "retract"}
