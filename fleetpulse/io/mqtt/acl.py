"""Access rules of the embedded broker: users, roles and the topics of each.

Rule 1: a device's user name is its id, and the device publishes only under that id, at any site.
A Sparkplug edge node publishes under its group and node, for all of its devices.
Rule 2: the broker stores only the hash of a password; the password is shown once, when created.
Rule 3: access that is not granted is refused. Devices publish only the kinds that devices send;
only operators and fleetpulse itself publish on control topics and internal kinds.
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
from fleetpulse.core.messages.sparkplug import COMMANDS, FILTERS, PREFIX, STATE
from fleetpulse.core.rows import ALERTS, FAILURES, FROM_DEVICES, Kind
from fleetpulse.io.mqtt.address import BrokerAddress, write_secret

SERVICE_USER: Final = "fleet"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_NODE: Final = re.compile(f"{_NAME.pattern}/{_NAME.pattern}")
_KINDS: Final = sorted(kind.value for kind in FROM_DEVICES)
_NOTHING: Final = ["_nothing"]  # an empty list would allow everything
_HEARD: Final = ("fleet/#", f"{ALERTS}/#", f"{FAILURES}/#")  # watchers and operators may subscribe
_SENT: Final = ("fleet/#", f"{ALERTS}/#")  # operators may publish
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
        hashed: bcrypt hash of the password.
        devices: device ids the user publishes for: its own id, or the ids behind a gateway.
        nodes: Sparkplug edge nodes the user publishes as, each ``GROUP/NODE``.
    """

    name: str
    role: Role
    hashed: str
    devices: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


def grants(folder: Path) -> list[Grant]:
    """Return the access grants of all users except fleetpulse's own.

    Args:
        folder: folder of the broker.

    Raises:
        FleetError: the file of access grants cannot be read.
    """
    path = folder / "access.json"
    try:
        content = json.loads(path.read_text())
        return [
            Grant(one["name"], Role(one["role"]), one["hashed"], tuple(one["devices"]), tuple(one.get("nodes", ())))
            for one in content
        ]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f'"{path}" holds no valid access grants ({error}); restore it from a backup, or remove it', code="grants-damaged"
        ) from None


def grant(folder: Path, name: str, role: Role, devices: Sequence[str] = (), nodes: Sequence[str] = ()) -> str:
    """Grant a user access and return its new password; replace an existing grant.

    Args:
        folder: folder of the broker.
        name: user name of letters, digits and ``. _ : @ -``; for a device, its id.
        role: role of the user.
        devices: device ids a gateway publishes for. A device without ``devices`` and ``nodes``
            publishes for itself.
        nodes: Sparkplug edge nodes the user publishes as, each ``GROUP/NODE``.

    Raises:
        FleetError: a name is malformed, the user name is reserved for fleetpulse, or a role other
            than device is given devices or nodes.
    """
    if name == SERVICE_USER:
        raise FleetError(f'the user name "{SERVICE_USER}" is reserved for fleetpulse; choose another', code="user-reserved")
    for one in (name, *devices):
        if not _NAME.fullmatch(one):
            raise FleetError(
                f"a user name has 1 to 128 letters, digits and . _ : @ -, and starts with a letter or digit; got {one!a}",
                code="user-name-invalid",
            )
    for node in nodes:
        if not _NODE.fullmatch(node):
            raise FleetError(
                f"an edge node is GROUP/NODE, both of letters, digits and . _ : @ -; got {node!a}", code="edge-node-invalid"
            )
    if (devices or nodes) and role is not Role.DEVICE:
        bound = ", ".join([*devices, *nodes])
        raise FleetError(
            f"the role {role} takes no devices or edge nodes; got {bound}; omit them, or use the role device",
            code="role-without-devices",
        )
    import bcrypt

    password = secrets.token_urlsafe(24)
    hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(_ROUNDS, b"2a")).decode()
    own = tuple(devices) if devices or nodes or role is not Role.DEVICE else (name,)
    with access_lock(folder):
        _write(folder, [*(one for one in grants(folder) if one.name != name), Grant(name, role, hashed, own, tuple(nodes))])
    return password


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
    write_secret(folder / "access.json", json.dumps([asdict(one) for one in sorted(known, key=lambda one: one.name)], indent=1))


@contextmanager
def access_lock(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock on the access grants until the context exits.

    Wait until the lock is free. Changing the grants and passing them to the broker need the lock.

    Args:
        folder: folder of the broker.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".access.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def nats_rules(service: BrokerAddress, known: Iterable[Grant]) -> str:
    """Return the authorization part of a NATS configuration.

    Args:
        service: user and password of fleetpulse, which may publish and subscribe to everything.
        known: access grants of the other users.
    """
    users = [f"{{ user: {json.dumps(service.username)}, password: {json.dumps(service.password)} }}"]
    for one in known:
        may_send, may_hear = _subjects(one)
        allowed = f"publish: {{ allow: {json.dumps(may_send)} }}, subscribe: {{ allow: {json.dumps(may_hear)} }}"
        users.append(f"{{ user: {json.dumps(one.name)}, password: {json.dumps(one.hashed)}, permissions: {{ {allowed} }} }}")
    return "authorization { users: [\n  " + "\n  ".join(users) + "\n] }\n"


def _subjects(one: Grant) -> tuple[list[str], list[str]]:
    """Return the NATS subjects that a user may publish on and subscribe to."""
    may_send, may_hear = _topics(one)
    heard = [topic for each in may_hear for topic in (each.removesuffix("/#"), each)]  # "fleet/#" includes "fleet"
    return [_subject(topic) for topic in may_send] or _NOTHING, [_subject(topic) for topic in dict.fromkeys(heard)]


def _subject(topic: str) -> str:
    """Translate an MQTT topic filter to a NATS subject; NATS writes a dot as ``//``."""
    return topic.replace("/", "\0").replace(".", "//").replace("\0", ".").replace("+", "*").replace("#", ">")


def _topics(one: Grant) -> tuple[list[str], list[str]]:
    """Return the MQTT topic filters that a user may publish on and subscribe to."""
    if one.role is not Role.DEVICE:
        return [*_SENT] if one.role is Role.OPERATOR else [], [*_HEARD]
    may_send = [f"fleet/+/{own}/{kind}" for own in one.devices for kind in _KINDS]
    may_hear = [f"fleet/+/{own}/{Kind.CONTROL.value}" for own in one.devices]
    for group, node in (each.split("/") for each in one.nodes):
        may_send += [filtered.replace("+", group, 1).replace("+", node, 1) for filtered in FILTERS]
        may_hear += [f"{PREFIX}{group}/{command}/{node}{more}" for command in COMMANDS for more in ("", "/#")]
    return may_send, [*may_hear, *([f"{STATE}+"] if one.nodes else [])]


def mosquitto_rules(known: Iterable[Grant]) -> str:
    """Return the same rules as a Mosquitto ``acl_file``.

    The rules of devices are patterns on the user name.
    """
    lines = ["# devices: the user name is the device id"]
    lines += [f"pattern write fleet/+/%u/{kind}" for kind in _KINDS]
    lines += [f"pattern read fleet/+/%u/{Kind.CONTROL.value}", "", "# the bridge", f"user {SERVICE_USER}", "topic readwrite #"]
    for one in known:
        if one.role is Role.DEVICE and one.devices == (one.name,) and not one.nodes:
            continue
        lines += ["", f"user {one.name}"]
        if one.name not in one.devices:  # the patterns apply to every user, and this user is no device
            lines.append(f"topic deny fleet/+/{one.name}/#")
        may_send, may_hear = _topics(one)
        lines += [f"topic write {topic}" for topic in may_send] + [f"topic read {topic}" for topic in may_hear]
    return "\n".join(lines) + "\n"
