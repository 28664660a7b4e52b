"""A TCP line to a broker: how it is tuned, when it is tried again, and what a secured one hides from `select`."""

import errno
import socket
import ssl
import time
from typing import Any, Final

CONNECT_S: Final = 3.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
KEEPALIVE_S: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a dead line is known after 25 s


_ON_THE_WAY: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN})


def cause(error: OSError) -> str:
    """Return what a failure lies with: the ``network``, or the ``broker``, which refuses or closed the line."""
    on_the_way = isinstance(error, TimeoutError | socket.gaierror) or error.errno in _ON_THE_WAY
    return "network" if on_the_way else "broker"


class Backoff:
    """When a line is tried again: at once, then after pauses that grow up to `LONGEST_PAUSE_S`, until one has held."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        self._not_before_s = 0.0

    def over(self, timeout_s: float) -> bool:
        """Wait for the end of a pause, at most ``timeout_s``; return whether it is over."""
        rest_s = self._not_before_s - time.monotonic()
        if rest_s > 0:
            time.sleep(min(rest_s, timeout_s))
        return rest_s <= timeout_s

    def tried(self) -> None:
        """A try was made, with whatever success: the next one is after a pause."""
        self._not_before_s = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)

    def held(self) -> None:
        """The line holds: the next pause is short again."""
        self._pause_s = FIRST_PAUSE_S


def holds_some(sock: Any) -> bool:
    """Whether a secured line has bytes that were read from it, and not yet by us: no `select` tells of them."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


def tune(sock: Any) -> None:
    """Set what a connection to a broker needs of TCP."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # acknowledgements are small and must not wait
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_S.items():
        if hasattr(socket, name):  # they are named otherwise elsewhere, and the system's own two hours hold
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
