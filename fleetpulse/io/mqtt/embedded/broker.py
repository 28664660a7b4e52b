"""Embedded MQTT broker of a home: nats-server with its MQTT listener on JetStream.

Rule 1: the broker stores a QoS 1 message before it acknowledges the message.
Rule 2: the broker ends with the process that started it. A broker that survived a killed run is
stopped before the next one starts.
Rule 3: beyond the loopback interface, the broker listens with TLS, unless an unencrypted listener
is requested explicitly.
Rule 4: the password is only in files of mode 600: on no command line, in no log, in no ``repr``.
"""

import ipaddress
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.mapping import Mappings
from fleetpulse.core.messages.mapping_file import parse_mappings
from fleetpulse.core.operations import broker_defaults
from fleetpulse.core.presence.identities import DeviceIdentity
from fleetpulse.io.mqtt import codec
from fleetpulse.io.mqtt.acl import SERVICE_USER, access_lock, grants, nats_rules, quoted
from fleetpulse.io.mqtt.address import DEFAULT_PORT, MAX_PAYLOAD_BYTES, BrokerAddress, Tls
from fleetpulse.io.mqtt.embedded.broker_limits import SERVER_BYTES, BrokerLimits, limit_streams, remove_ports
from fleetpulse.io.mqtt.embedded.broker_program import broker_program
from fleetpulse.io.mqtt.embedded.connection_cleanup import ConnectionCleaner, system_user
from fleetpulse.io.mqtt.embedded.session_cleanup import SessionCleaner
from fleetpulse.io.mqtt.embedded_sessions import MAX_UNACKED, REDELIVERY_S
from fleetpulse.io.system.ports import free_port
from fleetpulse.io.system.process import command_with_parent_death_signal
from fleetpulse.io.system.secret_files import write_secret

if TYPE_CHECKING:
    import psutil

LOOPBACK: Final = "127.0.0.1"
READY_S: Final = 30.0  # a large store is read before the first client is accepted
STOP_S: Final = 5.0
MAX_QUEUES: Final = 20_000  # of all sessions: one for each filter with QoS 1; NATS allows 1,000 by default
OF_NATS_BYTES: Final = 65_536  # NATS counts its headers as payload, and drops an oversized message without an answer
_VALID_MAPPING: Final = "mapping.toml"  # last valid content of the mapping file
_ACCESS: Final = "access.conf"
_CREDENTIALS: Final = "credentials.json"
_TLS: Final = "tls.json"
_HANDSHAKE_S: Final = 10  # limit of a TLS handshake; devices that reconnect at the same time share the CPU


@dataclass(frozen=True, slots=True)
class ListenerTls:
    """TLS files of the embedded broker; an empty name means no file.

    Attributes:
        certificate: PEM file of the broker's certificate, followed by intermediate ones.
        key: PEM file of its key, unencrypted.
        authority: PEM file of the authorities that signed it, for fleetpulse's own connections;
            without it, they trust those of the system.
        client_authority: PEM file of the authorities that sign the certificates of clients. With it,
            every client presents a certificate, which names its user.
        own_certificate: PEM file of the client certificate of fleetpulse's own connections, whose
            DNS name is `SERVICE_USER`.
        own_key: PEM file of its key; empty if ``own_certificate`` contains it.
    """

    certificate: str
    key: str
    authority: str = ""
    client_authority: str = ""
    own_certificate: str = ""
    own_key: str = ""

    def check(self) -> None:
        """Check that the files can be used by the broker.

        Raises:
            FleetError: a file is missing, or cannot be read or used.
        """
        if not (self.certificate and self.key):
            raise FleetError(
                "TLS of the embedded broker needs a certificate and its key; set both broker_certificate and broker_key",
                code="broker-certificate-missing",
            )
        if self.client_authority and not self.own_certificate:
            raise FleetError(
                "with broker_client_authority, every client of the broker needs a certificate, fleetpulse included; name one "
                f'with the DNS name "{SERVICE_USER}" in broker_own_certificate',
                code="broker-own-certificate-missing",
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            named = "broker_certificate and broker_key"
            context.load_cert_chain(self.certificate, self.key, password="")  # instead of a prompt for an encrypted key
            if self.client_authority:
                named = "broker_client_authority"
                context.load_verify_locations(self.client_authority)
        except OSError as error:
            raise FleetError(
                f"the broker cannot use the files of {named} ({error.strerror or error}); name PEM files that fleetpulse may "
                f"read, with an unencrypted key that belongs to the certificate",
                code="broker-certificate-unreadable",
            ) from None

    def for_clients(self) -> Tls:
        """Return the TLS files of fleetpulse's own connections."""
        return Tls(self.authority or None, self.own_certificate or None, self.own_key or None)


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
        tls: TLS files of the listener; None for an unencrypted one.
        plain: whether an unencrypted listener beyond the loopback interface is requested.
        identity: identity scheme of the home's devices.
    """

    def __init__(
        self,
        broker_dir: Path,
        log: Path,
        host: str = LOOPBACK,
        port: int = DEFAULT_PORT,
        *,
        known_as: str | None = None,
        sync: str = broker_defaults.SYNC,
        limits: BrokerLimits | None = None,
        tls: ListenerTls | None = None,
        plain: bool = False,
        identity: DeviceIdentity = DeviceIdentity.ID,
    ) -> None:
        self.folder = broker_dir.absolute()
        self.log = log
        self.host = host
        self.port = port
        self.known_as = known_as
        self.sync = sync
        self.limits = limits or BrokerLimits()
        self.tls = tls
        self.plain = plain
        self.identity = identity
        self._running: subprocess.Popen[bytes] | None = None
        self._cleaners: list[SessionCleaner | ConnectionCleaner] = []

    def start(self) -> BrokerAddress:
        """Start the broker, wait until it accepts clients, and return its address.

        The broker ends with the thread that called this method.

        Raises:
            FleetError: the port is in use, nats-server is missing or changed, a TLS file cannot be used,
                an unencrypted listener beyond the loopback interface was not requested, the broker
                was not ready within `READY_S` seconds, or it refused its limits.
        """
        if self.tls is not None:
            self.tls.check()
        elif not self.plain and not _is_loopback(self.host):
            raise FleetError(
                f'the broker must not listen on "{self.host}" without TLS, because that network could read passwords and '
                f"messages; set broker_certificate and broker_key, listen on {LOOPBACK}, or pass --plain if only trusted "
                f"machines reach it",
                code="broker-unencrypted",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        stop_stale(self.folder)
        program = broker_program()
        port = require_free_port(self.host, self.port)
        host = self.known_as or _reachable(self.host)
        tls = None if self.tls is None else self.tls.for_clients()
        address = BrokerAddress(host, port, *_credentials(self.folder / _CREDENTIALS), tls)
        address.context()  # reports unreadable files before the broker starts
        configuration = self.folder / "nats.conf"
        remove_ports(self.folder)
        limits = self.limits.on_disk(self.folder)
        more = limits.configuration(self.folder, self.log.absolute()) + system_user(address.password)
        with access_lock(self.folder), self.log.open("ab") as log:  # new grants wait until the broker can reload them
            write_secret(self.folder / _TLS, json.dumps(None if self.tls is None else asdict(self.tls)))
            write_secret(configuration, _configuration(self.folder, self.host, port, self.sync, self.tls) + more)
            write_secret(self.folder / _ACCESS, _rules(address, self.folder, self.tls, _mappings_beside(self.folder)))
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
        sessions = SessionCleaner(
            self.folder, self._running.pid, address, lambda client_id: _end_session(address, client_id), self.identity
        )
        connections = ConnectionCleaner(self.folder, self._running.pid, address, limits.connections)
        self._cleaners = [sessions, connections]
        for cleaner in self._cleaners:
            cleaner.start()
        return address

    def _await_ready(self, address: BrokerAddress) -> None:
        assert self._running is not None, "the broker was not started"
        deadline_s, problem = time.monotonic() + READY_S, "it does not answer"
        while time.monotonic() < deadline_s:
            code = self._running.poll()
            if code is not None:
                self._running = None
                raise FleetError(
                    f'the broker exited during start with code {code}; last line of its log "{self.log}": {_last_line(self.log)}',
                    code="broker-ended",
                )
            try:
                if (problem := _refusal(address)) is None:
                    return
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
                problem = str(error)
            except ssl.SSLError as error:
                self.stop()
                raise FleetError(
                    f"fleetpulse cannot connect to its own broker on {address} ({error}); the certificate of the broker must "
                    f"name {address.host} (option --known-as) and be signed by broker_authority, and that of fleetpulse by "
                    f"broker_client_authority",
                    code="broker-certificate-refused",
                ) from None
            except OSError as error:
                problem = error.strerror or str(error)
            time.sleep(0.05)
        self.stop()
        raise FleetError(
            f"the broker accepted no client on {address} within {READY_S:.0f} s: {problem}{self._hint()}; see its log "
            f'"{self.log}"',
            code="broker-not-ready",
        )

    def _limit_streams(self, address: BrokerAddress, limits: BrokerLimits) -> None:
        try:
            assert self._running is not None, "the broker was not started"
            limit_streams(self.folder, self._running.pid, address, limits)
        except BaseException:
            self.stop()
            raise

    def _hint(self) -> str:
        mapped = self.tls is not None and self.tls.client_authority
        return f'; broker_own_certificate must have the DNS name "{SERVICE_USER}"' if mapped else ""

    def stop(self) -> None:
        """Stop the broker; kill it after `STOP_S` seconds. No effect if it does not run."""
        cleaners, self._cleaners = self._cleaners, []
        for cleaner in cleaners:
            cleaner.stop()
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
    """Reload the access rules and certificates of a running server; it disconnects revoked users.

    Other connections persist.

    Args:
        folder: folder of the broker.

    Returns:
        Whether a server runs.

    Raises:
        FleetError: a TLS file cannot be used any more; the server would refuse to reload anything. Or
            the record of the TLS files is missing or damaged.
    """
    folder = folder.absolute()
    with access_lock(folder):  # the lock covers read and write, so that no concurrent call writes older grants
        running = _server_of(folder)
        if running is None:
            return False
        service = BrokerAddress("", 0, *_credentials(folder / _CREDENTIALS))
        tls = _listener_tls(folder)
        try:
            if tls is not None:
                tls.check()
        except FleetError as error:
            raise FleetError(
                f"the running broker was not reloaded, so access that was just changed is not applied yet: {error}; then run: "
                f"./fleet access reload",
                code="access-not-reloaded",
            ) from None
        write_secret(folder / _ACCESS, _rules(service, folder, tls, _mappings_beside(folder)))
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


def is_embedded(folder: Path, address: BrokerAddress) -> bool:
    """Return whether an address has the user and the random password of the embedded broker in a folder."""
    path = folder / _CREDENTIALS
    return path.exists() and _credentials(path) == (address.username, address.password)


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


def require_free_port(host: str, port: int) -> int:
    """Return a port on which a broker can listen: ``port``, or any if ``port`` is 0.

    Raises:
        FleetError: the port is in use.
    """

    def refused(why: str) -> FleetError:
        return FleetError(
            f"the broker cannot listen on port {port} of {host} ({why}); stop the process that uses it, choose another "
            f"with --port, or use --port 0 for any free port",
            code="port-in-use",
        )

    return free_port(host, port, refused)


def _listener_tls(folder: Path) -> ListenerTls | None:
    """Return the TLS files with which the running server was started.

    Raises:
        FleetError: the record of these files is missing or damaged.
    """
    path = folder / _TLS
    try:
        held = json.loads(path.read_text())
        return None if held is None else ListenerTls(**held)
    except (OSError, ValueError, TypeError) as error:
        raise FleetError(
            f'"{path}" must name the TLS files of the running broker, and cannot be read ({error}); stop the broker and start it '
            f"again, which writes the file and applies all access",
            code="broker-tls-unknown",
        ) from None


def _rules(service: BrokerAddress, folder: Path, tls: ListenerTls | None, mappings: Mappings) -> str:
    certificates = tls is not None and bool(tls.client_authority)
    return nats_rules(service, grants(folder), mappings, certificates=certificates)


def _mappings_beside(folder: Path) -> Mappings:
    """Return the mappings of the home of a broker; access depends only on their topics.

    If the mapping file has a fault, for example while it is edited, its last valid content is used:
    devices keep their access, and an access can still be revoked.
    """
    path, valid = folder.parent / "mapping.toml", folder / _VALID_MAPPING
    if not path.exists():
        valid.unlink(missing_ok=True)
        return Mappings()
    try:
        content = path.read_text()
        mappings = parse_mappings(tomllib.loads(content), _without_path)
    except (FleetError, OSError, ValueError):
        if not valid.exists():
            return Mappings()  # bridge and landing report the fault, and do not start
        return parse_mappings(tomllib.loads(valid.read_text()), _without_path)
    write_secret(valid, content)
    return mappings


def _without_path(_: str) -> Callable[[Any], Any]:
    return lambda _: None


def _configuration(folder: Path, host: str, port: int, sync: str, tls: ListenerTls | None) -> str:
    """Return the content of nats.conf, without a monitoring port.

    Messages of QoS 2 are refused. NATS stores such a message under the client id until the sender releases it,
    without the user and before it checks the user's rights. So a client that connects with the client id of a
    device could store a message, which the device would later release instead of its own.

    An acknowledged message survives ``kill -9`` with any ``sync_interval``, because the operating
    system has the data before the acknowledgement. Measured: none of 12,000 messages lost in four
    kills under load. With ``always``, it also survives a power failure, at the cost of two fsyncs
    a message: one to store it and one to delete it. Measured: 3,000 messages/s each way, against
    50,000 in and 70,000 out with ``1s``.
    """
    of_tls = ""
    if tls is not None:
        of_tls = f", tls {{ cert_file: {quoted(tls.certificate)}, key_file: {quoted(tls.key)}, timeout: {_HANDSHAKE_S}"
        of_tls += f", ca_file: {quoted(tls.client_authority)}, verify_and_map: true }}" if tls.client_authority else " }"
    return f"""# written at each start; manual changes are lost
server_name: fleet
logtime_utc: true
host: "127.0.0.1"   # the NATS port is local only
port: -1
max_payload: {MAX_PAYLOAD_BYTES + OF_NATS_BYTES}
jetstream {{ store_dir: {quoted(str(folder / "store"))}, max_mem: 64MB, max_file: {SERVER_BYTES}, sync_interval: {sync}
  limits {{ default_max_consumers: {MAX_QUEUES} }} }}
mqtt {{ host: {quoted(host)}, port: {port}, max_ack_pending: {MAX_UNACKED}, ack_wait: "{REDELIVERY_S}s"
  reject_qos2_publish: true, downgrade_qos2_subscribe: true{of_tls} }}
include "{_ACCESS}"
"""


def _accepts_clients(address: BrokerAddress) -> bool:
    """Return whether the broker accepts a client."""
    try:
        return _refusal(address) is None
    except OSError:
        return False


def _end_session(address: BrokerAddress, client_id: str) -> bool:
    """End the session of a client: a clean session replaces it, and ends with its connection.

    Returns:
        Whether the broker accepted the connection. It refuses a client id that was taken over in the last second.
    """
    return _refusal(address, client_id) is None


def _refusal(address: BrokerAddress, client_id: str = "") -> str | None:
    """Return the reason for which the broker refuses a client; None if it accepts the client.

    An open port is not enough: it opens before JetStream has read its store.

    Raises:
        OSError: there is no connection.
    """
    secured = address.context()
    with socket.create_connection((address.host, address.port), timeout=2.0) as plain:
        connection = plain if secured is None else secured.wrap_socket(plain, server_hostname=address.host)
        with connection:
            client_id = client_id or f"fleet-ready-{secrets.token_hex(8)}"  # others must not be able to replace the connection
            connection.sendall(codec.encode_connect(client_id, address.username, address.password, keep_session=False))
            answer = connection.recv(4)
    if answer == b"\x20\x02\x00\x00":
        return None
    return codec.REFUSALS.get(answer[3], "it refuses clients") if len(answer) == 4 else "it closed the connection"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reachable(host: str) -> str:
    return LOOPBACK if host in ("0.0.0.0", "") else host


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing"
