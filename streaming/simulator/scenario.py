"""Simulated fleet for ``fleet up``, tests and benchmarks: endless seeded messages.

Rule 1: no clock is read; messages are generated in the order in which they would be received.
Rule 2: twenty devices are enough to show every behaviour that the lifecycle distinguishes.
"""

import heapq
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Any, Final

from fleetpulse.core.streams.commands import COMMAND

_MINUTE: Final = 60_000
_BUDGET: Final = 0.85  # share of the allowed messages; bursts and copies are added to it
CLASSES: Final[Mapping[str, tuple[int, str]]] = MappingProxyType(
    {"sensor": (60_000, "60m"), "meter": (120_000, "45m"), "camera": (45_000, "30m")}
)  # interval in milliseconds, and timeout
SITES: Final = ("north", "south", "harbour")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Parameters of a simulation.

    Attributes:
        seed: seed of the fleet; the same parameters give the same messages.
        devices: number of devices.
        start_ms: start of the simulation, epoch milliseconds.
        history_ms: duration of the part that lies in the past when it is played, milliseconds; at
            least two timeouts.
        max_history_messages: most messages in that part.
    """

    seed: int
    devices: int
    start_ms: int
    history_ms: int = 135 * _MINUTE
    max_history_messages: int = 20_000


@dataclass(frozen=True, slots=True, order=True)
class Sent:
    """One message of the simulated fleet.

    Attributes:
        received_at_ms: time at which it would be received, epoch milliseconds.
        topic: topic that it is published on.
        payload: bytes of the payload.
    """

    received_at_ms: int
    topic: str
    payload: bytes


@dataclass(slots=True)
class _Member:
    """One simulated device: its identity and counters."""

    device_id: str
    site: str
    device_class: str
    gateway: str
    interval_ms: int
    joins_ms: int
    rng: Random
    boot: int = 1
    seq: int = 0

    @property
    def timeout_ms(self) -> int:
        return int(CLASSES[self.device_class][1].removesuffix("m")) * _MINUTE

    def topic(self, kind: str) -> str:
        return f"fleet/{self.site}/{self.device_id}/{kind}"

    def message(self, at_ms: int, kind: str, **more: Any) -> tuple[str, bytes]:
        """Return topic and payload of the next message; fields of value None are omitted."""
        self.seq += 1
        content = {"ts": at_ms, "seq": self.seq, "boot": f"b{self.boot}", "gateway": self.gateway, **more}
        if kind == "telemetry":
            content["metrics"] = {
                "temperature": round(self.rng.gauss(21, 3), 1),
                "battery": self.rng.randint(3300, 4100),
            }
        return self.topic(kind), _json({key: value for key, value in content.items() if value is not None})


TimedMessage = tuple[int, int, str, bytes]  # time of sending, delay in transit, topic, payload
Behaviour = Callable[[_Member, int], Iterator[TimedMessage]]


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _beats(member: _Member, from_ms: int, until_ms: int | None = None) -> Iterator[tuple[int, str]]:
    """Yield instants and kinds of messages at roughly regular intervals."""
    at_ms = from_ms
    while until_ms is None or at_ms < until_ms:
        yield at_ms, ("telemetry" if member.rng.random() < 0.3 else "heartbeat")
        at_ms += int(member.interval_ms * member.rng.uniform(0.9, 1.1))


def _steady(member: _Member, from_ms: int, until_ms: int | None = None) -> Iterator[TimedMessage]:
    for at_ms, kind in _beats(member, from_ms, until_ms):
        yield at_ms, member.rng.randint(20, 900), *member.message(at_ms, kind)


def _dies(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    yield from _steady(member, from_ms, from_ms + member.rng.randint(5, 25) * _MINUTE)


def _flaps(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    while True:
        steady_ms = member.rng.randint(10, 25) * _MINUTE
        yield from _steady(member, from_ms, from_ms + steady_ms)
        from_ms += steady_ms + int(member.timeout_ms * member.rng.uniform(1.1, 1.4))


def _is_held_up(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    for at_ms, kind in _beats(member, from_ms):
        chance = member.rng.random()
        delay_ms = 90_000 + member.rng.randint(0, 120_000) if chance < 0.05 else 20_000 if chance < 0.15 else 300
        yield at_ms, delay_ms, *member.message(at_ms, kind)


def _sends_twice(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    for at_ms, kind in _beats(member, from_ms):
        sent = member.message(at_ms, kind)
        yield at_ms, 200, *sent
        if member.rng.random() < 0.3:
            yield at_ms, 2_500, *sent


def _is_ahead(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    for at_ms, kind in _beats(member, from_ms):
        yield at_ms, 200, *member.message(at_ms + 20 * _MINUTE, kind)


def _has_no_clock(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    for at_ms, kind in _beats(member, from_ms):
        yield at_ms, 200, *member.message(at_ms, kind, ts=None)


def _counts_seconds(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    for at_ms, kind in _beats(member, from_ms):
        yield at_ms, 200, *member.message(at_ms // 1000, kind)


def _fails_at_times(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    while True:
        steady_ms = member.rng.randint(20, 40) * _MINUTE
        yield from _steady(member, from_ms, from_ms + steady_ms)
        from_ms += steady_ms
        for _ in range(4):
            yield from_ms, 200, *member.message(from_ms, "error", code=f"E{member.rng.randint(1, 40):02d}")
            from_ms += 30_000


def _is_attacked(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    yield from _steady(member, from_ms, from_ms + 40 * _MINUTE)
    from_ms += 40 * _MINUTE
    for code in ("reconnaissance", "auth_failed", "auth_failed", "escalation"):
        yield from_ms, 200, *member.message(from_ms, "error", code=code)
        from_ms += 4 * _MINUTE
    yield from _steady(member, from_ms)


def _leaves_a_will(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    while True:
        steady_ms = member.rng.randint(30, 50) * _MINUTE
        yield from _steady(member, from_ms, from_ms + steady_ms)
        from_ms += steady_ms
        yield from_ms, 200, member.topic("death"), _json({"boot": f"b{member.boot}"})
        from_ms += 10 * _MINUTE
        member.boot, member.seq = member.boot + 1, 0
        yield from_ms, 200, *member.message(from_ms, "birth", firmware="1.4.2")
        from_ms += 5_000


def _reboots(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    while True:
        steady_ms = member.rng.randint(25, 45) * _MINUTE
        yield from _steady(member, from_ms, from_ms + steady_ms)
        from_ms += steady_ms
        member.boot, member.seq = member.boot + 1, 0
        yield from_ms, 200, *member.message(from_ms, "birth", firmware="1.4.2", uptime_s=0)
        from_ms += 5_000


def _is_taken_out(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    yield from _steady(member, from_ms, from_ms + 60 * _MINUTE)
    from_ms += 60 * _MINUTE
    yield from_ms, 0, member.topic("registry"), _json({"op": "decommission"})
    yield from _steady(member, from_ms + 30_000, from_ms + 10 * _MINUTE)


def _sends_garbage(member: _Member, from_ms: int) -> Iterator[TimedMessage]:
    for at_ms, kind in _beats(member, from_ms):
        if member.rng.random() < 0.04:
            yield at_ms, 200, member.topic(kind), b'{"ts": 12'
        else:
            yield at_ms, 200, *member.message(at_ms, kind)


def _never_sends(_member: _Member, _from_ms: int) -> Iterator[TimedMessage]:
    return iter(())


# The first devices have one of these behaviours each; most other devices are steady.
BEHAVIOURS: Final[tuple[Behaviour, ...]] = (
    _steady,
    _dies,
    _flaps,
    _is_held_up,
    _sends_twice,
    _is_ahead,
    _has_no_clock,
    _counts_seconds,
    _fails_at_times,
    _is_attacked,
    _leaves_a_will,
    _reboots,
    _is_taken_out,
    _sends_garbage,
    _never_sends,
    _steady,
)
_RARE: Final = (_dies, _flaps, _is_held_up, _sends_twice, _fails_at_times, _leaves_a_will, _reboots)
_NOT_REGISTERED: Final = 15  # number of the device that is not registered, but admitted by its first signal


def scenario_policy() -> dict[str, Any]:
    """Return the policy of the simulated fleet, with the keys of a policy file."""
    return {
        "rules": {"timeout": "60m"},
        "classes": {name: {"timeout": timeout} for name, (_, timeout) in CLASSES.items()},
    }


def simulate(scenario: Scenario) -> Iterator[Sent]:
    """Yield the messages of the fleet, an endless stream in the order of receipt."""
    members = list(_members(scenario))
    for member in members:
        if member.joins_ms == scenario.start_ms and not member.device_id.endswith(f"-{_NOT_REGISTERED:05d}"):
            content = {"op": "add", "class": member.device_class, "gateway": member.gateway}
            yield Sent(scenario.start_ms, member.topic("registry"), _json(content))
    yield from _in_order(scenario, members)


def command_topics(scenario: Scenario) -> frozenset[str]:
    """Return the topics on which the devices of a fleet receive commands."""
    return frozenset(member.topic(COMMAND) for member in _members(scenario))


def _in_order(scenario: Scenario, members: list[_Member]) -> Iterator[Sent]:
    lives = [_behaviour(number, member)(member, _first(scenario, member)) for number, member in enumerate(members)]
    queue: list[tuple[int, int, TimedMessage]] = []
    for number, life in enumerate(lives):
        message = next(life, None)
        if message is not None:
            queue.append((message[0], number, message))
    heapq.heapify(queue)
    on_the_way: list[Sent] = []
    while queue:
        at_ms, number, (_, delay_ms, topic, payload) = heapq.heappop(queue)
        while on_the_way and on_the_way[0].received_at_ms <= at_ms:
            yield heapq.heappop(on_the_way)
        heapq.heappush(on_the_way, Sent(at_ms + delay_ms, topic, payload))
        message = next(lives[number], None)
        if message is not None:
            heapq.heappush(queue, (message[0], number, message))
    while on_the_way:
        yield heapq.heappop(on_the_way)


def _first(scenario: Scenario, member: _Member) -> int:
    return max(member.joins_ms, scenario.start_ms) + 1 + member.rng.randint(0, member.interval_ms)


def _behaviour(number: int, member: _Member) -> Behaviour:
    if number < len(BEHAVIOURS):
        return BEHAVIOURS[number]
    return member.rng.choice(_RARE) if member.rng.random() < 0.2 else _steady


def _members(scenario: Scenario) -> Iterator[_Member]:
    """Yield the devices of the fleet.

    Intervals are stretched, and devices join later, to keep the history within its budget.
    """
    names = tuple(CLASSES)
    rate = sum(scenario.history_ms / CLASSES[names[number % len(names)]][0] for number in range(scenario.devices))
    budget = scenario.max_history_messages * _BUDGET - scenario.devices
    budget = max(budget, 0.2 * scenario.max_history_messages)
    stretch = max(1.0, rate / budget)
    spent = 0.0
    for number in range(scenario.devices):
        device_class = names[number % len(names)]
        interval_ms, timeout = CLASSES[device_class]
        longest_ms = int(timeout.removesuffix("m")) * _MINUTE // 3
        interval_ms = min(int(interval_ms * stretch), longest_ms)
        spent += scenario.history_ms / interval_ms + 1
        over = spent - 0.9 * scenario.max_history_messages
        joins_ms = scenario.start_ms if over <= 0 else scenario.start_ms + scenario.history_ms + int(over * 50)
        site = SITES[number % len(SITES)] if scenario.devices > len(SITES) else SITES[0]
        yield _Member(
            f"{device_class}-{number:05d}",
            site,
            device_class,
            f"gw-{site}-{number % 4}",
            interval_ms,
            joins_ms,
            Random(f"{scenario.seed}:{number}"),
        )
