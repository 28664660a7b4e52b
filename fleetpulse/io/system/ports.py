"""Free TCP ports to listen on."""

import secrets
import socket
from collections.abc import Callable
from typing import Final

_PORTS: Final = range(20_000, 30_000)  # outside the ephemeral ports of Linux and macOS
_TRIES: Final = 50


def free_port(host: str, port: int, refused: Callable[[str], Exception]) -> int:
    """Return a port that is free to listen on: ``port``, or any if ``port`` is 0.

    The caller may listen half a minute later. Another process could have an ephemeral port by then,
    so the port is chosen outside the ephemeral range.

    Args:
        host: address to listen on.
        port: port number; 0 for any.
        refused: function that makes the error from the system's reason if the port is not free.
    """
    if not port:
        for _ in range(_TRIES):
            try:
                return _bound(host, secrets.choice(_PORTS))
            except OSError:
                continue
    try:
        return _bound(host, port)
    except OSError as error:
        raise refused(str(error.strerror)) from None


def _bound(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
