"""Ports to listen on."""

import secrets
import socket
from collections.abc import Callable
from typing import Final

_OURS: Final = range(20_000, 30_000)  # Linux and macOS give none of these to whoever asks for any, or connects to somebody
_TRIES: Final = 50


def free_port(host: str, wanted: int, refused: Callable[[str], Exception]) -> int:
    """Return a port that can be listened on now: the one that is wanted, or any where that is 0.

    Who listens on it may do so half a minute later: one that the system gives out could be somebody else's by then.

    Args:
        host: the address to listen at.
        wanted: the port; 0 for any.
        refused: makes the error of the system's reason, where it cannot be had.
    """
    if not wanted:
        for _ in range(_TRIES):
            try:
                return _bound(host, secrets.choice(_OURS))
            except OSError:
                continue
    try:
        return _bound(host, wanted)
    except OSError as error:
        raise refused(str(error.strerror)) from None


def _bound(host: str, port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])
