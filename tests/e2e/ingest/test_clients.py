"""External clients through the whole pipeline: Sparkplug, MQTT.js and mosquitto_pub."""

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
from fleetpulse.io.mqtt.embedded.broker import renew_access
from fleetpulse.io.mqtt.subscriber import Receiver
from fleetpulse.io.system.process import read_status
from fleetpulse.paths import ROOT
from fleetpulse.reports import judgements
from fleetpulse.reports import messages as bronze
from tests.support import wait

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800)]  # each wait has its own, shorter limit
CLIENTS = Path(__file__).parents[1] / "clients"
SETTINGS = 'allowed_lateness = "2s"\ncanary_interval = "500ms"\nsparkplug_host = "fleetpulse"\n'
POLICY = '[rules]\ntimeout = "10m"\ndeath_grace = "2s"\n'
await_that = partial(wait.await_that, limit_s=600)  # on a busy machine, a batch takes long
needs_npm = pytest.mark.skipif(not (shutil.which("npm") and shutil.which("node")), reason="Node.js or npm is not installed")
needs_mosquitto = pytest.mark.skipif(
    not shutil.which("mosquitto_pub"), reason="mosquitto_pub is not installed (package mosquitto-clients)"
)


def fleet(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "cli", *arguments]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Run a fleet without a simulator, with Sparkplug and a short grace period after a death."""
    folder = tmp_path_factory.mktemp("clients")
    at, environment = Home(folder / "home"), {**os.environ, "PYTHONPATH": str(ROOT)}
    at.path.mkdir()
    (at.path / "settings.toml").write_text(SETTINGS)
    (folder / "policy.toml").write_text(POLICY)
    with (folder / "up.log").open("w") as log:
        command = fleet("up", "--home", str(at.path), "--no-sim", "--no-airflow", "--no-page", "--port", "0")
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
    """Install the packages of the clients, once for each lock file; return their folder."""
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


def admit(home: Home, name: str, nodes: tuple[str, ...] = ()) -> dict[str, str]:
    """Grant access to a client; return its credentials."""
    password, address = grant(home.broker, name, Role.DEVICE, (), nodes), load_address(home.run("broker"))
    assert renew_access(home.broker)
    return {"SERVER": f"mqtt://{address.host}:{address.port}", "NAME": name, "PASSWORD": password}


def node(modules: Path, script: str, credentials: Mapping[str, str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "NODE_PATH": str(modules), **credentials}
    return subprocess.Popen(
        ["node", str(CLIENTS / script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def expected(home: Home, device_id: str) -> list[tuple[str, str]]:
    """Return the modes and triggers that the definition gives a device for the landed messages."""
    judged = (one for one in replay(bronze.rows(home), home.deployment()) if one.kind == "transition")
    selected = sorted((one for one in judged if one.device_id == device_id), key=lambda one: one.transition_no or 0)
    return [(str(one.to_mode), str(one.trigger)) for one in selected]


def emitted(home: Home, device_id: str) -> list[tuple[str, str]]:
    """Return the modes and triggers that the job has emitted for a device so far."""
    return [(one["to_mode"], one["trigger"]) for one in judgements.transitions(home, device_id)]


def messages(home: Home, device_id: str) -> list[Any]:
    selected = (one for one in bronze.rows(home, [device_id]) if one.device_id == device_id)
    return sorted(selected, key=lambda one: one.received_at_ms)


@needs_npm
def test_a_killed_edge_node_makes_its_devices_unreachable_until_both_return(home: Home, modules: Path) -> None:
    names = {"GROUP": "plant", "NODE": "line.1", "DEVICE": "pump"}
    credentials = admit(home, "edge", ("plant/line.1",)) | names
    ids = ("plant:line.1", "plant:line.1:pump")
    for life in range(2):
        count = 2 * life + 1
        client = node(modules, "sparkplug.js", credentials)
        try:
            await_that(lambda count=count, client=client: client.poll() or all(len(expected(home, one)) == count for one in ids))
        finally:
            client.kill()
            output, _ = client.communicate()
        assert output == "born\n"
        await_that(lambda count=count: all(len(expected(home, one)) == count + 1 for one in ids))
    both = [("online", "signal"), ("offline", "death")] * 2
    await_that(lambda: all(len(emitted(home, one)) == 4 for one in ids))
    assert emitted(home, ids[0]) == both
    behind = emitted(home, ids[1])
    assert [mode for mode, _ in behind] == ["online", "unreachable"] * 2
    assert [why for _, why in behind[1::2]] == ["gateway_death"] * 2
    assert behind[0][1] == "signal" and behind[2][1] in ("signal", "gateway_return"), "the earlier of the two"
    rows = messages(home, ids[1])
    assert rows[0].kind == "birth" and {one.kind for one in rows[1:]} == {"telemetry", "birth"}
    assert json.loads(rows[0].metrics) == {"temperature": 21.5, "steps": -7}
    births = [one for one in messages(home, ids[0]) if one.kind in ("birth", "death")]
    assert [one.kind for one in births] == ["birth", "death"] * 2
    assert all(one.session is not None for one in births)
    assert judgements.quarantine(home) == []


@needs_npm
def test_messages_of_a_general_mqtt_client_are_acknowledged_and_judged(home: Home, modules: Path) -> None:
    client = node(modules, "heartbeats.js", admit(home, "npm-1") | {"COUNT": "20"})
    output, _ = client.communicate(timeout=60)
    assert (client.returncode, output) == (0, "acknowledged\n")
    await_that(lambda: emitted(home, "npm-1") == [("online", "signal")])
    assert [one.seq for one in messages(home, "npm-1")] == list(range(20))


@needs_mosquitto
def test_a_message_of_mosquitto_pub_is_judged(home: Home) -> None:
    credentials, address = admit(home, "pump-1"), load_address(home.run("broker"))
    command = ["mosquitto_pub", "-h", address.host, "-p", str(address.port), "-u", "pump-1"]
    command += ["-P", credentials["PASSWORD"], "-q", "1"]
    command += ["-t", "fleet/site/pump-1/heartbeat", "-m", json.dumps({"ts": time.time_ns() // 1_000_000})]
    subprocess.run(command, check=True, timeout=30)
    await_that(lambda: emitted(home, "pump-1") == [("online", "signal")])


def state(address: BrokerAddress, host: str) -> dict[str, Any]:
    """Return the retained state of a host application."""
    receiver, found = Receiver(address, "asks", [f"spBv1.0/STATE/{host}"], persistent=False), list[bytes]()
    try:
        await_that(lambda: found.extend(one.payload for one in receiver.poll(0.1)) or found, limit_s=10)
    finally:
        receiver.close()
    return json.loads(found[-1])


def test_the_host_application_publishes_that_it_is_online(home: Home) -> None:
    reported = state(load_address(home.run("broker")), "fleetpulse")
    assert reported["online"] is True
    assert abs(time.time() * 1000 - reported["timestamp"]) < 600_000
