"""Connections to a broker: reconnect backoff, and the cause of a failed connection."""

import errno
import socket

import pytest

from fleetpulse.io.mqtt import sockets
from fleetpulse.io.mqtt.sockets import FIRST_PAUSE_S, LONGEST_PAUSE_S, Backoff, cause

pytestmark = pytest.mark.unit


class Clock:
    """A monotonic clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(sockets, "time", made)
    return made


def test_backoff_starts_at_once_and_doubles_up_to_a_limit(clock: Clock) -> None:
    backoff = Backoff()
    for _ in range(7):
        assert backoff.wait(60)
        backoff.tried()
    assert clock.slept == [FIRST_PAUSE_S, 0.2, 0.4, 0.8, 1.6, LONGEST_PAUSE_S]


def test_backoff_waits_no_longer_than_its_caller(clock: Clock) -> None:
    backoff = Backoff()
    for _ in range(6):
        backoff.wait(60)
        backoff.tried()
    assert not backoff.wait(0.5)
    assert clock.slept[-1] == 0.5
    assert backoff.wait(60), "the rest of the pause"


def test_a_successful_connection_resets_backoff(clock: Clock) -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.wait(60)
        backoff.tried()
    backoff.wait(60)
    backoff.reset()
    backoff.tried()
    assert backoff.wait(60) and clock.slept[-1] == FIRST_PAUSE_S


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (TimeoutError(), "network"),
        (socket.gaierror(), "network"),
        (OSError(errno.EHOSTUNREACH, "no route"), "network"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "broker"),
    ],
)
def test_the_cause_of_a_failed_connection_is_network_or_broker(error: OSError, name: str) -> None:
    assert cause(error) == name
