"""A port that somebody listens on later is none that the system gives to others meanwhile."""

import socket

import pytest

from fleetpulse.io.system import ports
from fleetpulse.io.system.ports import free_port

pytestmark = pytest.mark.unit
HOST = "127.0.0.1"


def test_any_port_is_none_that_the_system_would_give_out() -> None:
    with socket.socket() as given:
        given.bind((HOST, 0))
        assert given.getsockname()[1] >= 30_000, "as Linux and macOS come"
    assert all(free_port(HOST, 0, OSError) in range(20_000, 30_000) for _ in range(20))


def test_a_port_that_is_taken_is_passed_over_and_refused_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_OURS", range(port, port + 1))
        assert free_port(HOST, 0, OSError) not in (0, port)
        with pytest.raises(OSError, match="in use"):
            free_port(HOST, port, OSError)
