"""Connections that one user takes from others: which of them are closed."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from fleetpulse.io.mqtt.acl import SERVICE_USER, Grant, Role, grant
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.embedded.broker_api import BrokerApi
from fleetpulse.io.mqtt.embedded.connection_cleanup import (
    OF_DEVICE,
    OF_OTHERS,
    UNREAD_BYTES,
    ConnectionCleaner,
    excess,
    limits_of_users,
    unread,
)

pytestmark = pytest.mark.unit


def test_a_user_keeps_a_quarter_of_all_connections_while_half_are_taken() -> None:
    several = [(number, "a") for number in range(9, 3, -1)]
    own = [(number, SERVICE_USER) for number in range(20, 24)]
    assert excess([*several, *own], 20) == []
    assert excess([*several, *own, (30, "b")], 20) == [9]
    assert excess([(number, SERVICE_USER) for number in range(20)], 20) == [], "fleetpulse's own are never closed"
    assert excess([(number, "") for number in range(20)], 20) == [], "the server closes those without a login"


def test_devices_watchers_and_operators_keep_their_newest_connections() -> None:
    limits = limits_of_users(
        [
            Grant("pump-1", Role.DEVICE, "", ("pump-1",)),
            Grant("gate", Role.DEVICE, "", ("gate", "b"), certificate="CN=gate"),
            Grant("hub", Role.DEVICE, "", ("hub",), topics=("hub/#",)),
            Grant("ann", Role.OPERATOR, ""),
            Grant("bob", Role.WATCHER, ""),
        ]
    )
    assert limits == {"pump-1": OF_DEVICE, "CN=gate": 2 * OF_DEVICE, "ann": OF_OTHERS, "bob": OF_OTHERS}
    opened = [(number, user) for number in range(3 * OF_DEVICE) for user in ("pump-1", "CN=gate", "hub")]
    closed = excess([(4 * number + place, user) for place, (number, user) in enumerate(opened)], 10_000, limits)
    assert len(closed) == 3 * OF_DEVICE and closed == sorted(closed)
    assert excess([(number, "bob") for number in range(OF_OTHERS + 2)], 10_000, limits) == [0, 1]
    assert excess([(number, "pump-1") for number in range(OF_DEVICE + 2)], 10_000, limits) == [0, 1]
    assert excess([(number, "pump-1") for number in range(OF_DEVICE + 2)], 12, limits) == [0, 1, 5, 6, 7, 8, 9]


def test_connections_with_the_most_unread_bytes_are_closed_beyond_the_limit_of_their_user() -> None:
    waiting = [(1, "a", 40), (2, "a", 0), (3, "a", 50), (4, "a", 60), (5, "b", 100), (6, "b", 0)]
    assert unread(waiting, 100) == [4]
    assert unread(waiting, 99) == [4, 5]
    assert unread(waiting, 89) == [3, 4, 5]
    assert unread([(1, SERVICE_USER, 101), (2, "", 101)], 100) == []


def test_the_limits_of_number_and_of_unread_bytes_are_applied_to_the_listed_connections(tmp_path: Path) -> None:
    grant(tmp_path, "ann", Role.WATCHER)
    closed = list[int]()

    class Api:
        def __call__(self, subject: str, content: Mapping[str, int]) -> dict[str, Any]:
            if subject == "$SYS.REQ.SERVER.S.KICK":
                closed.append(content["cid"])
            return {"server": {"id": "S"}}

        def connections(self, _: str) -> Iterator[dict[str, Any]]:
            for number in range(OF_OTHERS + 1):
                yield {"cid": number, "authorized_user": "ann", "pending_bytes": UNREAD_BYTES // 8 + (number == 5)}

    cleaner = ConnectionCleaner(tmp_path, 1, BrokerAddress("127.0.0.1", 1), 10_000)
    assert cleaner._close_excess(cast("BrokerApi", Api())) == 2
    assert closed == [0, 5], "the oldest, and of the others the one with the most bytes"
