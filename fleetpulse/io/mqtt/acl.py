"""Who may speak to the embedded broker, and about what.

Rule 1: a device speaks for itself: its user name is its id, and it publishes under that alone, at any site. An edge node
of Sparkplug speaks under its group and node, for whatever devices it has.
Rule 2: of a password the broker keeps a hash; it is shown once, when it is made.
Rule 3: what is not granted is refused: control topics are for operators, and our own kinds for us.
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

OURS: Final = "fleet"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_NODE: Final = re.compile(f"{_NAME.pattern}/{_NAME.pattern}")
_KINDS: Final = sorted(kind.value for kind in FROM_DEVICES)
_NOTHING: Final = ["_nothing"]  # an empty list would allow everything
_HEARD: Final = ("fleet/#", f"{ALERTS}/#", f"{FAILURES}/#")  # by watchers and operators
_SENT: Final = ("fleet/#", f"{ALERTS}/#")  # by operators
_ROUNDS: Final = 5  # the passwords are random: a hash that takes long would slow down whoever comes in, and nobody else


class Role(StrEnum):
    """What someone may do: send as a device, see everything, or see and send everything."""

    DEVICE = "device"
    WATCHER = "watcher"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Grant:
    """One who may come in.

    Attributes:
        name: the user name.
        role: what it may do.
        hashed: its password's bcrypt hash.
        devices: ids that a device speaks for: its own, or those behind a gateway.
        nodes: edge nodes of Sparkplug that it speaks as, each ``GROUP/NODE``.
    """

    name: str
    role: Role
    hashed: str
    devices: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


def grants(folder: Path) -> list[Grant]:
    """Return who may come in besides ourselves.

    Args:
        folder: the broker's.

    Raises:
        FleetError: the file that says so cannot be read.
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
            f'"{path}" does not say who may come in ({error}); restore it from a backup, or remove it', code="grants-damaged"
        ) from None


def grant(folder: Path, name: str, role: Role, devices: Sequence[str] = (), nodes: Sequence[str] = ()) -> str:
    """Let someone in, and return the password; a name that is there already gets a new one.

    Args:
        folder: the broker's.
        name: letters, digits and ``. _ : @ -``; a device's is its id.
        role: what it may do.
        devices: ids that a gateway speaks for; without any, and without nodes, a device speaks for itself.
        nodes: edge nodes of Sparkplug that it speaks as, each ``GROUP/NODE``.

    Raises:
        FleetError: a name is not such a name, or is ours.
    """
    if name == OURS:
        raise FleetError(f'"{OURS}" is our own user; name another', code="user-reserved")
    for one in (name, *devices):
        if not _NAME.fullmatch(one):
            raise FleetError(
                f"who may come in is named by 1 to 128 letters, digits and . _ : @ -, the first a letter or digit; got {one!a}",
                code="user-name-invalid",
            )
    for node in nodes:
        if not _NODE.fullmatch(node):
            raise FleetError(
                f"an edge node is named GROUP/NODE, both of letters, digits and . _ : @ -; got {node!a}", code="edge-node-invalid"
            )
    if (devices or nodes) and role is not Role.DEVICE:
        bound = ", ".join([*devices, *nodes])
        raise FleetError(
            f"the role {role} is not bound to devices; got {bound}; leave them out, or take the role device",
            code="role-without-devices",
        )
    import bcrypt

    password = secrets.token_urlsafe(24)
    hashed = bcrypt.hashpw(password.encode(), bcrypt.gensalt(_ROUNDS, b"2a")).decode()
    own = tuple(devices) if devices or nodes or role is not Role.DEVICE else (name,)
    with alone(folder):
        _write(folder, [*(one for one in grants(folder) if one.name != name), Grant(name, role, hashed, own, tuple(nodes))])
    return password


def revoke(folder: Path, name: str) -> None:
    """Let someone in no longer.

    Raises:
        FleetError: nobody of that name may come in.
    """
    with alone(folder):
        known = grants(folder)
        kept = [one for one in known if one.name != name]
        if len(kept) == len(known):
            raise FleetError(f'nobody named "{name}" may come in; see: ./fleet access list', code="user-unknown")
        _write(folder, kept)


def _write(folder: Path, known: Iterable[Grant]) -> None:
    write_secret(folder / "access.json", json.dumps([asdict(one) for one in sorted(known, key=lambda one: one.name)], indent=1))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Change who may come in, or tell the broker of it, while nobody else does; whoever comes second waits.

    Args:
        folder: the broker's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".access.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def nats_rules(ours: BrokerAddress, known: Iterable[Grant]) -> str:
    """Return the part of a NATS configuration that says who may come in.

    Args:
        ours: our own user and password, who may do everything.
        known: the others.
    """
    users = [f"{{ user: {json.dumps(ours.username)}, password: {json.dumps(ours.password)} }}"]
    for one in known:
        may_send, may_hear = _subjects(one)
        allowed = f"publish: {{ allow: {json.dumps(may_send)} }}, subscribe: {{ allow: {json.dumps(may_hear)} }}"
        users.append(f"{{ user: {json.dumps(one.name)}, password: {json.dumps(one.hashed)}, permissions: {{ {allowed} }} }}")
    return "authorization { users: [\n  " + "\n  ".join(users) + "\n] }\n"


def _subjects(one: Grant) -> tuple[list[str], list[str]]:
    """Return the subjects of NATS that someone may publish on, and hear."""
    may_send, may_hear = _topics(one)
    heard = [topic for each in may_hear for topic in (each.removesuffix("/#"), each)]  # "fleet/#" is both
    return [_subject(topic) for topic in may_send] or _NOTHING, [_subject(topic) for topic in dict.fromkeys(heard)]


def _subject(topic: str) -> str:
    """Return a topic filter of MQTT as NATS has it: there a dot is written ``//``."""
    return topic.replace("/", "\0").replace(".", "//").replace("\0", ".").replace("+", "*").replace("#", ">")


def _topics(one: Grant) -> tuple[list[str], list[str]]:
    """Return the topics that someone may publish on, and hear."""
    if one.role is not Role.DEVICE:
        return [*_SENT] if one.role is Role.OPERATOR else [], [*_HEARD]
    may_send = [f"fleet/+/{own}/{kind}" for own in one.devices for kind in _KINDS]
    may_hear = [f"fleet/+/{own}/{Kind.CONTROL.value}" for own in one.devices]
    for group, node in (each.split("/") for each in one.nodes):
        may_send += [filtered.replace("+", group, 1).replace("+", node, 1) for filtered in FILTERS]
        may_hear += [f"{PREFIX}{group}/{word}/{node}{more}" for word in COMMANDS for more in ("", "/#")]
    return may_send, [*may_hear, *([f"{STATE}+"] if one.nodes else [])]


def mosquitto_rules(known: Iterable[Grant]) -> str:
    """Return the same rules as an ``acl_file`` of Mosquitto; a device's are a pattern on its user name."""
    lines = ["# a device speaks for itself: its user name is its id"]
    lines += [f"pattern write fleet/+/%u/{kind}" for kind in _KINDS]
    lines += [f"pattern read fleet/+/%u/{Kind.CONTROL.value}", "", "# the bridge", f"user {OURS}", "topic readwrite #"]
    for one in known:
        if one.role is Role.DEVICE and one.devices == (one.name,) and not one.nodes:
            continue
        lines += ["", f"user {one.name}"]
        if one.name not in one.devices:  # a pattern holds for every user: this one is no device of its own name
            lines.append(f"topic deny fleet/+/{one.name}/#")
        may_send, may_hear = _topics(one)
        lines += [f"topic write {topic}" for topic in may_send] + [f"topic read {topic}" for topic in may_hear]
    return "\n".join(lines) + "\n"
