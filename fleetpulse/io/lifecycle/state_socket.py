"""Workaround for a socket leak of Spark's state server: one socket for each task.

The state server of Spark 4.2 (``TransformWithStateInPySparkStateServer``) does not close its socket
when the client reports the end or disconnects. It closes the socket only if its thread is
interrupted while waiting for a request, which happens at the end of the task. The client therefore
sends nothing more and keeps its socket open, so that the server waits.

Source: docs/adr/0027-sockets-of-the-state-server.md
"""

from typing import Any, Final

_LAST_CLIENT: Final[list[Any]] = []  # client of this worker's last task, kept until that task has ended


def leave_server_waiting(handle: Any) -> None:
    """Leave the state server of a task waiting for a request.

    Call this at the end of a task, after its last access to the state.

    Args:
        handle: Spark's handle of the state, a ``StatefulProcessorHandle``.
    """
    client = handle._statefulProcessorApiClient  # noqa: SLF001 - neither it nor its socket has a public name
    client.set_handle_state = _skip_message  # the only call left is the report of the end
    for former in _LAST_CLIENT:
        former.sockfile.close()
        former._client_socket.close()  # noqa: SLF001
    _LAST_CLIENT[:] = [client]


def _skip_message(state: object) -> None:
    """Send nothing, so that the server keeps waiting."""
