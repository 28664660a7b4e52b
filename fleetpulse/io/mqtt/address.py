"""Where an MQTT broker is, who may come in, and how the line to it is secured.

Rule: a password is in the environment or in files of mode 600 alone: on no command line, in no log, in no ``repr``.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from fleetpulse.core.errors import FleetError
from fleetpulse.io.system.fsync import atomic_write

if TYPE_CHECKING:
    import ssl

DEFAULT_PORT: Final = 1883
DEFAULT_TLS_PORT: Final = 8883
MAX_PAYLOAD_BYTES: Final = 1_048_576
_OF_TLS: Final = ("FLEET_MQTT_CA", "FLEET_MQTT_CERT", "FLEET_MQTT_KEY")


@dataclass(frozen=True, slots=True)
class Tls:
    """What secures a line to a broker; its certificate must name the host.

    Attributes:
        ca: file of the authorities (PEM) that may have signed the broker's certificate; None takes the system's.
        cert: file of our own certificate (PEM), for a broker that asks for one.
        key: file of its key (PEM); None where ``cert`` holds it.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Where a broker is, and who may come in.

    Attributes:
        host: name or address.
        port: TCP port.
        username: None where none is asked for.
        password: never shown.
        tls: None where the line is open.
    """

    host: str
    port: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    def __str__(self) -> str:
        """Return it as people write it, the password masked."""
        who = f"{self.username}:***@" if self.username else ""
        return f"{'mqtts' if self.tls else 'mqtt'}://{who}{self.host}:{self.port}"

    def context(self) -> "ssl.SSLContext | None":
        """Return what secures the line; None where it is open.

        Raises:
            FleetError: a file cannot be read, or holds no certificate or key.
        """
        if self.tls is None:
            return None
        import ssl

        context = ssl.create_default_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            if self.tls.ca:
                context = ssl.create_default_context(cafile=self.tls.ca)
        except OSError as error:
            raise FleetError(
                f'the authorities in "{self.tls.ca}" cannot be read ({_why(error)}); name a PEM file',
                code="tls-authorities-unreadable",
            ) from None
        try:
            if self.tls.cert:
                context.load_cert_chain(self.tls.cert, self.tls.key)
        except OSError as error:
            files = f'"{self.tls.cert}"' + (f' and "{self.tls.key}"' if self.tls.key else "")
            raise FleetError(
                f"our certificate and key cannot be read from {files} ({_why(error)}); name PEM files",
                code="tls-certificate-unreadable",
            ) from None
        return context


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def parse_broker_url(url: str, environment: Mapping[str, str] = os.environ) -> BrokerAddress:
    """Read ``mqtt://user@host:1883``, or ``mqtts://`` for a secured line; port and user may be left out.

    Args:
        url: the address.
        environment: ``FLEET_MQTT_USERNAME`` stands in for a user that is left out; ``FLEET_MQTT_PASSWORD_FILE`` names the
            password's file, ``FLEET_MQTT_PASSWORD`` is it; ``FLEET_MQTT_CA``, ``FLEET_MQTT_CERT`` and ``FLEET_MQTT_KEY``
            are the files of `Tls`.

    Raises:
        FleetError: it is not such an address, or what secures it cannot be had.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname or parts.path.strip("/") or parts.query:
        shown = url if "@" not in url else f"...@{url.rpartition('@')[2]}"
        raise FleetError(
            f'a broker is named mqtt://host:port; got "{shown}"; write one such as "mqtt://broker.example:1883"',
            code="broker-url-invalid",
        )
    if parts.password:
        raise FleetError(
            "a password in a command is read by whoever lists the processes; put it into a file, name that in "
            "FLEET_MQTT_PASSWORD_FILE, and leave it out of the address",
            code="password-in-url",
        )
    username = unquote(parts.username) if parts.username else environment.get("FLEET_MQTT_USERNAME")
    password = _password(environment)
    ca, cert, key = (environment.get(name) for name in _OF_TLS)
    if parts.scheme == "mqtt":
        if named := [name for name in _OF_TLS if environment.get(name)]:
            raise FleetError(
                f"{' and '.join(named)} would secure the line, but mqtt:// is an open one; write mqtts://", code="tls-on-open-url"
            )
        return BrokerAddress(parts.hostname, port or DEFAULT_PORT, username, password)
    if key and not cert:
        raise FleetError(
            "FLEET_MQTT_KEY names a key without its certificate; name that in FLEET_MQTT_CERT", code="tls-certificate-missing"
        )
    address = BrokerAddress(parts.hostname, port or DEFAULT_TLS_PORT, username, password, Tls(ca, cert, key))
    address.context()  # what cannot be read is said at once, and not by each process in its log
    return address


def _password(environment: Mapping[str, str]) -> str | None:
    file = environment.get("FLEET_MQTT_PASSWORD_FILE")
    if file is None:
        return environment.get("FLEET_MQTT_PASSWORD")
    try:
        return Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(
            f'the password cannot be read from "{file}" ({error}); see FLEET_MQTT_PASSWORD_FILE', code="password-unreadable"
        ) from None


def save_address(path: Path, address: BrokerAddress) -> None:
    """Write an address for the other processes of a home, readable by its owner alone."""
    write_secret(path, json.dumps(asdict(address)))


def load_address(path: Path) -> BrokerAddress:
    """Read an address that `save_address` wrote.

    Raises:
        FleetError: there is none, or it cannot be read.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        tls = content.pop("tls", None)
        return BrokerAddress(**content, tls=Tls(**tls) if tls else None)
    except FileNotFoundError:
        raise FleetError(f'no broker is known in "{path}"; start one with: ./fleet up', code="broker-unknown") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise FleetError(
            f'"{path}" does not hold a broker\'s address ({error}); remove it and start again', code="broker-address-damaged"
        ) from None


def write_secret(path: Path, text: str) -> None:
    """Write a file that its owner alone can read, whole or not at all, and on the disk."""
    atomic_write(path, text, mode=0o600, aside=path.with_name(f".{path.name}.{os.getpid()}"))
