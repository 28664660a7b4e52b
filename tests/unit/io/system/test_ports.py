"""Free ports: they lie outside the ephemeral range, so no other process gets them meanwhile."""

import socket

import pytest

from fleetpulse.io.system import ports
from fleetpulse.io.system.ports import free_port

pytestmark = pytest.mark.unit
HOST = "127.0.0.1"


def test_free_port_lies_outside_the_ephemeral_range() -> None:
    with socket.socket() as ephemeral:
        ephemeral.bind((HOST, 0))
        assert ephemeral.getsockname()[1] >= 30_000, "default of Linux and macOS"
    assert all(free_port(HOST, 0, OSError) in range(20_000, 30_000) for _ in range(20))


def test_port_in_use_is_skipped_and_is_refused_if_it_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
        assert free_port(HOST, 0, OSError) not in (0, port)
        with pytest.raises(OSError, match="in use"):
            free_port(HOST, port, OSError)
