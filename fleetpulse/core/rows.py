"""Messages: what a device may say, and how its bytes become a row or a reason why not.

Rule 1: whatever can be decoded becomes a `Row`; a doubtful clock is kept and named, never repaired.
Rule 2: whatever cannot be decoded becomes a `Rejection` with a reason and a hint; nothing is dropped, nothing raises.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, Literal, get_args

FORMAT_VERSION: Final = 1
KNOWN_NAMES: Final = 65_536  # whose hashes and addresses are at hand: they come again and again
BRIDGE: Final = "bridge-1"  # the bridge that every installation has
KAFKA: Final = "kafka"  # the bridge that takes messages from Kafka
ALERTS: Final = "fleetpulse/alert"  # whoever publishes below it has data quality looked at
FAILURES: Final = "fleetpulse/failed"  # below it is said which DAG failed; not below the former, which runs one that may fail
EVERYONE: Final = "_"  # stands for site and device in rows that concern the whole fleet


class Kind(StrEnum):
    """What a row is about: the last level of its topic."""

    HEARTBEAT = "heartbeat"  # alive, nothing else to say
    TELEMETRY = "telemetry"  # alive, with metrics
    ERROR = "error"  # alive, with an error code
    BIRTH = "birth"  # alive, after a start
    DEATH = "death"  # the will: the broker lost the device
    CONTROL = "control"  # an operator's command about one device
    REGISTRY = "registry"  # a device was added, changed or decommissioned
    POLICY = "policy"  # the rules changed
    GAP = "gap"  # we stopped listening, or began again
    TICK = "tick"  # our own canary came back: we are listening
    CORRECT = "correct"  # a device goes on as its amended history says


SIGNALS: Final = frozenset({Kind.HEARTBEAT, Kind.TELEMETRY, Kind.ERROR, Kind.BIRTH})
FROM_DEVICES: Final = SIGNALS | {Kind.DEATH}
RESERVED: Final = frozenset(Kind) - FROM_DEVICES
FOR_EVERYONE: Final = frozenset({Kind.POLICY, Kind.GAP, Kind.TICK})
FLUSH: Final = "flush"  # the operation of a tick after which no verdict is held back
POSITION_BITS: Final = 20
MAX_POSITION: Final = 2**POSITION_BITS - 1  # beyond it, rows of one instant have no order
RANK: Final[Mapping[Kind, int]] = {kind: rank for rank, kind in enumerate(Kind)}


Reason = Literal["topic", "json", "field", "size", "depth", "reserved", "disagreement", "flood", "sparkplug"]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)  # why a message goes to quarantine


class Origin(StrEnum):
    """By which door a row came in."""

    MQTT = "mqtt"  # a client published it
    REPLAY = "replay"  # out of an envelope: history
    COMMAND = "command"  # an operator's command
    BRIDGE = "bridge"  # written by the bridge about itself


class Clock(StrEnum):
    """Where a row's event time comes from."""

    DEVICE = "device"  # the payload's ts
    RECEIVED = "received"  # there was no ts: event_time is received_at
    INVALID = "invalid"  # ts is not a time: kept and listed, not judged


class Trust(StrEnum):
    """Classes of event times: on time, late, and the clock faults; see `core.clocks`."""

    ON_TIME = "on_time"  # after the frontier: the signal counts for it
    LATE = "late"  # at or before the frontier: the device counts as heard when a direct signal is received
    INVALID = "invalid"  # not a time
    AHEAD = "ahead"  # more than ``max_clock_lead`` after ``received_at``
    BEHIND = "behind"  # more than ``max_backlog`` before ``received_at``


class GatewayEvent(StrEnum):
    """Event of a gateway for the devices behind it; see `core.gateways`."""

    DEATH = "death"  # its will: the state of the devices behind it is unknown
    RETURN = "return"  # the first signal after that


@dataclass(frozen=True, slots=True)
class Row:
    """One row of bronze, with the fields `OF_READING` that follow when it is read.

    Attributes:
        received_at_ms: when the bridge had it in its hands.
        kind: what it is about.
        device_id: the device; `EVERYONE` where it concerns the fleet.
        site: the topic's site.
        event_time_ms: when it happened; for our own rows, from when it is in effect. None where the clock is invalid.
        clock: where ``event_time_ms`` comes from.
        boot: names the device's run since its last start.
        seq: the device's message counter.
        uptime_s: seconds since the device's last start.
        code: error code.
        firmware: firmware version.
        gateway: through whom it came.
        metrics: JSON object of measured values.
        body: JSON object of our own rows (control, registry, policy, gap, tick, correct).
        note: what is odd about it, with a hint.
        digest: 64 bits of BLAKE2b over the payload's bytes.
        session: names the device's connection to the broker.
        position: its place among the rows of its bridge that share ``received_at_ms``, in the order of delivery.
        gateway_event: the event that it is for the devices behind its device; set by landing.
        presence_ms: the instant at which it is judged, where that is not its event time; None before it is read.
        trust: the class of its event time; without meaning before it is read.
    """

    received_at_ms: int
    kind: Kind
    device_id: str
    site: str
    event_time_ms: int | None
    clock: Clock = Clock.DEVICE
    boot: str | None = None
    seq: int | None = None
    uptime_s: int | None = None
    code: str | None = None
    firmware: str | None = None
    gateway: str | None = None
    metrics: str | None = None
    body: str | None = None
    note: str | None = None
    digest: int = 0
    session: str | None = None
    position: int = 0
    gateway_event: GatewayEvent | None = None
    presence_ms: int | None = None
    trust: Trust = Trust.ON_TIME

    @property
    def at_ms(self) -> int:
        """The instant at which it is judged, epoch milliseconds."""
        at_ms = self.event_time_ms if self.presence_ms is None else self.presence_ms
        assert at_ms is not None, "a row without event time is judged by its presence time"
        return at_ms

    @property
    def arrival(self) -> int:
        """Its place in arrival order: the greater number was received later."""
        return (self.received_at_ms << POSITION_BITS) + min(self.position, MAX_POSITION)

    @property
    def is_direct(self) -> bool:
        """Whether its device delivered it itself, and no gateway."""
        return self.gateway is None or self.gateway == self.device_id

    @property
    def is_for_everyone(self) -> bool:
        """Whether it is a gateway's death or return as each key group receives it, see `for_everyone`."""
        return self.gateway_event is not None and self.device_id == EVERYONE

    def contents(self) -> Mapping[str, Any]:
        """Return ``body`` as a mapping; empty where there is none."""
        return json.loads(self.body) if self.body else {}


OF_READING: Final = ("presence_ms", "trust")  # fields of a row that bronze has not
Identity = tuple[str, Kind, int | None, int, str | None, int | None, int]


def distinguishing_digest(row: Row) -> int:
    """Return what tells apart messages that a device did not number: the payload's digest, 0 where there is a ``seq``."""
    return row.digest if row.seq is None else 0


def identity(row: Row) -> Identity:
    """Return what makes two rows copies of one message."""
    return (
        row.device_id,
        row.kind,
        row.event_time_ms,
        row.at_ms,
        row.boot,
        row.seq,
        distinguishing_digest(row),
    )


def order(row: Row) -> tuple[int, bool, int, int, int, str, int]:
    """Return the key by which a device's rows are judged: instant, wills last, seq, kind, digest where there is no seq."""
    seq = -1 if row.seq is None else row.seq
    return (row.at_ms, row.kind is Kind.DEATH, seq, RANK[row.kind], distinguishing_digest(row), row.boot or "", row.arrival)


def for_everyone(row: Row) -> Row | None:
    """Return a gateway's death or return as each key group receives it: at the instant of its receipt; None for other rows."""
    if row.gateway_event is None or row.is_for_everyone:
        return None
    at_ms = row.received_at_ms
    return replace(row, device_id=EVERYONE, gateway=row.device_id, event_time_ms=at_ms, presence_ms=None, trust=Trust.ON_TIME)


def session_number(session: str) -> int:
    """Return the number that stands for a session in a device's state: 62 bits, so that differences of two have 63."""
    return hash64(session) >> 2


@lru_cache(KNOWN_NAMES)
def hash64(text: str) -> int:
    """BLAKE2b-64 of UTF-8 text as a signed 64-bit number: a device's place among the key groups."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def key_group(device_id: str, groups: int) -> int:
    """Return the key group of a device, from 0 to ``groups`` - 1."""
    return hash64(device_id) % groups
