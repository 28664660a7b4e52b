"""Clients from outside, as people have them: they come in, speak, and are judged by the whole pipeline."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.replay import replay
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.acl import Role, grant
from fleetpulse.io.mqtt.address import BrokerAddress, load_address
from fleetpulse.io.mqtt.broker import renew_access
from fleetpulse.io.mqtt.subscriber import Receiver
from fleetpulse.io.system.process import read_status
from fleetpulse.paths import ROOT
from fleetpulse.reports import judgements
from fleetpulse.reports import messages as bronze
from tests.support import wait

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(900)]  # each wait has its own, shorter limit
CLIENTS = Path(__file__).parents[1] / "clients"
SETTINGS = 'allowed_lateness = "2s"\ncanary_interval = "500ms"\nsparkplug_host = "fleetpulse"\n'
POLICY = '[rules]\ntimeout = "10m"\ndeath_grace = "2s"\n'
await_that = partial(wait.await_that, limit_s=300)  # where the machine is busy, a batch takes long
needs_npm = pytest.mark.skipif(not (shutil.which("npm") and shutil.which("node")), reason="Node and npm are not here")
needs_mosquitto = pytest.mark.skipif(not shutil.which("mosquitto_pub"), reason="mosquitto_pub is not here (mosquitto-clients)")


def fleet(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "cli", *words]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A fleet without a simulator that takes Sparkplug, and whose grace after a death is short."""
    folder = tmp_path_factory.mktemp("clients")
    at, environment = Home(folder / "home"), {**os.environ, "PYTHONPATH": str(ROOT)}
    at.path.mkdir()
    (at.path / "settings.toml").write_text(SETTINGS)
    (folder / "policy.toml").write_text(POLICY)
    with (folder / "up.log").open("w") as log:
        command = fleet("up", "--home", str(at.path), "--no-sim", "--no-airflow", "--port", "0")
        running = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
        try:
            await_that(lambda: running.poll() is not None or read_status(at.run("bridge")).get("connected"))
            assert running.poll() is None, (folder / "up.log").read_text()
            applied = fleet("policy", "apply", str(folder / "policy.toml"), "--home", str(at.path))
            subprocess.run(applied, check=True, capture_output=True, env=environment, cwd=ROOT, timeout=60)
            yield at
        finally:
            running.terminate()
            running.wait(60)


@pytest.fixture(scope="module")
def modules() -> Path:
    """The clients' packages, installed once for each lock."""
    lock = (CLIENTS / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("FLEET_CACHE") or ROOT / ".cache")
    folder = cache / f"clients-{blake2b(lock, digest_size=6).hexdigest()}"
    if not (folder / "installed").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copyfile(CLIENTS / name, folder / name)
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        (folder / "installed").touch()
    return folder / "node_modules"


def let_in(home: Home, name: str, nodes: tuple[str, ...] = ()) -> dict[str, str]:
    """Return what a client must know to come in."""
    password, address = grant(home.broker, name, Role.DEVICE, (), nodes), load_address(home.run("broker"))
    assert renew_access(home.broker)
    return {"SERVER": f"mqtt://{address.host}:{address.port}", "NAME": name, "PASSWORD": password}


def node(modules: Path, script: str, known: Mapping[str, str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "NODE_PATH": str(modules), **known}
    return subprocess.Popen(
        ["node", str(CLIENTS / script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def due(home: Home, device_id: str) -> list[tuple[str, str]]:
    """Return what becomes of a device by what has landed: modes, each with what moved it there."""
    judged = (one for one in replay(bronze.rows(home), home.deployment()) if one.kind == "transition")
    its = sorted((one for one in judged if one.device_id == device_id), key=lambda one: one.transition_no or 0)
    return [(str(one.to_mode), str(one.trigger)) for one in its]


def became(home: Home, device_id: str) -> list[tuple[str, str]]:
    """Return what the job has judged of a device so far, likewise."""
    return [(one["to_mode"], one["trigger"]) for one in judgements.transitions(home, device_id)]


def messages(home: Home, device_id: str) -> list[Any]:
    its = (one for one in bronze.rows(home, [device_id]) if one.device_id == device_id)
    return sorted(its, key=lambda one: one.received_at_ms)


@needs_npm
def test_an_edge_node_that_is_killed_takes_its_devices_with_it_and_they_return_together(home: Home, modules: Path) -> None:
    where = {"GROUP": "plant", "NODE": "line.1", "DEVICE": "pump"}
    known = let_in(home, "edge", ("plant/line.1",)) | where
    ids = ("plant:line.1", "plant:line.1:pump")
    for life in range(2):
        up = 2 * life + 1
        client = node(modules, "sparkplug.js", known)
        try:
            await_that(lambda up=up, client=client: client.poll() or all(len(due(home, one)) == up for one in ids))
        finally:
            client.kill()
            said, _ = client.communicate()
        assert said == "born\n"
        await_that(lambda up=up: all(len(due(home, one)) == up + 1 for one in ids))
    both = [("online", "signal"), ("offline", "death")] * 2
    await_that(lambda: all(len(became(home, one)) == 4 for one in ids))
    assert became(home, ids[0]) == both
    behind = became(home, ids[1])
    assert [mode for mode, _ in behind] == ["online", "unreachable"] * 2
    assert [why for _, why in behind[1::2]] == ["gateway_death"] * 2
    assert behind[0][1] == "signal" and behind[2][1] in ("signal", "gateway_return"), "whichever is earlier"
    rows = messages(home, ids[1])
    assert rows[0].kind == "birth" and {one.kind for one in rows[1:]} == {"telemetry", "birth"}
    assert json.loads(rows[0].metrics) == {"temperature": 21.5, "steps": -7}
    births = [one for one in messages(home, ids[0]) if one.kind in ("birth", "death")]
    assert [one.kind for one in births] == ["birth", "death"] * 2
    assert all(one.session is not None for one in births)
    assert judgements.quarantine(home) == []


@needs_npm
def test_a_device_of_a_general_client_is_heard_and_acknowledged(home: Home, modules: Path) -> None:
    client = node(modules, "heartbeats.js", let_in(home, "npm-1") | {"COUNT": "20"})
    said, _ = client.communicate(timeout=60)
    assert (client.returncode, said) == (0, "acknowledged\n")
    await_that(lambda: became(home, "npm-1") == [("online", "signal")])
    assert [one.seq for one in messages(home, "npm-1")] == list(range(20))


@needs_mosquitto
def test_a_device_that_is_mosquitto_pub_is_heard(home: Home) -> None:
    known, address = let_in(home, "pump-1"), load_address(home.run("broker"))
    command = ["mosquitto_pub", "-h", address.host, "-p", str(address.port), "-u", "pump-1", "-P", known["PASSWORD"], "-q", "1"]
    command += ["-t", "fleet/site/pump-1/heartbeat", "-m", json.dumps({"ts": time.time_ns() // 1_000_000})]
    subprocess.run(command, check=True, timeout=30)
    await_that(lambda: became(home, "pump-1") == [("online", "signal")])


def state(address: BrokerAddress, host: str) -> dict[str, Any]:
    """Return the retained state of a host application."""
    receiver, found = Receiver(address, "asks", [f"spBv1.0/STATE/{host}"], persistent=False), list[bytes]()
    try:
        await_that(lambda: found.extend(one.payload for one in receiver.poll(0.1)) or found, limit_s=10)
    finally:
        receiver.close()
    return json.loads(found[-1])


def test_nodes_are_told_that_their_host_is_here(home: Home) -> None:
    told = state(load_address(home.run("broker")), "fleetpulse")
    assert told["online"] is True
    assert abs(time.time() * 1000 - told["timestamp"]) < 600_000
