"""TCP connections to a broker: socket options, reconnect backoff, TLS buffering."""

import errno
import socket
import ssl
import time
from typing import Any, Final

CONNECT_S: Final = 3.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
KEEPALIVE_S: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a dead connection is detected after 25 s


_ON_THE_WAY: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN})


def cause(error: OSError) -> str:
    """Classify a connection error: ``network``, or ``broker`` if it refused or closed."""
    on_the_way = isinstance(error, TimeoutError | socket.gaierror) or error.errno in _ON_THE_WAY
    return "network" if on_the_way else "broker"


class Backoff:
    """Reconnect backoff: at once, then pauses doubling up to `LONGEST_PAUSE_S`.

    A successful connection resets the pause.
    """

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        self._not_before_s = 0.0

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the pause, at most ``timeout_s``; return whether it is over."""
        rest_s = self._not_before_s - time.monotonic()
        if rest_s > 0:
            time.sleep(min(rest_s, timeout_s))
        return rest_s <= timeout_s

    def tried(self) -> None:
        """Record an attempt, successful or not, and start the next pause."""
        self._not_before_s = time.monotonic() + self._pause_s
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)

    def hold(self, pause_s: float) -> None:
        """Start a pause of this length, regardless of earlier attempts."""
        self._not_before_s = time.monotonic() + pause_s

    def reset(self) -> None:
        """Record a successful connection and reset the pause."""
        self._pause_s = FIRST_PAUSE_S


def has_buffered_bytes(sock: Any) -> bool:
    """Return whether a TLS socket buffers bytes, which `select` does not report."""
    return isinstance(sock, ssl.SSLSocket) and sock.pending() > 0


def tune(sock: Any) -> None:
    """Set the TCP options of a connection to a broker."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # acknowledgements are small and must not wait
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_S.items():
        if hasattr(socket, name):  # other systems name them differently and keep the default of two hours
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
