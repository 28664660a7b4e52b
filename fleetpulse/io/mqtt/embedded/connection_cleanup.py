"""Closing of connections of a user that takes those of others.

NATS limits the connections of all users together, and has no limit for one user. So one credential could
lock out the fleet.

Rule: while more than half of all connections are taken, a user keeps its oldest ones, up to a quarter of
all. Connections of fleetpulse itself are never closed.

A server without a free connection refuses fleetpulse, too, so this connection stays open. Only users of
NATS's system account can close connections (`SYSTEM_USER`).
"""

import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from fleetpulse.io.mqtt.acl import SERVICE_USER, SYSTEM_USER, quoted
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded.broker_api import INBOX, BrokerApi, broker_api

PERIOD_S: Final = 5.0
_LIST: Final = "$SYS.REQ.SERVER.PING.CONNZ"
_CLOSE: Final = "$SYS.REQ.SERVER.{}.KICK"
_NO_USER: Final = ""  # of a connection that has not logged in


def system_user(password: str | None) -> str:
    """Return the lines of nats.conf for the user that may list and close connections, at the local port only."""
    permitted = f"publish: {{ allow: {quoted([_LIST, _CLOSE.format('*')])} }}, subscribe: {{ allow: {quoted([INBOX + '.>'])} }}"
    user = f'user: {quoted(SYSTEM_USER)}, password: {quoted(password)}, allowed_connection_types: ["STANDARD"]'
    return f'accounts {{ "$SYS": {{ users: [ {{ {user}, permissions: {{ {permitted} }} }} ] }} }}\n'


def excess(connections: Iterable[tuple[int, str]], limit: int) -> list[int]:
    """Return the numbers of the connections to close, oldest first.

    Args:
        connections: number and user of each connection; a newer one has a greater number.
        limit: maximum number of connections of the server.
    """
    known, held, found = sorted(connections), Counter[str](), list[int]()
    if 2 * len(known) <= limit:
        return []
    for number, user in known:
        held[user] += 1
        if held[user] > limit // 4 and user not in (SERVICE_USER, SYSTEM_USER, _NO_USER):
            found.append(number)
    return found


class ConnectionCleaner:
    """Thread that closes connections of users with too many of them.

    Args:
        folder: folder of the broker.
        pid: process id of the server.
        address: address with the broker's own user and password.
        limit: maximum number of connections of the server.
    """

    def __init__(self, folder: Path, pid: int, address: BrokerAddress, limit: int) -> None:
        self._folder, self._pid, self._limit = folder, pid, limit
        self._address = replace(address, username=SYSTEM_USER)
        self._connected, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="connections", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until it has its connection."""
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
        first = api(_LIST, {"limit": 1})
        if 2 * int(first["data"]["total"]) <= self._limit:
            return 0
        known = [(int(one["cid"]), str(one.get("authorized_user", _NO_USER))) for one in api.connections(_LIST)]
        closed = excess(known, self._limit)
        for number in closed:
            api(_CLOSE.format(first["server"]["id"]), {"cid": number})
        return len(closed)
