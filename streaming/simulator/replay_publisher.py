"""Plays history: every line in an envelope, in order, and the line after the last."""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from fleetpulse.core.messages.replay_envelope import TOPIC_PREFIX, Envelope, wrap
from fleetpulse.io.ingest.recording import Recorded

_PROGRESS_EVERY: Final = 200
_FLUSH_S: Final = 60.0


class Publishes(Protocol):
    """What `play` needs of a publisher."""

    def publish(self, topic: str, payload: bytes) -> object:
        """Publish one message with QoS 1."""
        ...

    def flush(self, timeout_s: float) -> object:
        """Wait until everything is acknowledged."""
        ...


def play(
    history: Iterable[Recorded],
    recording: str,
    publisher: Publishes,
    *,
    first_line: int = 0,
    on_progress: Callable[[int], object] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Publish history to ``replay/<recording>``.

    Args:
        history: its messages, in order of ``received_at``.
        recording: its id.
        publisher: an open publisher.
        first_line: the first line that is still needed; those before it are passed over.
        on_progress: called now and then with the number of lines published.
        stopped: asked between messages; True breaks off.

    Returns:
        How many lines history has; the line after the last has this number.
    """
    topic, line = TOPIC_PREFIX + recording, 0
    for recorded in history:
        if stopped():
            return line
        if line >= first_line:
            envelope = Envelope(recording, line, recorded.received_at_ms, recorded.topic, recorded.payload)
            publisher.publish(topic, wrap(envelope))
        line += 1
        if line % _PROGRESS_EVERY == 0:
            on_progress(line)
    publisher.publish(topic, wrap(Envelope(recording, line, None, None, b"", end=True)))
    publisher.flush(_FLUSH_S)
    on_progress(line)
    return line
