"""Reconnecting devices with a will: they stay online, whatever their clocks; absent ones go offline.

The default is forty devices, and seconds without a network. The long form is
``FLEET_CLIENTS=200 FLEET_OUTAGE_S=60 ./fleet test e2e --all -k test_reconnects``.
"""

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from cli.chaos.ledger import identity_of
from cli.chaos.reconnecting import CLOCK_OFFSETS_S, ReconnectingDevice
from fleetpulse.io.checkpoints.checkpoint import judged_ms
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.address import BrokerAddress, load_address
from fleetpulse.io.system.process import read_status
from fleetpulse.reports import frontiers, judgements, messages
from tests.support import wait
from tests.support.fleet_command import begin, fleet
from tests.support.processes import descendants_with

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(2400)]  # each wait has its own, shorter limit
COUNT = int(os.environ.get("FLEET_CLIENTS", "40"))
OUTAGE_S = float(os.environ.get("FLEET_OUTAGE_S", "6"))
GRACE_S = 60  # on a busy machine, all devices reconnect within it
SETTINGS = 'allowed_lateness = "2s"\ncanary_interval = "500ms"\nreconnect_grace = "20s"\n'
POLICY = f'[rules]\ntimeout = "30m"\ndeath_grace = "{GRACE_S}s"\n'
await_that = partial(wait.await_that, limit_s=600)


class Line:
    """Forwarder of TCP connections to a broker, which a test can cut.

    Args:
        port: port of the broker, on this machine.
    """

    def __init__(self, port: int) -> None:
        self._to, self._open, self._server = port, list[socket.socket](), socket.create_server(("127.0.0.1", 0))
        self.port, self._is_cut = self._server.getsockname()[1], False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = None if self._is_cut else socket.create_connection(("127.0.0.1", self._to), timeout=5)
                except OSError:
                    far = None
                if far is None:
                    near.close()
                    continue
                far.settimeout(None)
                self._open += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        self._is_cut = True
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._server.close()


class Mosquitto:
    """A separate broker, with persistence."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        folder.mkdir()
        self._config = folder / "mosquitto.conf"
        self._config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\npersistence true\npersistence_location {folder}/\n"
            f"autosave_interval 1\nautosave_on_changes true\nuser root\nmax_queued_messages 0\n"
        )
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(["mosquitto", "-c", str(self._config)], stderr=subprocess.DEVNULL)
        await_that(self._answers, limit_s=20)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (home / "settings.toml").write_text(SETTINGS)
    (tmp_path / "policy.toml").write_text(POLICY)
    return home


def up(home: Home, *arguments: str) -> Iterator[psutil.Process]:
    """Run a fleet without simulated devices, under the policy."""
    running = begin("up", "--home", str(home.path), "--no-sim", "--no-airflow", "--no-page", *arguments)
    try:
        await_that(lambda: read_status(home.run("bridge")).get("subscribed"), by=running)
        applied = fleet("policy", "apply", str(home.path.parent / "policy.toml"), "--home", str(home.path))
        assert applied.returncode == 0, applied.stderr
        yield psutil.Process(running.pid)
    finally:
        running.terminate()
        running.communicate(timeout=120)


def devices_of(address: BrokerAddress) -> list[ReconnectingDevice]:
    return [
        ReconnectingDevice(address, f"again-{n:03d}", ahead_s=CLOCK_OFFSETS_S[n % len(CLOCK_OFFSETS_S)]) for n in range(COUNT)
    ]


def connect(devices: list[ReconnectingDevice]) -> None:
    """Connect all devices; each retries until its birth is acknowledged."""
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda one: await_that(one.connect, limit_s=60), devices))


def reconnect(devices: list[ReconnectingDevice]) -> None:
    for one in devices:
        one.reset()
    connect(devices)


def emitted(home: Home, device_id: str) -> list[tuple[str, str]]:
    return [(one["to_mode"], one["trigger"]) for one in judgements.transitions(home, device_id)]


def await_landed(home: Home, devices: list[ReconnectingDevice]) -> None:
    """Wait until the newest birth of each device has landed, and so has been acknowledged to the broker.

    After an outage, a broker sends messages again that the bridge has not acknowledged. The copy of an older birth would then
    arrive after a newer birth. It would not set the session, but it would void a will that arrived before it.
    """
    births = {one.acknowledged[-1].message.identity for one in devices}
    await_that(lambda: births <= {identity_of(row) for row in messages.rows(home, [one.name for one in devices])})


def check(home: Home, devices: list[ReconnectingDevice]) -> None:
    """Check that absent devices, one in four, go offline, and that no other device does.

    First the bridge receives the messages that the broker kept for it: until then a broker may deliver a new will before an older
    birth.
    """
    await_landed(home, devices)
    absent, returned = devices[::4], [one for number, one in enumerate(devices) if number % 4]
    for one in absent:
        one.reset()
    for one in returned:
        assert one.send(), one.name
    went_offline = [("online", "signal"), ("offline", "death")]
    await_that(lambda: [one.name for one in absent if emitted(home, one.name) != went_offline] == [])
    now_ms = time.time_ns() // 1_000_000
    await_that(lambda: (frontiers.frontier_ms(home, judged_ms(home.checkpoint)) or 0) > now_ms)
    assert {one.name: emitted(home, one.name) for one in returned} == {one.name: went_offline[:1] for one in returned}
    for one in returned:
        one.leave()


def test_devices_survive_resets_and_a_suspended_bridge_with_the_embedded_broker(path: Path) -> None:
    home = Home(path)
    for running in up(home, "--port", "0"):
        devices = devices_of(load_address(home.run("broker")))
        connect(devices)
        reconnect(devices)
        reconnect(devices)
        await_landed(home, devices)
        (bridge,) = descendants_with(running, "bridge")
        bridge.suspend()
        try:
            reconnect(devices)
            time.sleep(OUTAGE_S)  # duration of the suspension
        finally:
            bridge.resume()
        check(home, devices)


@pytest.mark.skipif(not shutil.which("mosquitto"), reason="mosquitto is not installed")
def test_devices_survive_resets_a_killed_broker_and_a_cut_network_with_mosquitto(path: Path) -> None:
    home, broker = Home(path), Mosquitto(path.parent / "mosquitto")
    line = Line(broker.port)
    try:
        for _ in up(home, "--broker", f"mqtt://127.0.0.1:{line.port}"):
            devices = devices_of(BrokerAddress("127.0.0.1", broker.port))
            connect(devices)
            reconnect(devices)
            await_landed(home, devices)
            broker.kill()
            broker.start()
            connect(devices)
            await_that(lambda: read_status(home.run("bridge")).get("connected"))
            await_landed(home, devices)
            line.cut()
            await_that(lambda: not read_status(home.run("bridge")).get("connected"))
            reconnect(devices)
            time.sleep(OUTAGE_S)  # duration of the outage of the bridge's network
            line.mend()
            await_that(lambda: read_status(home.run("bridge")).get("connected"))
            check(home, devices)
    finally:
        line.close()
        broker.kill()
