"""Access rules of the embedded broker: users, roles and the topics of each.

Rule 1: a device's user name is its id, and the device publishes only under that id. A grant for an id
with a site, ``site/id``, is valid at that site only. A grant for an id alone is valid at any site; a home
that identifies devices by site and id refuses it. A Sparkplug edge node publishes under its group and
node, for all of its devices.
Rule 2: the broker stores only the hash of a password; the password is shown once, when created.
Rule 3: a user has a password or a certificate. Users with certificates have no password, so they are
in the rules only if the listener requires certificates.
Rule 4: access that is not granted is refused. Devices publish only the kinds that devices send;
only operators and fleetpulse itself publish on control topics and internal kinds. A device subscribes only to the
commands to itself.
"""

import fcntl
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.mapping import NO_MAPPINGS, RESERVED_LEVELS, Mappings
from fleetpulse.core.messages.sparkplug import COMMANDS, FILTERS, PREFIX, STATE
from fleetpulse.core.messages.verdicts import PUBLISHED
from fleetpulse.core.presence.identities import SEPARATOR, DeviceIdentity, topic_of
from fleetpulse.core.rows import ALERTS, FAILURES, FROM_DEVICES, Kind
from fleetpulse.core.streams.commands import COMMAND
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded.broker_api import INBOX
from fleetpulse.io.system.secret_files import write_secret

SERVICE_USER: Final = "fleet"
GRANTS: Final = "access.json"  # in the folder of the broker
SYSTEM_USER: Final = "_fleet"  # of the broker's system account, see `connection_cleanup`; no grant can have the name
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_NODE: Final = re.compile(f"{_NAME.pattern}/{_NAME.pattern}")
_DEVICE: Final = re.compile(f"(?:{_NAME.pattern}/)?{_NAME.pattern}")
_ANY_SITE: Final = "+"
_KINDS: Final = sorted(kind.value for kind in FROM_DEVICES)
_HEARD_BY_DEVICE: Final = (Kind.CONTROL.value, COMMAND)  # last levels of the topics below its id that a device may subscribe to
_NOTHING: Final = ["_nothing"]  # an empty list would allow everything
_HEARD: Final = ("fleet/#", f"{ALERTS}/#", f"{FAILURES}/#", *PUBLISHED)  # watchers and operators may subscribe
_SENT: Final = ("fleet/#", f"{ALERTS}/#")  # operators may publish
_MQTT_ONLY: Final = 'allowed_connection_types: ["MQTT", "MQTT_WS"]'  # no other user logs in at the broker's NATS port
_LOCAL_TOO: Final = 'allowed_connection_types: ["MQTT", "MQTT_WS", "STANDARD"]'  # fleetpulse sets limits there
_NO_SUBJECT: Final = frozenset(" \t\n\r\f*>")  # characters that no literal word of a NATS subject can have
_INTERNAL_LEVELS: Final = (INBOX, "$JS", "$MQTT", "$SYS")  # first levels of subjects of the broker itself
_LONGEST_SUBJECT: Final = 1_024
_ROUNDS: Final = 5  # passwords are random, so a costlier hash would only slow down each login


class Role(StrEnum):
    """Role of a broker user.

    A device publishes as itself, a watcher reads everything, an operator reads and publishes
    everything.
    """

    DEVICE = "device"
    WATCHER = "watcher"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Grant:
    """Access grant of one broker user.

    Attributes:
        name: user name.
        role: role of the user.
        hashed: bcrypt hash of the password; empty for a user with a certificate.
        devices: device ids the user publishes for: its own id, or the ids behind a gateway. Each is an
            id, or ``site/id`` for that site only.
        nodes: Sparkplug edge nodes the user publishes as, each ``GROUP/NODE``.
        certificate: subject of the user's certificate, or a name in it; empty for a user with a
            password.
        topics: MQTT topic filters outside ``fleet/`` on which a gateway publishes for any device.
    """

    name: str
    role: Role
    hashed: str
    devices: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    certificate: str = ""
    topics: tuple[str, ...] = ()

    @property
    def login(self) -> str:
        """User name at the broker: the name of the certificate, if there is one."""
        return self.certificate or self.name


def grants(folder: Path) -> list[Grant]:
    """Return the access grants of all users except fleetpulse's own.

    Args:
        folder: folder of the broker.

    Raises:
        FleetError: the file of access grants cannot be read.
    """
    path = folder / GRANTS
    try:
        content = json.loads(path.read_text())
        return [
            Grant(
                one["name"],
                Role(one["role"]),
                one["hashed"],
                tuple(one["devices"]),
                tuple(one.get("nodes", ())),
                one.get("certificate", ""),
                tuple(one.get("topics", ())),
            )
            for one in content
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f'"{path}" holds no valid access grants ({error}); restore it from a backup, or remove it', code="grants-damaged"
        ) from None


def grant(
    folder: Path,
    name: str,
    role: Role,
    devices: Sequence[str] = (),
    nodes: Sequence[str] = (),
    topics: Sequence[str] = (),
    identity: DeviceIdentity = DeviceIdentity.ID,
) -> str:
    """Grant a user access and return its new password; replace an existing grant.

    Args:
        folder: folder of the broker.
        name: user name of letters, digits and ``. _ : @ -``; for a device, its id or ``site/id``.
        role: role of the user.
        devices: device ids a gateway publishes for, each an id or ``site/id``. A device without
            ``devices`` and ``nodes`` publishes for itself.
        nodes: Sparkplug edge nodes the user publishes as, each ``GROUP/NODE``.
        topics: MQTT topic filters on which a gateway publishes for any device, by a mapping.
        identity: identity scheme of the home's devices.

    Raises:
        FleetError: a name or topic filter is malformed, the user name is reserved for fleetpulse or
            is the login of another user, a role other than device is given devices, nodes or topics, or
            a device has no site although site and id identify a device.
    """
    _check(name, role, devices, nodes, topics, identity)
    import bcrypt

    password = secrets.token_urlsafe(24)
    hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(_ROUNDS, b"2a")).decode()
    _put(folder, Grant(name, role, hashed, _own(name, role, devices, nodes), tuple(nodes), "", tuple(topics)))
    return password


def grant_certificate(
    folder: Path,
    name: str,
    role: Role,
    certificate: str,
    devices: Sequence[str] = (),
    nodes: Sequence[str] = (),
    topics: Sequence[str] = (),
    identity: DeviceIdentity = DeviceIdentity.ID,
) -> None:
    """Grant the owner of a certificate access; replace an existing grant of the user.

    Args:
        folder: folder of the broker.
        name: user name, see `grant`.
        role: role of the user.
        certificate: subject of the certificate as in RFC 4514, such as ``CN=pump-1,O=Acme``, or an
            e-mail address, DNS name or URI of its alternative names.
        devices: see `grant`.
        nodes: see `grant`.
        topics: see `grant`.
        identity: see `grant`.

    Raises:
        FleetError: see `grant`; or the certificate is malformed, or belongs to another user.
    """
    _check(name, role, devices, nodes, topics, identity)
    certificate = certificate.strip()
    if not certificate or not certificate.isprintable() or len(certificate) > _LONGEST_SUBJECT:
        raise FleetError(
            f"a certificate is named by its subject or an alternative name, 1 to {_LONGEST_SUBJECT:,} printable characters; "
            f'got {certificate[:100]!a}; write one such as "CN=pump-1,O=Acme"',
            code="certificate-invalid",
        )
    if certificate in (SERVICE_USER, SYSTEM_USER):
        raise FleetError(
            f'the certificate name "{certificate}" is reserved for fleetpulse; issue a certificate with another name',
            code="user-reserved",
        )
    _put(folder, Grant(name, role, "", _own(name, role, devices, nodes), tuple(nodes), certificate, tuple(topics)))


def suggested_client_id(name: str) -> str:
    """Return a new MQTT client id for a user that other users cannot guess.

    A client that connects with the client id of another user's session replaces it. The broker
    cannot prevent that (`docs/adr/0038-mqtt-client-ids.md`).
    """
    return f"{re.sub('[./]', '-', name)}-{secrets.token_hex(8)}"  # NATS refuses dots


def _own(name: str, role: Role, devices: Sequence[str], nodes: Sequence[str]) -> tuple[str, ...]:
    return tuple(devices) if devices or nodes or role is not Role.DEVICE else (name,)


def _check(
    name: str, role: Role, devices: Sequence[str], nodes: Sequence[str], topics: Sequence[str], identity: DeviceIdentity
) -> None:
    if name == SERVICE_USER:
        raise FleetError(f'the user name "{SERVICE_USER}" is reserved for fleetpulse; choose another', code="user-reserved")
    for one in (name, *devices):
        if not (_DEVICE if role is Role.DEVICE else _NAME).fullmatch(one):
            raise FleetError(
                f"a user name has 1 to 128 letters, digits and . _ : @ -, and starts with a letter or digit; that of a device "
                f"may follow a site and a slash; got {one!a}",
                code="user-name-invalid",
            )
    for one in _own(name, role, devices, nodes):
        if identity is DeviceIdentity.SITE_AND_ID and SEPARATOR not in one:
            raise FleetError(
                f'this home identifies a device by site and id (identity = "{identity}"), so a grant must name both; got '
                f'"{one}"; write SITE/{one}, such as "oslo/{one}"',
                code="device-without-site",
            )
    for node in nodes:
        if not _NODE.fullmatch(node):
            raise FleetError(
                f"an edge node is GROUP/NODE, both of letters, digits and . _ : @ -; got {node!a}", code="edge-node-invalid"
            )
    for topic in topics:
        if not _is_grantable(topic):
            raise FleetError(
                f"a topic filter has printable levels without blanks, > and *, and does not begin with "
                f'{", ".join(RESERVED_LEVELS)}, "$" or a wildcard; got {topic!a}; write one such as "gateway-1/#"',
                code="topic-not-grantable",
            )
    if (devices or nodes or topics) and role is not Role.DEVICE:
        bound = ", ".join([*devices, *nodes, *topics])
        raise FleetError(
            f"the role {role} takes no devices, edge nodes or topics; got {bound}; omit them, or use the role device",
            code="role-without-devices",
        )


def _is_grantable(topic: str) -> bool:
    """Return whether a topic filter can be granted to a gateway.

    It must be a valid filter and a valid NATS subject, and must not cover topics of other users.
    """
    levels = topic.split("/")
    several = levels[-1] == "#"
    words = [level for level in (levels[:-1] if several else levels) if level != "+"]
    is_valid = any(words) and all(word.isprintable() and not set(word) & set(" +#*>") for word in words)
    return is_valid and levels[0] not in (*RESERVED_LEVELS, "+", "#") and not levels[0].startswith("$")


def _put(folder: Path, new: Grant) -> None:
    """Store a grant, and replace that of the same user; the broker does not start if two users share a login."""
    with access_lock(folder):
        others = [one for one in grants(folder) if one.name != new.name]
        for one in others:
            if _canonical(one.login) == _canonical(new.login):
                raise FleetError(
                    f'"{new.login}" is already the login of the user "{one.name}"; revoke that access first, or use another '
                    f"name or certificate",
                    code="login-granted",
                )
        _write(folder, [*others, new])


def _canonical(login: str) -> tuple[str, ...]:
    """Return the parts of a login in sorted order: NATS ignores their order in a subject."""
    return tuple(sorted(part.strip() for part in re.split(r"(?<!\\)[,+]", login)))


def revoke(folder: Path, name: str) -> None:
    """Revoke the access of a user.

    Raises:
        FleetError: no user of that name has access.
    """
    with access_lock(folder):
        known = grants(folder)
        remaining = [one for one in known if one.name != name]
        if len(remaining) == len(known):
            raise FleetError(f'no user "{name}" has access; list the users with: ./fleet access list', code="user-unknown")
        _write(folder, remaining)


def _write(folder: Path, known: Iterable[Grant]) -> None:
    write_secret(folder / GRANTS, json.dumps([asdict(one) for one in sorted(known, key=lambda one: one.name)], indent=1))


@contextmanager
def access_lock(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock on the access grants until the context exits.

    Wait until the lock is free. Hold it to change the grants, and to pass them to the broker.

    Args:
        folder: folder of the broker.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".access.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def nats_rules(
    service: BrokerAddress, known: Iterable[Grant], mappings: Mappings = NO_MAPPINGS, *, certificates: bool = False
) -> str:
    """Return the authorization part of a NATS configuration.

    Args:
        service: user and password of fleetpulse, which may publish and subscribe to everything.
        known: access grants of the other users.
        mappings: mappings of the home; a device may publish on the topics that they give it.
        certificates: whether the listener maps certificates to users (``verify_and_map``). If not,
            users with certificates are left out: they have no password, so any client could log in as one.
    """
    users = [f"{{ user: {quoted(service.username)}, password: {quoted(service.password)}, {_LOCAL_TOO} }}"]
    for one in known:
        if one.certificate and not certificates:
            continue
        may_send, may_hear = _subjects(one, mappings)
        login = f"user: {quoted(one.login)}" + ("" if one.certificate else f", password: {quoted(one.hashed)}")
        denied = [_subject(topic) for topic in _reserved(_topics(one, mappings)[0])]
        except_for = f", deny: {quoted(denied)}" if denied else ""
        allowed = f"publish: {{ allow: {quoted(may_send)}{except_for} }}, subscribe: {{ allow: {quoted(may_hear)} }}"
        users.append(f"{{ {login}, {_MQTT_ONLY}, permissions: {{ {allowed} }} }}")
    return "authorization { users: [\n  " + "\n  ".join(users) + "\n] }\n"


def quoted(value: str | list[str] | None) -> str:
    """Return a value for a NATS configuration: JSON whose non-ASCII characters are not escaped."""
    return json.dumps(value, ensure_ascii=False)


def _subjects(one: Grant, mappings: Mappings = NO_MAPPINGS) -> tuple[list[str], list[str]]:
    """Return the NATS subjects that a user may publish on and subscribe to."""
    may_send, may_hear = _topics(one, mappings)
    heard = [topic for each in may_hear for topic in (each.removesuffix("/#"), each)]  # "fleet/#" includes "fleet"
    sent = [_subject(topic) for topic in may_send if not set(topic) & _NO_SUBJECT]
    return sent or _NOTHING, [_subject(topic) for topic in dict.fromkeys(heard)]


def _subject(topic: str) -> str:
    """Translate an MQTT topic filter to a NATS subject; NATS writes a dot as ``//``, and an empty level as ``/``."""
    words = (level.replace(".", "//") or "/" for level in topic.split("/"))
    return ".".join(words).replace("+", "*").replace("#", ">")


def _topics(one: Grant, mappings: Mappings) -> tuple[list[str], list[str]]:
    """Return the MQTT topic filters that a user may publish on and subscribe to."""
    if one.role is not Role.DEVICE:
        return [*_SENT] if one.role is Role.OPERATOR else [], [*_HEARD]
    may_send = [topic_of(own, kind, _ANY_SITE) for own in one.devices for kind in _KINDS]
    may_send += [mapped for own in one.devices for mapped in mappings.filters_of_device(own)]
    may_send += one.topics
    may_hear = [topic_of(own, level, _ANY_SITE) for own in one.devices for level in _HEARD_BY_DEVICE]
    for group, node in (each.split("/") for each in one.nodes):
        may_send += [filtered.replace("+", group, 1).replace("+", node, 1) for filtered in FILTERS]
        may_hear += [f"{PREFIX}{group}/{command}/{node}{more}" for command in COMMANDS for more in ("", "/#")]
    return may_send, [*may_hear, *([f"{STATE}+"] if one.nodes else [])]


def _reserved(may_send: Sequence[str]) -> list[str]:
    """Return the MQTT topic filters that a user must not publish on, although one of its filters covers them.

    A mapping rule whose topics begin with a placeholder gives a device filters that begin with ``+``. No mapping
    rule matches topics of fleetpulse and of the broker itself, see `mapping.RESERVED_LEVELS`.
    """
    if not any(topic.startswith("+/") for topic in may_send):
        return []
    granted = {topic.partition("/")[0] for topic in may_send}
    return [f"{level}/#" for level in (*RESERVED_LEVELS, *_INTERNAL_LEVELS) if level not in granted]


def mosquitto_rules(
    known: Iterable[Grant], mappings: Mappings = NO_MAPPINGS, identity: DeviceIdentity = DeviceIdentity.ID
) -> str:
    """Return the rules of `nats_rules` as a Mosquitto ``acl_file``.

    The rules of devices are patterns on the user name, which contains the site if site and id identify
    a device. A user with a certificate has its subject as user name (``use_subject_as_username``).
    """
    has_site = identity is DeviceIdentity.SITE_AND_ID
    own = "fleet/%u" if has_site else "fleet/+/%u"
    lines = [f"# devices: the user name is {'site/id' if has_site else 'the device id'}"]
    lines += [f"pattern write {own}/{kind}" for kind in _KINDS]
    lines += [f"pattern read {own}/{level}" for level in _HEARD_BY_DEVICE]
    lines += ["", "# the bridge", f"user {SERVICE_USER}", "topic readwrite #"]
    for one in known:
        is_own = one.login in one.devices and (SEPARATOR in one.login) == has_site  # as the patterns require
        more = one.nodes or one.topics or mappings.filters_of_device(one.login)
        if is_own and one.devices == (one.login,) and not more:
            continue
        lines += ["", f"user {one.login}"]
        if not is_own and _DEVICE.fullmatch(one.login):  # the patterns apply to any user
            lines.append(f"topic deny {own.replace('%u', one.login)}/+")
        may_send, may_hear = _topics(one, mappings)
        lines += [f"topic deny {topic}" for topic in _reserved(may_send)]
        lines += [f"topic write {topic}" for topic in may_send] + [f"topic read {topic}" for topic in may_hear]
    return "\n".join(lines) + "\n"
