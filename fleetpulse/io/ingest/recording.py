"""Recordings: gzip or plain NDJSON, one message a line, in the order in which they arrived."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

from fleetpulse.core.errors import FleetError
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.rows import Origin, Row
from fleetpulse.core.times import RECORDED_MS

_CURE = 'a line is {"received_at_ms": 1630589706724, "topic": "fleet/site/device/heartbeat", "payload": {...}}'


@dataclass(frozen=True, slots=True)
class Recorded:
    """One line of a recording.

    Attributes:
        received_at_ms: when it was received in its own time.
        topic: the topic it was published on.
        payload: its bytes.
    """

    received_at_ms: int
    topic: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Recording:
    """What is known of a recording before it is played.

    Attributes:
        path: its file.
        id: 16 hexadecimal digits of its content.
        lines: how many.
        first_ms: ``received_at`` of its first line, in epoch milliseconds.
        last_ms: and of its last.
    """

    path: Path
    id: str
    lines: int
    first_ms: int
    last_ms: int


def inspect(path: Path) -> Recording:
    """Read a recording through, checking every line.

    Raises:
        FleetError: it is not there, damaged, empty, or not in order; says which line.
    """
    digest, lines, first_ms, last_ms = sha256(), 0, 0, -1
    for number, line in enumerate(_lines(path), 1):
        digest.update(line)
        recorded = _parse(path, number, line)
        if recorded.received_at_ms < last_ms:
            raise FleetError(
                f'line {number} of "{path}": received_at_ms must not run backwards; '
                f"got {recorded.received_at_ms} after {last_ms}; "
                f"sort the recording by received_at_ms",
                code="recording-runs-backwards",
            )
        first_ms = first_ms if lines else recorded.received_at_ms
        last_ms, lines = recorded.received_at_ms, number
    if not lines:
        raise FleetError(f'the recording "{path}" is empty; {_CURE}', code="recording-empty")
    return Recording(path, digest.hexdigest()[:16], lines, first_ms, last_ms)


def read(path: Path) -> Iterator[Recorded]:
    """Yield a recording's messages.

    Raises:
        FleetError: as `inspect`.
    """
    for number, line in enumerate(_lines(path), 1):
        yield _parse(path, number, line)


def rows(path: Path) -> Iterator[Row]:
    """Yield the rows that a recording's messages decode to; what cannot be decoded is left out."""
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
            yield from file
    except FileNotFoundError:
        raise FleetError(f'there is no recording "{path}"; name a gzip or plain NDJSON file', code="recording-missing") from None
    except (OSError, EOFError, zlib.error) as error:
        raise FleetError(
            f'the recording "{path}" cannot be read to its end ({error}); fetch it again', code="recording-truncated"
        ) from None


def _parse(path: Path, number: int, line: bytes) -> Recorded:
    try:
        content: Any = json.loads(line)
        received_at_ms, topic, payload = content["received_at_ms"], content["topic"], content["payload"]
    except (ValueError, TypeError, KeyError) as error:
        raise FleetError(
            f'line {number} of "{path}" is not a recorded message ({error!r}); {_CURE}', code="recording-line-invalid"
        ) from None
    if type(received_at_ms) is int and received_at_ms not in RECORDED_MS:
        raise FleetError(
            f'line {number} of "{path}": received_at_ms is epoch milliseconds from 2000 up to 2100; got {received_at_ms}; '
            f"where they are seconds, or a broken clock's, mend the recording",
            code="recording-time-invalid",
        )
    if type(received_at_ms) is not int or not isinstance(topic, str):
        raise FleetError(f'line {number} of "{path}" is not a recorded message; {_CURE}', code="recording-line-invalid")
    return Recorded(received_at_ms, topic, _payload(payload))


def _payload(payload: Any) -> bytes:
    """Return a payload's bytes; half of a character, which JSON can escape and UTF-8 cannot hold, stays what it is."""
    if isinstance(payload, str):  # what was no JSON when it was recorded
        return payload.encode(errors="surrogatepass")
    try:
        return json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(payload, separators=(",", ":")).encode()
