"""A task's line to Spark's state, which Spark would leave open at its end: a socket for each task, as long as the job runs.

The server of Spark 4.2 (``TransformWithStateInPySparkStateServer``) closes nothing when it is told that all is done, nor when
the other end is gone. What closes its end is that its thread is interrupted while it waits for a request, as happens when the
task ends. So it is left to wait.
"""

from typing import Any, Final

_KEPT: Final[list[Any]] = []  # of this worker's last task: were it let go before the task has ended, the server would not wait


def leave_waiting(handle: Any) -> None:
    """Say nothing more on the line of a task; to be called at its end, when nothing more is asked of the state.

    Args:
        handle: Spark's door to the state, a ``StatefulProcessorHandle``.
    """
    client = handle._statefulProcessorApiClient  # noqa: SLF001 - neither it nor its socket has a public name
    client.set_handle_state = _unsaid  # what follows, and nothing else does, is that all is done
    for former in _KEPT:
        former.sockfile.close()
        former._client_socket.close()  # noqa: SLF001
    _KEPT[:] = [client]


def _unsaid(state: object) -> None:
    """Let the server wait on."""
