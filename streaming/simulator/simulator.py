"""Simulated fleet: replay its history at full speed, then publish in real time."""

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import structlog

from fleetpulse.core.policy import Policy, from_normalised, parse_policy
from fleetpulse.core.rows import EVERYONE, Kind
from fleetpulse.core.scenario import Scenario, Sent, scenario_policy, simulate
from fleetpulse.io.home.command_spool import spool
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.recording import RecordedMessage
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.system.process import StopSignal, read_status, write_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from streaming.simulator.replay_publisher import play

_LOG: Final = structlog.get_logger("simulator")


@dataclass(frozen=True, slots=True)
class SimulatedFleet:
    """Simulated fleet of a home, as recorded when it was created.

    Attributes:
        scenario: parameters of the simulation.
        policy: policy by which the fleet is judged.
    """

    scenario: Scenario
    policy: Policy

    @classmethod
    def begin(cls, seed: int, devices: int, now_ms: int, policy: Policy | None) -> "SimulatedFleet":
        """Create a fleet whose history ends now."""
        policy = policy or parse_policy(scenario_policy())
        longest_ms = max(rules.timeout_ms for rules in (policy.rules, *policy.classes.values()))
        history_ms = max(2 * longest_ms, 60 * 60_000) + 15 * 60_000
        return cls(Scenario(seed, devices, now_ms - history_ms, history_ms), policy)

    @property
    def recording(self) -> str:
        """Id of the recording with the fleet's history."""
        return f"simulated-{self.scenario.seed}-{self.scenario.start_ms}"

    def history(self) -> Iterator[RecordedMessage]:
        """Yield the policy, then the endless sequence of messages that the fleet sends."""
        content = {"policy": self.policy.normalised(), "effective_from": 0}
        topic = f"fleet/{EVERYONE}/{EVERYONE}/{Kind.POLICY.value}"
        first = RecordedMessage(self.scenario.start_ms, topic, json.dumps(content, separators=(",", ":")).encode())
        sent = (RecordedMessage(one.received_at_ms, one.topic, one.payload) for one in simulate(self.scenario))
        return chain([first], sent)

    def remember(self, home: Home) -> None:
        """Record the fleet in the home, so that a later start continues with it."""
        atomic_write(_file(home), json.dumps({"scenario": asdict(self.scenario), "policy": self.policy.normalised()}))


def _file(home: Home) -> Path:
    return home.path / "scenario.json"


def load_fleet(home: Home) -> SimulatedFleet | None:
    """Return the simulated fleet of a home; None if it has none."""
    try:
        content: Any = json.loads(_file(home).read_text())
    except FileNotFoundError:
        return None
    return SimulatedFleet(Scenario(**content["scenario"]), from_normalised(content["policy"]))


class HistoryUpToNow:
    """History up to the present, and the first message after it."""

    def __init__(self, history: Iterator[RecordedMessage], now_ms: Callable[[], int]) -> None:
        self.history = history
        self.now_ms = now_ms
        self.next: RecordedMessage | None = None
        self.through_ms = 0

    def __iter__(self) -> Iterator[RecordedMessage]:
        for recorded in self.history:
            if recorded.received_at_ms > self.now_ms():
                self.next = recorded
                return
            self.through_ms = recorded.received_at_ms
            yield recorded


def run_simulator(home: Home, address: BrokerAddress, stop: StopSignal, *, play_history: bool) -> None:
    """Publish the messages of a home's simulated fleet until stopped.

    Args:
        home: home of the fleet.
        address: address of the broker.
        stop: signal to end.
        play_history: whether to replay the messages up to now first; otherwise they are skipped.
    """
    simulated = load_fleet(home)
    if simulated is None:
        _LOG.error("no simulated fleet in this home")
        return
    past = HistoryUpToNow(simulated.history(), wall_clock_ms)
    with Publisher(address, f"fleetpulse-simulator-{secrets.token_hex(8)}", cancelled=stop.is_set) as publisher:
        if play_history:
            _await_bridge(home, stop)
            _write_status(home, "history", publisher)
            play(past, simulated.recording, publisher, stopped=stop.is_set)
        else:
            for _ in past:  # messages of the past are skipped
                pass
        live = (Sent(one.received_at_ms, one.topic, one.payload) for one in past.history)
        if past.next is not None:
            live = chain([Sent(past.next.received_at_ms, past.next.topic, past.next.payload)], live)
        _keep_pace(home, live, publisher, stop)


def _await_bridge(home: Home, stop: StopSignal) -> None:
    """Wait until the bridge has subscribed, so that it receives the first line, too."""
    while not read_status(home.run("bridge")).get("subscribed") and not stop.wait(0.1):
        pass


def _keep_pace(home: Home, live: Iterator[Sent], publisher: Publisher, stop: StopSignal) -> None:
    status_at = 0.0
    for sent in live:
        while (wait_s := (sent.received_at_ms - wall_clock_ms()) / 1000) > 0:
            if stop.wait(min(wait_s, 0.5)):
                return
        if stop.is_set():
            return
        if sent.topic.endswith("/registry"):
            spool(home, [(sent.topic, json.loads(sent.payload))])
        else:
            publisher.publish(sent.topic, sent.payload)
        if time.monotonic() - status_at > 1:
            _write_status(home, "live", publisher)
            status_at = time.monotonic()


def _write_status(home: Home, state: str, publisher: Publisher) -> None:
    write_status(home.run("simulator"), {"pid": os.getpid(), "state": state, "published": publisher.published})
