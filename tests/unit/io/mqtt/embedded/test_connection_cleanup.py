"""Connections that one user takes from others: which of them are closed."""

import pytest

from fleetpulse.io.mqtt.acl import SERVICE_USER, Grant, Role
from fleetpulse.io.mqtt.embedded.connection_cleanup import OF_DEVICE, excess, limits_of_users

pytestmark = pytest.mark.unit


def test_a_user_keeps_a_quarter_of_all_connections_while_half_are_taken() -> None:
    several = [(number, "a") for number in range(9, 3, -1)]
    own = [(number, SERVICE_USER) for number in range(20, 24)]
    assert excess([*several, *own], 20) == []
    assert excess([*several, *own, (30, "b")], 20) == [9]
    assert excess([(number, SERVICE_USER) for number in range(20)], 20) == [], "fleetpulse's own are never closed"
    assert excess([(number, "") for number in range(20)], 20) == [], "the server closes those without a login"


def test_a_device_keeps_its_newest_connections() -> None:
    limits = limits_of_users(
        [
            Grant("pump-1", Role.DEVICE, "", ("pump-1",)),
            Grant("gate", Role.DEVICE, "", ("gate", "b"), certificate="CN=gate"),
            Grant("hub", Role.DEVICE, "", ("hub",), topics=("hub/#",)),
            Grant("ann", Role.OPERATOR, ""),
        ]
    )
    assert limits == {"pump-1": OF_DEVICE, "CN=gate": 2 * OF_DEVICE}
    opened = [(number, user) for number in range(3 * OF_DEVICE) for user in ("pump-1", "CN=gate", "hub", "ann")]
    closed = excess([(4 * number + place, user) for place, (number, user) in enumerate(opened)], 10_000, limits)
    assert len(closed) == 3 * OF_DEVICE and closed == sorted(closed)
    assert excess([(number, "pump-1") for number in range(OF_DEVICE + 2)], 10_000, limits) == [0, 1]
    assert excess([(number, "pump-1") for number in range(OF_DEVICE + 2)], 12, limits) == [0, 1, 5, 6, 7, 8, 9]
