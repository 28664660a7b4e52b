"""Inputs of the test oracle: rows of bronze, covered time, policies in force.

Rule: as in `oracle`, nothing else of this project is imported, and each fact is computed anew.
"""

import json
from dataclasses import dataclass
from typing import Any

END = 10**18  # after all instants
DEFAULTS = {  # rules that a stored policy leaves out if they have these values
    "gateway_outage_limit_ms": 86_400_000,
    "session_idle_ms": 1_800_000,
    "velocity_events": None,
    "velocity_kind": "error",
    "velocity_code": None,
    "velocity_hold_ms": 86_400_000,
}


@dataclass(frozen=True)
class Message:
    """Row of bronze; times are epoch milliseconds.

    The ``event_time`` of a row that no device sent is the instant from which it is in effect.
    """

    received_at: int
    kind: str
    device_id: str
    event_time: int | None
    own_clock: bool  # whether event_time is by the device's clock
    boot: str | None = None
    seq: int | None = None
    code: str | None = None
    gateway: str | None = None
    body: str | None = None
    digest: int = 0
    session: str | None = None
    position: int = 0  # position among the rows that its bridge received at one instant
    presence: int | None = None  # instant at which it takes effect, if that is not its event time
    trust: str = "on_time"  # trust of a signal: on_time, late, or a clock fault
    site: str = ""
    firmware: str | None = None

    @property
    def at(self) -> int:
        at = self.event_time if self.presence is None else self.presence
        assert at is not None
        return at

    @property
    def arrival(self) -> tuple[int, int]:
        return (self.received_at, self.position)

    @property
    def is_direct(self) -> bool:
        return self.gateway in (None, self.device_id)

    @property
    def content(self) -> dict[str, Any]:
        return json.loads(self.body or "{}")


class Listening:
    """Covered time: time since the first row, without the gaps."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.gaps_of_bridges: dict[str, list[tuple[int, int | None]]] = {}  # in the order of rows; None: still open
        self.gaps: list[tuple[int, int | None]] = []  # union of these gaps: disjoint, in order

    def covered(self, t: int) -> int:
        missed = sum(max(0, min(t, t if until is None else until) - since) for since, until in self.gaps)
        return max(0, t - self.start - missed)

    def _reached(self, c: int) -> list[int]:
        """Return each t at which covered time may reach ``c``: after 0, 1, 2, ... gaps."""
        at = [self.start + c]
        for since, until in self.gaps:
            if until is not None:
                at.append(at[-1] + until - since)
        return at

    def earliest(self, c: int) -> int | None:
        return min((t for t in self._reached(c) if self.covered(t) >= c), default=None)

    def greatest(self, c: int) -> int | None:
        return max((t for t in self._reached(c) if self.covered(t) <= c), default=None) if c >= 0 else None

    def read(self, gap: Message, frontier: int | None) -> None:
        content, spans = gap.content, self.gaps_of_bridges.setdefault(gap.device_id, [])
        still_open = bool(spans) and spans[-1][1] is None
        if content["op"] == "open" and not still_open:
            since = max(min(content["from"], gap.received_at), self.start, self.start if frontier is None else frontier)
            spans.append((since, None))
        if content["op"] == "close" and still_open:
            spans[-1] = (spans[-1][0], max(content["until"], gap.received_at))
        self.gaps = []
        for since, until in sorted((one for spans in self.gaps_of_bridges.values() for one in spans), key=lambda one: one[0]):
            end = END if until is None else until
            if self.gaps and since <= (END if self.gaps[-1][1] is None else self.gaps[-1][1]):
                since, before = self.gaps.pop()
                end = max(end, END if before is None else before)
            self.gaps.append((since, None if end == END else end))


class DeviceCoverage:
    """Covered time of a device: at each instant, that of its current site."""

    def __init__(self, listenings: dict[str, Listening], stays: list[tuple[int, str]]) -> None:
        self.listenings, self.stays = listenings, stays

    def covered(self, t: int) -> int:
        ends = [*(since for since, _ in self.stays[1:]), END]
        total = 0
        for place, ((since, site), end) in enumerate(zip(self.stays, ends, strict=True)):
            covered = self.listenings[site].covered
            if place and t <= since:
                break
            total += covered(min(t, end)) - (covered(since) if place else 0)
        return total

    def earliest(self, c: int) -> int | None:
        """Return the first t with ``covered(t) >= c`` that is not before the newest stay at a site."""
        since, site = self.stays[-1]
        if len(self.stays) == 1:
            return self.listenings[site].earliest(c)
        found = self.listenings[site].earliest(c - self.covered(since) + self.listenings[site].covered(since))
        return found if found is None else max(found, since)


class Scope:
    """Sites that a gap row concerns."""

    def __init__(self, gap: Message) -> None:
        self.only, self.others = gap.content.get("sites"), gap.content.get("except")

    def concerns(self, site: str) -> bool:
        return site in self.only if self.only else site not in (self.others or [])


@dataclass
class World:
    """Coverage and policies, by which every device is judged."""

    listenings: dict[str, Listening]  # by site
    policies: list[tuple[int, int, dict[str, Any]]]  # effective from, received, policy

    def policy(self, t: int) -> dict[str, Any]:
        return max((one for one in self.policies if one[0] <= t), key=lambda one: one[:2])[2]

    def rules(self, t: int, device_class: str, own: dict[str, int]) -> dict[str, Any]:
        """Return the rules of a class in force at ``t``, with a device's own limits."""
        policy = self.policy(t)
        return {**DEFAULTS, **policy["classes"].get(device_class, policy["rules"]), **own}

    def first_exceeded(
        self,
        clock: Listening | DeviceCoverage,
        since: int,
        limit: str,
        whose: tuple[str, dict[str, int]],
        least: int,
        excused: int = 0,
    ) -> int | None:
        """Return the first instant at which a limit is reached, or None.

        Args:
            clock: covered time.
            since: start of the time that counts.
            limit: name of the limit; its value is that in force at each instant.
            whose: class of the device, and its own limits.
            least: earliest instant to return.
            excused: covered time since the start that does not count, in milliseconds.
        """
        begun = clock.covered(since) + excused
        starts = [start for start, _, _ in self.policies]
        turns = {least, *starts, *(clock.earliest(begun + self.rules(start, *whose)[limit]) for start in starts)}
        eligible = (t for t in turns if t is not None and t >= least)
        return min((t for t in eligible if clock.covered(t) >= begun + self.rules(t, *whose)[limit]), default=None)
