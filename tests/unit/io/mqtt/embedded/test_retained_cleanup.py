"""Retained messages that crowd the broker's store: whose are removed."""

import pytest

from fleetpulse.io.mqtt.acl import SERVICE_USER
from fleetpulse.io.mqtt.embedded.retained_cleanup import Retained, heaviest_user

pytestmark = pytest.mark.unit


def _stored(*users: tuple[str, int]) -> list[Retained]:
    return [Retained(number, f"s.{number}", user, size) for number, (user, size) in enumerate(users)]


def test_the_user_with_most_bytes_gives_way_but_never_fleetpulse_itself() -> None:
    assert heaviest_user(_stored(("a", 10), ("b", 9), (SERVICE_USER, 99), ("b", 9))) == "b"
    assert heaviest_user(_stored((SERVICE_USER, 99))) is None
    assert heaviest_user([]) is None
