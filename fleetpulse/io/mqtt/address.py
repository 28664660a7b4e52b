"""Address, credentials and TLS files of an MQTT broker.

Rule: a password is only in the environment or in files of mode 600: on no command line, in no
log, in no ``repr``.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from fleetpulse.core.errors import FleetError
from fleetpulse.core.operations.secret_files import exposed_secret
from fleetpulse.io.system.secret_files import write_secret

if TYPE_CHECKING:
    import ssl

DEFAULT_PORT: Final = 1883
DEFAULT_TLS_PORT: Final = 8883
MAX_PAYLOAD_BYTES: Final = 1_048_576
_OF_TLS: Final = ("FLEET_MQTT_CA", "FLEET_MQTT_CERT", "FLEET_MQTT_KEY")


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS files for a broker whose certificate must name the host.

    Attributes:
        ca: PEM file of the trusted certificate authorities; None trusts those of the system.
        cert: PEM file of the client certificate, for a broker that requires one.
        key: PEM file of the client key; None if ``cert`` contains it.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Address and credentials of a broker.

    Attributes:
        host: host name or IP address.
        port: TCP port.
        username: user name; None if the broker requires none.
        password: password, never shown.
        tls: TLS files; None for an unencrypted connection.
    """

    host: str
    port: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    def __str__(self) -> str:
        """Return the address as a URL with a masked password."""
        user_info = f"{self.username}:***@" if self.username else ""
        return f"{'mqtts' if self.tls else 'mqtt'}://{user_info}{self.host}:{self.port}"

    def context(self) -> "ssl.SSLContext | None":
        """Return the TLS context; None for an unencrypted connection.

        Raises:
            FleetError: a file cannot be read, or contains no certificate or key.
        """
        if self.tls is None:
            return None
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.tls.ca or None)
        except OSError as error:
            raise FleetError(
                f'cannot read the certificate authorities in "{self.tls.ca}" ({_why(error)}); name a PEM file',
                code="tls-authorities-unreadable",
            ) from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            if self.tls.cert:
                context.load_cert_chain(self.tls.cert, self.tls.key)
        except OSError as error:
            files = f'"{self.tls.cert}"' + (f' and "{self.tls.key}"' if self.tls.key else "")
            raise FleetError(
                f"cannot read the client certificate and key from {files} ({_why(error)}); name PEM files",
                code="tls-certificate-unreadable",
            ) from None
        return context


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def parse_broker_url(url: str, environment: Mapping[str, str] = os.environ) -> BrokerAddress:
    """Parse a broker URL ``mqtt://user@host:1883``, or ``mqtts://`` for TLS.

    Port and user are optional.

    Args:
        url: URL of the broker.
        environment: environment variables. ``FLEET_MQTT_USERNAME`` is the default user,
            ``FLEET_MQTT_PASSWORD_FILE`` the file of the password, ``FLEET_MQTT_PASSWORD`` the
            password; ``FLEET_MQTT_CA``, ``FLEET_MQTT_CERT`` and ``FLEET_MQTT_KEY`` are the files
            of `Tls`.

    Raises:
        FleetError: the URL is invalid, the password or a TLS file cannot be read, or other users
            can read the password or the client key.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname or parts.path.strip("/") or parts.query:
        shown = url if "@" not in url else f"...@{url.rpartition('@')[2]}"
        raise FleetError(
            f'a broker URL is mqtt://host:port; got "{shown}"; write one such as "mqtt://broker.example:1883"',
            code="broker-url-invalid",
        )
    if parts.password:
        raise FleetError(
            "the broker URL contains a password, which every user who lists processes can read; put it into a file, "
            "name the file in FLEET_MQTT_PASSWORD_FILE, and remove the password from the URL",
            code="password-in-url",
        )
    username = unquote(parts.username) if parts.username else environment.get("FLEET_MQTT_USERNAME")
    password = _password(environment)
    ca, cert, key = (environment.get(name) for name in _OF_TLS)
    if parts.scheme == "mqtt":
        if named := [name for name in _OF_TLS if environment.get(name)]:
            raise FleetError(
                f"TLS files are set ({' and '.join(named)}), but mqtt:// is unencrypted; write mqtts://", code="tls-on-open-url"
            )
        return BrokerAddress(parts.hostname, port or DEFAULT_PORT, username, password)
    if key and not cert:
        raise FleetError(
            "FLEET_MQTT_KEY names a key without a certificate; name the certificate in FLEET_MQTT_CERT",
            code="tls-certificate-missing",
        )
    address = BrokerAddress(parts.hostname, port or DEFAULT_TLS_PORT, username, password, Tls(ca, cert, key))
    if private := key or cert:
        _require_private(Path(private), "a client key")
    address.context()  # fail here if a file is unreadable, not later in each process
    return address


def _password(environment: Mapping[str, str]) -> str | None:
    file = environment.get("FLEET_MQTT_PASSWORD_FILE")
    if file is None:
        return environment.get("FLEET_MQTT_PASSWORD")
    try:
        password = Path(file).read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(
            f'cannot read the password from "{file}" ({error}); check FLEET_MQTT_PASSWORD_FILE', code="password-unreadable"
        ) from None
    _require_private(Path(file), "a password")
    return password


def _require_private(path: Path, what: str) -> None:
    """Refuse a file whose secret other users can read; `context` reports a missing file."""
    if path.exists() and (exposed := exposed_secret(path, what, path.stat(), path.absolute().parent.stat(), os.geteuid())):
        raise exposed


def save_address(path: Path, address: BrokerAddress) -> None:
    """Write an address for the other processes of a home, with file mode 600."""
    write_secret(path, json.dumps(asdict(address)))


def load_address(path: Path) -> BrokerAddress:
    """Read an address that `save_address` wrote.

    Raises:
        FleetError: the file is missing or invalid.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        tls = content.pop("tls", None)
        return BrokerAddress(**content, tls=Tls(**tls) if tls else None)
    except FileNotFoundError:
        raise FleetError(f'no broker address in "{path}"; start a broker with: ./fleet up', code="broker-unknown") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise FleetError(
            f'"{path}" holds no valid broker address ({error}); remove it and start again', code="broker-address-damaged"
        ) from None
