"""Options of the streams beside the lifecycle."""

from dataclasses import dataclass
from typing import Any

from fleetpulse.core.streams.names import StreamName


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of the streams of a home, from its settings.

    Attributes:
        names: streams to run.
        every_ms: interval of the batches of each stream, milliseconds; 0 processes what is available and ends.
        silence_ms: covered time without a message after which a session ends, milliseconds.
        answer_ms: time after which a command without an answer has timed out, milliseconds.
    """

    names: tuple[StreamName, ...] = ()
    every_ms: int = 30_000
    silence_ms: int = 3_600_000
    answer_ms: int = 300_000

    @property
    def trigger(self) -> dict[str, Any]:
        """Arguments of ``DataStreamWriter.trigger``."""
        return {"processingTime": f"{self.every_ms} milliseconds"} if self.every_ms else {"availableNow": True}
