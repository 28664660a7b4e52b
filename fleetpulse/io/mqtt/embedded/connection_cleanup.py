"""Closing of a user's excess connections, so that other users can connect.

NATS limits the connections of all users together, and has no limit for one user. So one credential could
lock out the fleet. Each connection also takes memory for its client id, its will and its topic filters, which
NATS does not limit. Measured with the longest ones: 0.7 MB with a will, and 8 MB with filters.

Rule 1: a device keeps its newest `OF_DEVICE` connections, and a user of several devices as many for each
device. Users of topics have no such limit, because the number of their devices is unknown. A watcher or an
operator keeps its newest `OF_OTHERS` connections.
Rule 2: while more than half of the server's connections are in use, a user keeps only its oldest ones, up to
a quarter of the server's limit.
Rule 3: at most `UNREAD_BYTES` wait for all connections of a user together. Beyond that, those with the most
bytes are closed. The server's own limit holds for each connection alone.
Rule 4: connections of fleetpulse itself are never closed.

If no connection is free, the server also refuses fleetpulse, so `ConnectionCleaner` keeps its connection
open. Only users of NATS's system account can close connections (`SYSTEM_USER`).
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.mqtt.acl import GRANTS, SERVICE_USER, SYSTEM_USER, Grant, Role, grants, quoted
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded.broker_api import INBOX, BrokerApi, broker_api

PERIOD_S: Final = 5.0
OF_DEVICE: Final = 8  # connections of a device: lost ones remain until the server notices the loss
OF_OTHERS: Final = 8  # connections of a watcher or an operator
UNREAD_BYTES: Final = 256 * 1_024**2  # bytes that the server keeps in memory for a user until its clients read them
_LIST: Final = "$SYS.REQ.SERVER.PING.CONNZ"
_CLOSE: Final = "$SYS.REQ.SERVER.{}.KICK"
_NO_USER: Final = ""  # user of a connection that has not logged in
_NEVER_CLOSED: Final = (SERVICE_USER, SYSTEM_USER, _NO_USER)


def system_user(password: str | None) -> str:
    """Return the lines of nats.conf for the user that may list and close connections, at the local port only."""
    permitted = f"publish: {{ allow: {quoted([_LIST, _CLOSE.format('*')])} }}, subscribe: {{ allow: {quoted([INBOX + '.>'])} }}"
    user = f'user: {quoted(SYSTEM_USER)}, password: {quoted(password)}, allowed_connection_types: ["STANDARD"]'
    return f'accounts {{ "$SYS": {{ users: [ {{ {user}, permissions: {{ {permitted} }} }} ] }} }}\n'


def limits_of_users(known: Iterable[Grant]) -> dict[str, int]:
    """Return the maximum number of connections by login, except for users of topics."""
    return {
        one.login: OF_DEVICE * (len(one.devices) + len(one.nodes)) if one.role is Role.DEVICE else OF_OTHERS
        for one in known
        if not one.topics
    }


def excess(connections: Iterable[tuple[int, str]], limit: int, limits: Mapping[str, int] = MappingProxyType({})) -> list[int]:
    """Return the numbers of the connections to close, oldest first.

    Args:
        connections: number and user of each connection; a newer one has a greater number.
        limit: maximum number of connections of the server.
        limits: maximum number of connections by user, see `limits_of_users`.
    """
    known, held, found = sorted(connections), defaultdict[str, list[int]](list), list[int]()
    for number, user in known:
        held[user].append(number)
    for user, numbers in held.items():
        if user in _NEVER_CLOSED:
            continue
        beyond = max(0, len(numbers) - limits.get(user, len(numbers)))
        found += numbers[:beyond]
        if 2 * len(known) > limit:
            found += numbers[beyond:][limit // 4 :]
    return sorted(found)


def unread(connections: Iterable[tuple[int, str, int]], most_bytes: int) -> list[int]:
    """Return the numbers of the connections to close because their clients do not read.

    Args:
        connections: number and user of each connection, and the bytes that wait for it.
        most_bytes: maximum number of bytes that wait for all connections of a user.
    """
    totals, found = Counter[str](), list[int]()
    for number, user, waiting_bytes in sorted(connections, key=lambda one: one[2]):
        totals[user] += waiting_bytes
        if totals[user] > most_bytes and user not in _NEVER_CLOSED:
            found.append(number)
    return sorted(found)


class ConnectionCleaner:
    """Thread that closes connections of users with too many of them, or with too many unread bytes.

    Args:
        folder: folder of the broker.
        pid: process id of the server.
        address: address with the broker's own user and password.
        limit: maximum number of connections of the server.
    """

    def __init__(self, folder: Path, pid: int, address: BrokerAddress, limit: int) -> None:
        self._folder, self._pid, self._limit = folder, pid, limit
        self._limits: tuple[int, dict[str, int]] = 0, {}  # modification time of the grants, and limits by login
        self._address = replace(address, username=SYSTEM_USER)
        self._connected, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait up to `PERIOD_S` seconds until it is connected."""
        self._thread.start()
        self._connected.wait(PERIOD_S)

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join(PERIOD_S)

    def _run(self) -> None:
        while not self._stopped.is_set():
            with suppress(OSError, ValueError, KeyError), broker_api(self._folder, self._pid, self._address) as api:
                api(_LIST, {"limit": 1})
                self._connected.set()
                pause_s = PERIOD_S
                while not self._stopped.wait(pause_s):
                    pause_s = PERIOD_S / 10 if self._close_excess(api) else PERIOD_S  # closed clients connect again
            self._stopped.wait(PERIOD_S)

    def _close_excess(self, api: BrokerApi) -> int:
        server = api(_LIST, {"limit": 1})["server"]["id"]
        known = [
            (int(one["cid"]), str(one.get("authorized_user", _NO_USER)), int(one["pending_bytes"]))
            for one in api.connections(_LIST)
        ]
        beyond = excess([one[:2] for one in known], self._limit, self._limits_of_users())
        closed = [*beyond, *unread((one for one in known if one[0] not in beyond), UNREAD_BYTES)]
        for number in closed:
            api(_CLOSE.format(server), {"cid": number})
        return len(closed)

    def _limits_of_users(self) -> dict[str, int]:
        try:
            changed_ns = (self._folder / GRANTS).stat().st_mtime_ns
            if changed_ns != self._limits[0]:
                self._limits = changed_ns, limits_of_users(grants(self._folder))
        except (OSError, FleetError):  # without grants, only fleetpulse itself can connect
            pass
        return self._limits[1]
