"""Simulated fleet: replay its history at full speed, then publish in real time and answer commands."""

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
from fleetpulse.io.home.command_spool import spool
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.recording import RecordedMessage
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.mqtt.subscriber import Receiver
from fleetpulse.io.system.fsync import atomic_write
from fleetpulse.io.system.process import StopSignal, read_status, write_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from streaming.simulator.devices import SimulatedDevices
from streaming.simulator.replay_publisher import play
from streaming.simulator.scenario import Scenario, Sent, scenario_policy, simulate

_LOG: Final = structlog.get_logger("simulator")
_COMMANDS: Final = "fleet/+/+/command"
_STEP_S: Final = 0.2  # longest wait for a command: answers are due within that time


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
        answers = CommandAnswers(home, simulated.scenario, address, publisher)
        try:
            _keep_pace(home, live, publisher, answers, stop)
        finally:
            answers.close()


def _await_bridge(home: Home, stop: StopSignal) -> None:
    """Wait until the bridge has subscribed, so that it receives the first line, too."""
    while not read_status(home.run("bridge")).get("subscribed") and not stop.wait(0.1):
        pass


class CommandAnswers:
    """Answers of the simulated devices to commands, by one connection for all devices.

    Args:
        home: home of the fleet; it keeps the state of the devices.
        scenario: scenario of the fleet.
        address: address of the broker.
        publisher: publisher of the answers.
    """

    def __init__(self, home: Home, scenario: Scenario, address: BrokerAddress, publisher: Publisher) -> None:
        self._file, self._publisher = home.path / "scenario-devices.json", publisher
        self.devices = SimulatedDevices(scenario, _load_devices(self._file))
        self._receiver = Receiver(address, f"fleetpulse-simulator-{secrets.token_hex(8)}", (_COMMANDS,), persistent=False)
        self._saved, self._save_at_s = 0, 0.0

    def step(self, timeout_s: float) -> None:
        """Take the commands that arrive within a time, and publish the answers that are due."""
        arrived = self._receiver.poll(timeout_s)
        for one in arrived:
            self.devices.receive(one.topic, one.payload, wall_clock_ms())
        self._receiver.ack(one.token for one in arrived)
        for answer in self.devices.due(wall_clock_ms()):
            self._publisher.publish(answer.topic, answer.payload)
        if self.devices.changes != self._saved and time.monotonic() >= self._save_at_s:
            self._save()

    def _save(self) -> None:
        self._saved, self._save_at_s = self.devices.changes, time.monotonic() + 1
        atomic_write(self._file, json.dumps(self.devices.to_plain()))

    def close(self) -> None:
        """Disconnect, and keep the state of the devices."""
        self._receiver.close()
        if self.devices.changes != self._saved:
            self._save()


def _load_devices(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _keep_pace(home: Home, live: Iterator[Sent], publisher: Publisher, answers: CommandAnswers, stop: StopSignal) -> None:
    status_at = 0.0
    for sent in live:
        while (wait_s := (sent.received_at_ms - wall_clock_ms()) / 1000) > 0:
            if stop.is_set():
                return
            answers.step(min(wait_s, _STEP_S))
        if stop.is_set():
            return
        answers.step(0.0)
        if sent.topic.endswith("/registry"):
            spool(home, [(sent.topic, json.loads(sent.payload))])
        elif (adapted := answers.devices.adapted(sent)) is not None:
            publisher.publish(adapted.topic, adapted.payload)
        if time.monotonic() - status_at > 1:
            _write_status(home, "live", publisher)
            status_at = time.monotonic()


def _write_status(home: Home, state: str, publisher: Publisher) -> None:
    write_status(home.run("simulator"), {"pid": os.getpid(), "state": state, "published": publisher.published})
