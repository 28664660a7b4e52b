"""Envelope of a recorded message: its recording, line, topic and raw payload.

The format is one JSON header, one line feed, and the bytes of the payload. The payload is not
decoded, so its bytes cannot change.
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
        recording: id of the recording.
        line: number of the line, from 0 without gaps.
        received_at_ms: time at which the message was received when it was recorded, epoch
            milliseconds; None on the end line.
        topic: topic that the message was published on; None on the end line.
        payload: raw bytes of the message.
        end: whether this is the end line, which follows the last message.
    """

    recording: str
    line: int
    received_at_ms: int | None
    topic: str | None
    payload: bytes
    end: bool = False


def is_end(origin: str, topic: str, recording: str | None) -> bool:
    """Whether a written row is the end line of a recording.

    Other lines of the recording keep the topics of their messages.
    """
    return origin == Origin.REPLAY and recording is not None and topic == TOPIC_PREFIX + recording


def wrap(envelope: Envelope) -> bytes:
    """Encode an envelope as the payload of a message on ``replay/<recording>``."""
    header: dict[str, Any] = {"recording": envelope.recording, "line": envelope.line}
    if envelope.end:
        header["end"] = True
    else:
        header |= {"received_at_ms": envelope.received_at_ms, "topic": envelope.topic}
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + envelope.payload


def unwrap(payload: bytes) -> Envelope:
    """Decode an envelope.

    Raises:
        ValueError: an invalid envelope; the message states the fault.
    """
    head, separator, body = payload.partition(b"\n")
    if not separator:
        raise ValueError("an envelope must have a line feed after the header; got none")
    header = json.loads(head)
    if not isinstance(header, dict):
        raise ValueError("the header must be a JSON object")
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
        raise ValueError("received_at_ms must be epoch milliseconds from 2000 up to 2100, and topic must be a text")
    return Envelope(recording, line, received_at_ms, topic, body)
