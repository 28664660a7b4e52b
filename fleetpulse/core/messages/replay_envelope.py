"""History travels in an envelope: who recorded it, which line it was, when it was received; then the raw payload.

One JSON header, one line feed, the payload's own bytes: they are never decoded on the way, so they cannot change.
"""

import json
from dataclasses import dataclass
from typing import Any, Final

from fleetpulse.core.rows import Origin
from fleetpulse.core.times import RECORDED_MS

TOPIC_PREFIX: Final = "replay/"
MAX_ID: Final = 256


@dataclass(frozen=True, slots=True)
class Envelope:
    """One line of a recording.

    Attributes:
        recording: the recording's id.
        line: its number, from 0, without holes.
        received_at_ms: when it was received in its own time; None on the last line.
        topic: the topic it was published on; None on the last line.
        payload: its raw bytes.
        end: True on the line after the last.
    """

    recording: str
    line: int
    received_at_ms: int | None
    topic: str | None
    payload: bytes
    end: bool = False


def is_end(origin: str, topic: str, recording: str | None) -> bool:
    """Whether a row that was written is the line after a recording's last; a line of it may have any other topic."""
    return origin == Origin.REPLAY and recording is not None and topic == TOPIC_PREFIX + recording


def wrap(envelope: Envelope) -> bytes:
    """Write an envelope as the payload of a message on ``replay/<recording>``."""
    header: dict[str, Any] = {"recording": envelope.recording, "line": envelope.line}
    if envelope.end:
        header["end"] = True
    else:
        header |= {"received_at_ms": envelope.received_at_ms, "topic": envelope.topic}
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + envelope.payload


def unwrap(payload: bytes) -> Envelope:
    """Read an envelope.

    Raises:
        ValueError: it is not one; the message says why.
    """
    head, separator, body = payload.partition(b"\n")
    if not separator:
        raise ValueError("no line feed after the header")
    header = json.loads(head)
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    recording, line = header.get("recording"), header.get("line")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    received_at_ms, topic = header.get("received_at_ms"), header.get("topic")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    end = header.get("end") is True  # pyright: ignore[reportUnknownMemberType]
    if not isinstance(recording, str) or not recording.isprintable() or len(recording) > MAX_ID:
        raise ValueError(f"recording must be a printable text of at most {MAX_ID} characters")
    if type(line) is not int or not 0 <= line < 2**63:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError("line must be a whole number from 0 to 2^63-1")
    if end:
        return Envelope(recording, line, None, None, body, end=True)
    if type(received_at_ms) is not int or received_at_ms not in RECORDED_MS or not isinstance(topic, str):  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError("received_at_ms must be epoch milliseconds from 2000 up to 2100, and topic a text")
    return Envelope(recording, line, received_at_ms, topic, body)
