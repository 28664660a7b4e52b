"""Client ids of the embedded broker whose connection was replaced, from its log.

Rule: the log names addresses and client ids, not users. One takeover may be a device that
reconnects before the broker has noticed the end of its old connection. Many takeovers indicate two
clients with the same client id.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from fleetpulse.io.mqtt.embedded.broker_log import TAKEOVER

READ_BYTES: Final = 4_000_000  # of the end of the log and of its rotated files
FREQUENT: Final = 3  # takeovers of one client id in an hour that reconnects do not explain


@dataclass(frozen=True, slots=True)
class Takeover:
    """Takeovers of one client id.

    Attributes:
        client_id: MQTT client id.
        times: number of takeovers.
        first_at: time of the first one.
        last_at: time of the newest one.
        address: IP address of the newest client.
        replaced_address: IP address of the client that it replaced.
    """

    client_id: str
    times: int
    first_at: datetime
    last_at: datetime
    address: str
    replaced_address: str


def read_takeovers(log: Path, since: datetime | None = None) -> list[Takeover]:
    """Read the takeovers of each client id from the end of a broker's log, most frequent first.

    Args:
        log: path of the log; it may be absent.
        since: time of the first takeover to count; None counts all.
    """
    return _grouped(_end_of(log).split(b"\n"), since)


def _end_of(log: Path) -> bytes:
    """Return the last bytes of a log, also from rotated files, whose suffixes sort by time."""
    end = b""
    for path in (log, *sorted(log.parent.glob(f"{log.name}.*"), reverse=True)):
        if (left := READ_BYTES - len(end)) <= 0:
            break
        try:
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - left))
                end = file.read(left) + end
        except FileNotFoundError:  # absent, or removed by the broker meanwhile
            continue
    return end


def _grouped(lines: Iterable[bytes], since: datetime | None) -> list[Takeover]:
    found: dict[str, Takeover] = {}
    for line in lines:
        if b"Replacing old client" not in line or (match := TAKEOVER.fullmatch(line)) is None:
            continue
        written, address, replaced, client_id = (
            match[name].decode(errors="replace") for name in ("date", "at", "replaced", "id")
        )
        at = datetime.strptime(written, "%Y/%m/%d %H:%M:%S").replace(tzinfo=UTC)
        if since is not None and at < since:
            continue
        known = found.get(client_id, Takeover(client_id, 0, at, at, address, replaced))
        found[client_id] = replace(known, times=known.times + 1, last_at=at, address=address, replaced_address=replaced)
    return sorted(found.values(), key=lambda one: (-one.times, one.client_id))
