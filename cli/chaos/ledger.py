"""Accounts of chaos: acknowledged messages compared with the tables.

Rule 1: the accounts read tables only, after all processes have ended.
Rule 2: a fault is counted under the kill that is nearest in time.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final

from cli.chaos.kills import Kill
from cli.chaos.load import Acknowledged, Identity
from cli.chaos.targets import KillKind
from fleetpulse.core.judgements import COMPARED
from fleetpulse.core.lifecycle import Trigger
from fleetpulse.core.replay import outcome
from fleetpulse.core.rows import FROM_DEVICES, Row, Trust, distinguishing_digest
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports import judgements, messages
from fleetpulse.reports.operations.agreement import Bag, defined, differences, emitted, expanded

FAULTS: Final = ("lost", "judged_twice", "differences", "false_offline")
_LISTED_KINDS: Final = ("late", "duplicate")  # judgements about a message whose data are not applied
_ACTING: Final = ("transition", "clock")  # judgements about a message that is applied
_IDENTITY: Final = [COMPARED.index(name) for name in ("device_id", "message_kind", "event_time_ms", "boot", "seq")]
_KIND: Final = COMPARED.index("kind")
_TRANSITIONS: Final = """SELECT device_id, epoch_ms(life) AS life_ms, transition_no, to_mode, "trigger",
                         epoch_ms(event_time) AS at_ms
                         FROM transitions"""


@dataclass(slots=True)
class KillCounts:
    """Counts for one kind of kill.

    Attributes:
        kills: number of kills.
        acknowledged: number of messages whose acknowledgement was nearest to such a kill.
        lost: acknowledged messages that are neither in ``messages`` nor in ``quarantine``.
        judged_twice: messages of which more than one copy was applied, and repeated transitions.
        differences: judgements that only the job or only the definition has.
        false_offline: transitions to offline of devices that sent a signal within their timeout, or
            within the grace period of their will.
        recovery_s: recovery time of each kill, in seconds.
    """

    kills: int = 0
    acknowledged: int = 0
    lost: int = 0
    judged_twice: int = 0
    differences: int = 0
    false_offline: int = 0
    recovery_s: list[float] = field(default_factory=list[float])

    def shown(self, name: str) -> dict[str, Any]:
        """Return the counts as a row."""
        recovery = {"recovery_s": round(median(self.recovery_s), 1), "longest_s": round(max(self.recovery_s), 1)}
        faults = {fault: getattr(self, fault) for fault in FAULTS}
        return {"kill": name, "kills": self.kills, "acknowledged": self.acknowledged, **faults, **recovery}


@dataclass(frozen=True, slots=True)
class Account:
    """Results of a run of chaos.

    Attributes:
        lines: counts by kind of kill.
        balance: number of messages received, judged, pending, late, duplicate and quarantined.
        transitions: number of transitions.
        reconnects: number of reconnects of devices after a lost connection.
        unasked: number of times that a job ended without a kill.
        faults: descriptions of the first faults.
    """

    lines: Mapping[KillKind, KillCounts]
    balance: Mapping[str, int]
    transitions: int
    reconnects: int
    unasked: int
    faults: Sequence[str]

    @property
    def clean(self) -> bool:
        """Whether there are no faults."""
        return not any(getattr(line, fault) for line in self.lines.values() for fault in FAULTS) and self.is_balanced

    @property
    def is_balanced(self) -> bool:
        """Whether all received messages are accounted for."""
        return self.balance["received"] == sum(count for name, count in self.balance.items() if name != "received")


class Ledger:
    """Counts by kind of kill; a fault counts for the kill that is nearest in time."""

    def __init__(self, kills: Sequence[Kill]) -> None:
        self.lines: dict[KillKind, KillCounts] = {}
        self.faults: list[str] = []
        self._victims = [kill.victim for kill in kills]
        self._edges = [(earlier.at_ms + later.at_ms) // 2 for earlier, later in pairwise(kills)]
        for kill in kills:
            line = self.lines.setdefault(kill.victim, KillCounts())
            line.kills += 1
            line.recovery_s.append(kill.recovered_s or 0.0)

    def at(self, instant_ms: int) -> KillCounts:
        """Return the counts for the kind of the kill that is nearest to an instant."""
        return self.lines[self._victims[bisect(self._edges, instant_ms)]]

    def enter(self, fault: str, instant_ms: int, description: object) -> None:
        """Count a fault, and keep the descriptions of the first 20."""
        line = self.at(instant_ms)
        setattr(line, fault, getattr(line, fault) + 1)
        if len(self.faults) < 20:
            self.faults.append(f"{fault.replace('_', ' ')}: {description}")


def account(
    home: Home,
    acknowledged: Sequence[Acknowledged],
    kills: Sequence[Kill],
    *,
    timeout_ms: int,
    death_grace_ms: int,
    reconnects: int,
    unexpected_exits: int,
) -> Account:
    """Compare acknowledged messages with the tables of a home, and count the faults.

    Args:
        home: the home, in which no process runs and all rows up to the frontier are judged.
        acknowledged: messages that the broker acknowledged.
        kills: all kills, in order of time.
        timeout_ms: silence after which a device is offline, in milliseconds.
        death_grace_ms: grace period after a will, in milliseconds.
        reconnects: number of reconnects of devices after a lost connection.
        unexpected_exits: number of times that a job ended without a kill.
    """
    ledger = Ledger(kills)
    for one in acknowledged:
        ledger.at(one.at_ms).acknowledged += 1
    rows = messages.rows(home)
    from_devices = [row for row in rows if row.kind in FROM_DEVICES]
    landed, distinct = Counter(identity_of(row) for row in from_devices), distinct_messages(from_devices)
    quarantined = Counter(one["payload"] for one in judgements.quarantine(home))
    for one in missing(acknowledged, landed, quarantined):
        ledger.enter("lost", one.at_ms, one.message)
    pending = outcome(rows, home.deployment()).pending
    waiting = Counter(identity_of(row) for row in pending if row.trust is not Trust.LATE)  # late rows are in `listed`
    judged, due = emitted(home), defined(rows, home.deployment())
    listed = judgements_about(expanded(judged, due))
    for identity in acted_twice(landed, distinct, waiting, listed):
        ledger.enter("judged_twice", identity[2], identity)
    transitions = tables.query(home, _TRANSITIONS)
    for one in repeated(transitions):
        ledger.enter("judged_twice", one["at_ms"], one)
    for one in differences(judged, due):
        ledger.enter("differences", one["event_time_ms"] or one["received_at_ms"] or 0, one)
    for one in wrongly_offline(acknowledged, transitions, timeout_ms, death_grace_ms):
        ledger.enter("false_offline", one["at_ms"], one)
    return Account(
        ledger.lines,
        balance(landed, distinct, waiting, listed, quarantined),
        len(transitions),
        reconnects,
        unexpected_exits,
        ledger.faults,
    )


def identity_of(row: Row) -> tuple[Any, ...]:
    """Return the identity of a message, which its copies share."""
    return row.device_id, row.kind.value, row.event_time_ms, row.boot, row.seq


def distinct_messages(rows: Iterable[Row]) -> Counter[Any]:
    """Return the number of rows that may be applied, by identity.

    Wills of two sessions that are received in one millisecond share an identity. So do copies that
    are received before their event time, from a device whose clock is ahead: each counts as a
    signal at its ``received_at``, see docs/adr/0032-presence-time.md.
    """
    acting = {(identity_of(row), distinguishing_digest(row), min(row.event_time_ms or 0, row.received_at_ms)) for row in rows}
    return Counter(identity for identity, _, _ in acting)


def missing(acknowledged: Iterable[Acknowledged], landed: Counter[Any], quarantined: Counter[str]) -> list[Acknowledged]:
    """Return the messages that have more acknowledgements than rows.

    Rows of decodable messages are in bronze, rows of other messages in quarantine.
    """
    left, broken, lost = landed.copy(), quarantined.copy(), list[Acknowledged]()
    for one in acknowledged:
        where: Counter[Any] = broken if one.message.identity is None else left
        key = one.message.identity or one.message.payload.decode()
        if where[key] > 0:
            where[key] -= 1
        else:
            lost.append(one)
    return lost


def judgements_about(judged: Bag) -> dict[str, Counter[Any]]:
    """Return the number of copies not applied, by kind of judgement and message."""
    listed: dict[str, Counter[Any]] = {}
    for value, count in judged.items():
        identity = tuple(value[place] for place in _IDENTITY)
        if identity[1] is not None and value[_KIND] not in _ACTING:
            listed.setdefault(value[_KIND], Counter())[identity] += count
    return listed


def _applied(landed: Counter[Any], waiting: Counter[Any], listed: Mapping[str, Counter[Any]]) -> Counter[Any]:
    """Return the number of applied copies: landed, less the pending ones and those listed as not applied."""
    acted = landed.copy()
    for others in (waiting, *listed.values()):
        acted.subtract(others)
    return acted


def acted_twice(
    landed: Counter[Any], distinct: Counter[Any], waiting: Counter[Any], listed: Mapping[str, Counter[Any]]
) -> list[Any]:
    """Return the identities with a wrong number of applied copies.

    The number must not exceed the number of distinct messages. It is negative if a judgement about a
    copy was emitted twice.
    """
    return [identity for identity, count in _applied(landed, waiting, listed).items() if not 0 <= count <= distinct[identity]]


def balance(
    landed: Counter[Any],
    distinct: Counter[Any],
    waiting: Counter[Any],
    listed: Mapping[str, Counter[Any]],
    quarantined: Counter[str],
) -> dict[str, int]:
    """Return the number of received messages, in total and by outcome."""
    parts = {kind: listed.get(kind, Counter[Any]()).total() for kind in (*_LISTED_KINDS, *(listed.keys() - set(_LISTED_KINDS)))}
    judged = sum(min(max(count, 0), distinct[identity]) for identity, count in _applied(landed, waiting, listed).items())
    received = landed.total() + quarantined.total()
    return {"received": received, "judged": judged, "waiting": waiting.total(), **parts, "quarantined": quarantined.total()}


def repeated(transitions: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the transitions whose id equals that of an earlier one."""
    seen: set[tuple[Any, ...]] = set()
    again: list[Mapping[str, Any]] = []
    for one in transitions:
        identity = one["device_id"], one["life_ms"], one["transition_no"]
        if identity in seen:
            again.append(one)
        seen.add(identity)
    return again


def wrongly_offline(
    acknowledged: Iterable[Acknowledged], transitions: Iterable[Mapping[str, Any]], timeout_ms: int, death_grace_ms: int
) -> list[Mapping[str, Any]]:
    """Return the transitions to offline that an acknowledged signal contradicts.

    The device sent the signal within its timeout, or within its grace period if a will caused the
    transition. The signal counts even if the bridge had not received it yet.
    """
    alive_ms: dict[str, list[int]] = {}
    for one in acknowledged:
        identity: Identity | None = one.message.identity
        if identity is not None and one.message.alive_ms is not None:
            alive_ms.setdefault(identity[0], []).append(one.message.alive_ms)
    for instants in alive_ms.values():
        instants.sort()
    wrong: list[Mapping[str, Any]] = []
    for one in transitions:
        instants = alive_ms.get(one["device_id"], [])
        place, limit_ms = bisect(instants, one["at_ms"]), death_grace_ms if one["trigger"] == Trigger.DEATH else timeout_ms
        if one["to_mode"] == "offline" and place and instants[place - 1] > one["at_ms"] - limit_ms:
            wrong.append(one)
    return wrong
