"""Recordings of messages: gzip or plain NDJSON, one message a line, in order.

Rule: memory is bounded by the longest permitted line, even if a small gzip file expands to far more.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import IO, Any, Final, cast

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.rows import Origin, Row
from fleetpulse.core.times import RECORDED_MS
from fleetpulse.io.mqtt.address import MAX_PAYLOAD_BYTES

MAX_LINE_BYTES: Final = 8 * MAX_PAYLOAD_BYTES  # JSON writes a byte of a payload with up to six characters
_ADVICE = 'a line must be like {"received_at_ms": 1630589706724, "topic": "fleet/site/device/heartbeat", "payload": {...}}'


@dataclass(frozen=True, slots=True)
class RecordedMessage:
    """Line of a recording.

    Attributes:
        received_at_ms: time at which the message was originally received, epoch milliseconds.
        topic: topic of the message.
        payload: bytes of the payload.
    """

    received_at_ms: int
    topic: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Recording:
    """Metadata of a recording.

    Attributes:
        path: path of the file.
        id: first 16 hexadecimal digits of the content's SHA-256.
        lines: number of lines.
        first_ms: ``received_at`` of the first line, epoch milliseconds.
        last_ms: ``received_at`` of the last line, epoch milliseconds.
    """

    path: Path
    id: str
    lines: int
    first_ms: int
    last_ms: int


def inspect(path: Path) -> Recording:
    """Read a whole recording, check every line, and return its metadata.

    Raises:
        FleetError: the recording is missing, damaged, empty, or not in order, or a line is longer
            than `MAX_LINE_BYTES`; a line error names the line.
    """
    digest, lines, first_ms, last_ms = sha256(), 0, 0, -1
    for number, line in enumerate(_lines(path), 1):
        digest.update(line)
        recorded = _parse(path, number, line)
        if recorded.received_at_ms < last_ms:
            raise FleetError(
                f'line {number} of "{path}": received_at_ms must not decrease; '
                f"got {recorded.received_at_ms} after {last_ms}; "
                f"sort the recording by received_at_ms",
                code="recording-runs-backwards",
            )
        first_ms = first_ms if lines else recorded.received_at_ms
        last_ms, lines = recorded.received_at_ms, number
    if not lines:
        raise FleetError(f'the recording "{path}" is empty; {_ADVICE}', code="recording-empty")
    return Recording(path, digest.hexdigest()[:16], lines, first_ms, last_ms)


def read(path: Path) -> Iterator[RecordedMessage]:
    """Yield the messages of a recording.

    Raises:
        FleetError: the recording is missing or damaged, or a line is invalid.
    """
    for number, line in enumerate(_lines(path), 1):
        yield _parse(path, number, line)


def rows(path: Path) -> Iterator[Row]:
    """Yield the decoded rows of a recording; skip messages that cannot be decoded."""
    for recorded in read(path):
        row = decode(recorded.topic, recorded.payload, recorded.received_at_ms, Origin.REPLAY)
        if isinstance(row, Row):
            yield row


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        opened: IO[bytes] = cast("IO[bytes]", gzip.open(path)) if zipped else path.open("rb")
        with opened as file:
            for number in count(1):
                line = file.readline(MAX_LINE_BYTES + 1)
                if len(line) > MAX_LINE_BYTES:
                    raise FleetError(
                        f'line {number} of "{path}" has more than {MAX_LINE_BYTES:,} bytes, the limit of a line; {_ADVICE}',
                        code="recording-line-too-long",
                    )
                if not line:
                    return
                yield line
    except FileNotFoundError:
        raise FleetError(f'there is no recording "{path}"; name a gzip or plain NDJSON file', code="recording-missing") from None
    except (OSError, EOFError, zlib.error) as error:
        raise FleetError(
            f'the recording "{path}" is truncated or damaged ({error}); download it again', code="recording-truncated"
        ) from None


def _parse(path: Path, number: int, line: bytes) -> RecordedMessage:
    try:
        content: Any = json.loads(line)
        received_at_ms, topic, payload = content["received_at_ms"], content["topic"], content["payload"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FleetError(
            f'line {number} of "{path}" is not a recorded message ({error!r}); {_ADVICE}', code="recording-line-invalid"
        ) from None
    if type(received_at_ms) is int and received_at_ms not in RECORDED_MS:
        raise FleetError(
            f'line {number} of "{path}": received_at_ms must be epoch milliseconds from 2000 up to 2100; got {received_at_ms}; '
            f"if the unit or the clock was wrong, correct the recording",
            code="recording-time-invalid",
        )
    if type(received_at_ms) is not int or not isinstance(topic, str):
        raise FleetError(f'line {number} of "{path}" is not a recorded message; {_ADVICE}', code="recording-line-invalid")
    return RecordedMessage(received_at_ms, topic, _payload(payload))


def _payload(payload: Any) -> bytes:
    """Return the bytes of a payload; keep lone surrogates, which UTF-8 cannot encode."""
    if isinstance(payload, str):  # the recorded payload was not JSON
        return payload.encode(errors="surrogatepass")
    try:
        return json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(payload, separators=(",", ":")).encode()
