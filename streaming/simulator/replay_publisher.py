"""Publish a recording: each line in an envelope, in order, then an end line."""

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from fleetpulse.core.messages.replay_envelope import TOPIC_PREFIX, Envelope, wrap
from fleetpulse.io.ingest.recording import RecordedMessage

_PROGRESS_EVERY: Final = 200
_FLUSH_S: Final = 60.0


class Publishes(Protocol):
    """Publisher interface that `play` uses."""

    def publish(self, topic: str, payload: bytes) -> object:
        """Publish one message with QoS 1."""
        ...

    def flush(self, timeout_s: float) -> object:
        """Wait until the broker has acknowledged all messages."""
        ...


def play(
    history: Iterable[RecordedMessage],
    recording: str,
    publisher: Publishes,
    *,
    first_line: int = 0,
    on_progress: Callable[[int], object] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Publish history to ``replay/<recording>``.

    Args:
        history: messages of the recording, in order of ``received_at``.
        recording: id of the recording.
        publisher: open publisher.
        first_line: first line to publish; earlier lines are skipped.
        on_progress: callback with the number of lines processed, at intervals.
        stopped: callback before each message; True stops.

    Returns:
        Number of lines in the history, which is also the number of the end line. After a stop, the
        number of lines processed.
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
