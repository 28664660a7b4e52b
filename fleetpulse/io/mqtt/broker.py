"""Embedded MQTT broker of a home: nats-server with its MQTT listener on JetStream.

Rule 1: the broker stores a QoS 1 message before it acknowledges the message.
Rule 2: the broker ends with the process that started it. A broker that survived a killed run is
stopped before the next one starts.
Rule 3: the password is only in files of mode 600: on no command line, in no log, in no ``repr``.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.mqtt import codec
from fleetpulse.io.mqtt.acl import SERVICE_USER, access_lock, grants, nats_rules
from fleetpulse.io.mqtt.address import DEFAULT_PORT, MAX_PAYLOAD_BYTES, BrokerAddress, write_secret
from fleetpulse.io.mqtt.broker_limits import SERVER_BYTES, BrokerLimits, limit_streams, remove_ports
from fleetpulse.io.mqtt.broker_program import broker_program
from fleetpulse.io.system.ports import free_port
from fleetpulse.io.system.process import command_with_parent_death_signal

if TYPE_CHECKING:
    import psutil

LOOPBACK: Final = "127.0.0.1"
READY_S: Final = 30.0  # a large store is read before the first client is accepted
STOP_S: Final = 5.0
MAX_UNACKED: Final = 8_192  # messages a bridge writes within two seconds, so that none is redelivered needlessly
OF_NATS_BYTES: Final = 65_536  # NATS counts its headers as payload, and drops an oversized message without an answer
SEND_AGAIN: Final = "3s"  # redelivery timeout of NATS; it also holds for a bridge that reconnected
_ACCESS: Final = "access.conf"


class Broker:
    """Embedded broker process.

    Args:
        broker_dir: folder of the store, configuration, credentials and process id.
        log: path of the log file.
        host: address to listen on.
        port: TCP port to listen on; 0 takes a free port.
        known_as: host name for clients; None if clients use ``host``.
        sync: time at which the store is synced: ``always``, or an interval such as ``1s``.
        limits: limits of connections, store and log; None for the defaults.
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
        limits: BrokerLimits | None = None,
    ) -> None:
        self.folder = broker_dir.absolute()
        self.log = log
        self.host = host
        self.port = port
        self.known_as = known_as
        self.sync = sync
        self.limits = limits or BrokerLimits()
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> BrokerAddress:
        """Start the broker, wait until it accepts clients, and return its address.

        The broker ends with the thread that called this method.

        Raises:
            FleetError: the port is in use, nats-server is missing or changed, the broker was not ready
                within `READY_S` seconds, or it refused its limits.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        stop_stale(self.folder)
        program = broker_program()
        port = _port(self.host, self.port)
        address = BrokerAddress(self.known_as or _reachable(self.host), port, *_credentials(self.folder / "credentials.json"))
        configuration = self.folder / "nats.conf"
        remove_ports(self.folder)
        limits = self.limits.on_disk(self.folder)
        more = limits.configuration(self.folder, self.log.absolute())
        write_secret(configuration, _configuration(self.folder, self.host, address, self.sync) + more)
        with access_lock(self.folder), self.log.open("ab") as log:  # new grants wait until the broker can reload them
            write_secret(self.folder / _ACCESS, nats_rules(address, grants(self.folder)))
            self._running = subprocess.Popen(
                command_with_parent_death_signal([str(program), "-c", str(configuration)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "GOMEMLIMIT": "512MiB"},
                start_new_session=True,  # keeps Ctrl-C from the broker: its clients stop first
            )
            (self.folder / "pid").write_text(str(self._running.pid))
            self._await_ready(address)
        self._limit_streams(address, limits)
        return address

    def _await_ready(self, address: BrokerAddress) -> None:
        assert self._running is not None, "the broker was not started"
        deadline_s = time.monotonic() + READY_S
        while time.monotonic() < deadline_s:
            code = self._running.poll()
            if code is not None:
                self._running = None
                raise FleetError(
                    f'the broker exited during start with code {code}; last line of its log "{self.log}": {_last_line(self.log)}',
                    code="broker-ended",
                )
            if _accepts_clients(address):
                return
            time.sleep(0.05)
        self.stop()
        raise FleetError(
            f'the broker did not answer on {address} within {READY_S:.0f} s; see its log "{self.log}"', code="broker-not-ready"
        )

    def _limit_streams(self, address: BrokerAddress, limits: BrokerLimits) -> None:
        try:
            assert self._running is not None, "the broker was not started"
            limit_streams(self.folder, self._running.pid, address, limits)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the broker; kill it after `STOP_S` seconds. No effect if it does not run."""
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
        """Return whether the broker runs."""
        return self._running is not None and self._running.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the server; None if it does not run."""
        return None if self._running is None else self._running.pid


def _server_of(folder: Path) -> "psutil.Process | None":
    """Return the server process that runs on a store; None if there is none.

    A process counts only if ``folder/pid`` holds its id and its command line names the
    configuration in ``folder``.
    """
    import psutil

    try:
        found = psutil.Process(int((folder / "pid").read_text()))
        return found if str(folder / "nats.conf") in found.cmdline() and found.pid != os.getpid() else None
    except (OSError, ValueError, psutil.Error):
        return None


def await_admission(address: BrokerAddress, patience_s: float = STOP_S) -> bool:
    """Wait until the broker accepts a user whose access was just granted.

    A running broker takes a moment to reload its access rules.

    Args:
        address: address of the broker, with the user and the password.
        patience_s: longest wait in seconds.

    Returns:
        Whether the broker accepted the user in time.
    """
    deadline_s = time.monotonic() + patience_s
    while not (admitted := _accepts_clients(address)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return admitted


def renew_access(folder: Path) -> bool:
    """Reload the access rules of a running server; it disconnects revoked users.

    Args:
        folder: folder of the broker.

    Returns:
        Whether a server runs.
    """
    folder = folder.absolute()
    with access_lock(folder):  # the lock covers read and write, so that no concurrent call writes older grants
        running = _server_of(folder)
        if running is None:
            return False
        service = BrokerAddress("", 0, *_credentials(folder / "credentials.json"))
        write_secret(folder / _ACCESS, nats_rules(service, grants(folder)))
        running.send_signal(signal.SIGHUP)
    return True


def stop_stale(folder: Path) -> bool:
    """Stop the server that a killed run left on the store; return whether one ran."""
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


def _credentials(path: Path) -> tuple[str, str]:
    if not path.exists():
        write_secret(path, json.dumps({"username": SERVICE_USER, "password": secrets.token_urlsafe(24)}))
    try:
        held = json.loads(path.read_text())
        return str(held["username"]), str(held["password"])
    except (ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f'"{path}" holds no valid credentials ({error}); remove it to create new ones', code="broker-credentials-damaged"
        ) from None


def _port(host: str, port: int) -> int:
    def refused(why: str) -> FleetError:
        return FleetError(
            f"the broker cannot listen on port {port} of {host} ({why}); stop the process that uses it, choose another "
            f"with --port, or use --port 0 for any free port",
            code="port-in-use",
        )

    return free_port(host, port, refused)


def _configuration(folder: Path, host: str, address: BrokerAddress, sync: str) -> str:
    """Return the content of nats.conf, without a monitoring port.

    An acknowledged message survives ``kill -9`` with any ``sync_interval``, because the operating
    system has the data before the acknowledgement. Measured: none of 12,000 messages lost in four
    kills under load. With ``always``, it also survives a power failure, at the cost of two fsyncs
    a message: one to store it and one to delete it. Measured: 3,000 messages/s each way, against
    50,000 in and 70,000 out with ``1s``.
    """
    quoted = json.dumps  # NATS reads JSON's strings
    return f"""# written at each start; manual changes are lost
server_name: fleet
host: "127.0.0.1"   # the NATS port is local only
port: -1
max_payload: {MAX_PAYLOAD_BYTES + OF_NATS_BYTES}
jetstream {{ store_dir: {quoted(str(folder / "store"))}, max_mem: 64MB, max_file: {SERVER_BYTES}, sync_interval: {sync} }}
mqtt {{ host: {quoted(host)}, port: {address.port}, max_ack_pending: {MAX_UNACKED}, ack_wait: {SEND_AGAIN} }}
include "{_ACCESS}"
"""


def _accepts_clients(address: BrokerAddress) -> bool:
    """Return whether the broker answers CONNECT.

    An open port is not enough: it opens before JetStream has read its store.
    """
    try:
        with socket.create_connection((address.host, address.port), timeout=2.0) as connection:
            connection.sendall(codec.encode_connect("fleet-ready", address.username, address.password, keep_session=False))
            return connection.recv(4) == b"\x20\x02\x00\x00"
    except OSError:
        return False


def _reachable(host: str) -> str:
    return LOOPBACK if host in ("0.0.0.0", "") else host


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
