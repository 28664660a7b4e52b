"""Connections that one user takes from others: which of them are closed."""

import pytest

from fleetpulse.io.mqtt.acl import SERVICE_USER
from fleetpulse.io.mqtt.embedded.connection_cleanup import excess

pytestmark = pytest.mark.unit


def test_a_user_keeps_a_quarter_of_all_connections_while_half_are_taken() -> None:
    several = [(number, "a") for number in range(9, 3, -1)]
    own = [(number, SERVICE_USER) for number in range(20, 24)]
    assert excess([*several, *own], 20) == []
    assert excess([*several, *own, (30, "b")], 20) == [9]
    assert excess([(number, SERVICE_USER) for number in range(20)], 20) == [], "fleetpulse's own are never closed"
    assert excess([(number, "") for number in range(20)], 20) == [], "the server closes those without a login"
