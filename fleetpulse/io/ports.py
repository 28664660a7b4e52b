"""Ports to listen on."""

import socket
from collections.abc import Callable


def free_port(host: str, wanted: int, refused: Callable[[str], Exception]) -> int:
    """Return a port that can be listened on now: the one that is wanted, or any where that is 0.

    Args:
        host: the address to listen at.
        wanted: the port; 0 for any.
        refused: makes the error of the system's reason, where it cannot be had.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except OSError as error:
            raise refused(str(error.strerror)) from None
        return int(probe.getsockname()[1])
