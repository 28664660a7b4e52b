"""Rows of bronze: kinds of messages, fields of a row, identity and order of rows.

Rule 1: a message that can be decoded becomes a `Row`. A doubtful clock is recorded, never repaired.
Rule 2: any other message becomes a rejection with a reason, see `core.messages.decode`. No message
is dropped, and none raises an error.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, Literal, get_args

FORMAT_VERSION: Final = 1
KNOWN_NAMES: Final = 65_536  # number of names whose hashes and addresses are cached
BRIDGE: Final = "bridge-1"  # first bridge, which every installation has
KAFKA: Final = "kafka"  # bridge that reads messages from Kafka
ALERTS: Final = "fleetpulse/alert"  # a message on a topic below it starts a data-quality run
FAILURES: Final = "fleetpulse/failed"  # topics of failed DAGs; not below ``ALERTS``, which would start another DAG
EVERYONE: Final = "_"  # site and device of rows that concern the whole fleet


class Kind(StrEnum):
    """Kind of a row: the last level of its topic."""

    HEARTBEAT = "heartbeat"  # alive, without data
    TELEMETRY = "telemetry"  # alive, with metrics
    ERROR = "error"  # alive, with an error code
    BIRTH = "birth"  # alive, after a start or reconnect
    DEATH = "death"  # the will: the broker lost the connection of the device
    CONTROL = "control"  # an operator's command about one device
    REGISTRY = "registry"  # an entry of the registry: add, change or decommission a device
    POLICY = "policy"  # a new policy
    GAP = "gap"  # a bridge stopped listening, or listens again
    TICK = "tick"  # a canary of the bridge came back: the bridge is listening, so the frontier moves without messages
    CORRECT = "correct"  # correction row: sets a device to the state of its amended history
    ACK = "ack"  # alive, with the answer to a command; the last one, since stored forms number the kinds


SIGNALS: Final = frozenset({Kind.HEARTBEAT, Kind.TELEMETRY, Kind.ERROR, Kind.BIRTH, Kind.ACK})
FROM_DEVICES: Final = SIGNALS | {Kind.DEATH}
WITHOUT_BODY: Final = FROM_DEVICES - {Kind.ACK}  # kinds that other formats can express
RESERVED: Final = frozenset(Kind) - FROM_DEVICES
FOR_EVERYONE: Final = frozenset({Kind.POLICY, Kind.GAP, Kind.TICK})
OP_ERROR: Final = "error"  # operation of a control row that counts an error of its device
FLUSH: Final = "flush"  # operation of a tick that writes all delayed verdicts
POSITION_BITS: Final = 20
MAX_POSITION: Final = 2**POSITION_BITS - 1  # greatest position: rows beyond it have no order within their instant
RANK: Final[Mapping[Kind, int]] = {kind: rank for rank, kind in enumerate(Kind)}


Reason = Literal["topic", "json", "field", "size", "depth", "reserved", "disagreement", "flood", "new_device", "sparkplug"]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)  # reasons of rows in quarantine
KEPT_BYTES: Final = 4_096  # of the payload of a row in quarantine: its first bytes
SPARED_BYTES: Final = 1_024  # greatest payload of a message that is judged although its device exceeds its limits


class Origin(StrEnum):
    """Source of a row."""

    MQTT = "mqtt"  # an MQTT client (also mapped topics, Sparkplug and Kafka)
    REPLAY = "replay"  # an envelope with a recorded message
    COMMAND = "command"  # the command of an operator
    BRIDGE = "bridge"  # the bridge, about itself


class Clock(StrEnum):
    """Source of the event time of a row."""

    DEVICE = "device"  # ``ts`` of the payload
    RECEIVED = "received"  # no ``ts``: the event time is ``received_at``
    INVALID = "invalid"  # ``ts`` is not a time: the row has no event time


class Trust(StrEnum):
    """Class of the event time of a signal, see `core.presence.presence_time`."""

    ON_TIME = "on_time"  # after the frontier: the signal counts at its event time
    LATE = "late"  # at or before the frontier: a direct signal proves life at ``received_at``
    INVALID = "invalid"  # not a time
    AHEAD = "ahead"  # more than ``max_clock_lead`` after ``received_at``
    BEHIND = "behind"  # more than ``max_backlog`` before ``received_at``


class GatewayEvent(StrEnum):
    """Event of a gateway for the devices behind it, see `core.presence.gateways`."""

    DEATH = "death"  # its will: the state of the devices behind it is unknown
    RETURN = "return"  # the first signal after that


@dataclass(frozen=True, slots=True)
class Row:
    """One row of bronze, and the fields `SET_WHEN_READ` that are set when it is read.

    Instants are epoch milliseconds.

    Attributes:
        received_at_ms: time at which the bridge received the message.
        kind: kind of the row.
        device_id: id of the device; `EVERYONE` if the row concerns the whole fleet.
        site: site in the topic.
        event_time_ms: event time; of a reserved kind, the instant from which it is in effect. None
            if the clock is invalid.
        clock: source of ``event_time_ms``.
        boot: name of the run of the device since its last start.
        seq: message counter of the device.
        uptime_s: seconds since the last start of the device.
        code: error code.
        firmware: firmware version.
        gateway: gateway that delivered the message.
        metrics: JSON object of measured values.
        body: JSON object of a reserved kind (control, registry, policy, gap, tick, correct), or of an answer.
        note: warning about the message, with a hint.
        digest: 64 bits of BLAKE2b over the payload's bytes.
        session: name of the connection of the device to the broker.
        position: place in delivery order among the rows of its bridge with the same
            ``received_at_ms``.
        gateway_event: event for the devices behind this gateway; set by landing.
        presence_ms: instant at which the row is judged, if that is not its event time; None before
            the row is read.
        trust: class of the event time; without meaning before the row is read.
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
        """Instant at which the row is judged, epoch milliseconds."""
        at_ms = self.event_time_ms if self.presence_ms is None else self.presence_ms
        assert at_ms is not None, "a row without event time is judged by its presence time"
        return at_ms

    @property
    def arrival(self) -> int:
        """Place in arrival order: a row with a greater number was received later."""
        return (self.received_at_ms << POSITION_BITS) + min(self.position, MAX_POSITION)

    @property
    def is_direct(self) -> bool:
        """Whether the device delivered the message itself, without a gateway."""
        return self.gateway is None or self.gateway == self.device_id

    @property
    def is_for_everyone(self) -> bool:
        """Whether this is a gateway event for all key groups, see `for_everyone`."""
        return self.gateway_event is not None and self.device_id == EVERYONE

    def contents(self) -> Mapping[str, Any]:
        """Return ``body`` as a mapping; empty if there is none."""
        return json.loads(self.body) if self.body else {}


SET_WHEN_READ: Final = ("presence_ms", "trust")  # fields of a row that are not in bronze
Identity = tuple[str, Kind, int | None, int, str | None, int | None, int]


def distinguishing_digest(row: Row) -> int:
    """Return the payload's digest for rows without ``seq``, and 0 for others (ADR 7)."""
    return row.digest if row.seq is None else 0


def identity(row: Row) -> Identity:
    """Return the identity of a row: rows with equal identities are copies (duplicates) of one message."""
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
    """Return the sort key in which the rows of a device are judged.

    It is the instant, wills last, then seq, kind, digest (of rows without seq), boot and arrival.
    """
    seq = -1 if row.seq is None else row.seq
    return (row.at_ms, row.kind is Kind.DEATH, seq, RANK[row.kind], distinguishing_digest(row), row.boot or "", row.arrival)


def for_everyone(row: Row) -> Row | None:
    """Return the gateway event of a row as each key group receives it.

    It applies at ``received_at``.

    Returns:
        The event; None for a row without one.
    """
    if row.gateway_event is None or row.is_for_everyone:
        return None
    at_ms = row.received_at_ms
    return replace(row, device_id=EVERYONE, gateway=row.device_id, event_time_ms=at_ms, presence_ms=None, trust=Trust.ON_TIME)


def session_number(session: str) -> int:
    """Return a 62-bit hash of a session, for the state of a device.

    The difference of two such numbers fits into 64 bits.
    """
    return hash64(session) >> 2


@lru_cache(KNOWN_NAMES)
def hash64(text: str) -> int:
    """Return BLAKE2b-64 of a UTF-8 text as a signed number; it determines the key group."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def key_group(device_id: str, groups: int) -> int:
    """Return the key group of a device, from 0 to ``groups`` - 1."""
    return hash64(device_id) % groups
