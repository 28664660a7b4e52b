"""Publisher of verdicts: each change at least once, in order, across kills and lost messages."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.messages.verdicts import DISCOVERY_PREFIX, MARKER, discovery_topic, state_topic
from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from streaming import publisher as publisher_module
from streaming.publisher import VerdictPublisher, load_position
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import JudgedHome
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


class Kill(Exception):
    """End of the process."""


class BrokerStub:
    """Broker that keeps retained messages, and records what is published.

    Args:
        dies_at: topic at whose first message the publisher is killed.
    """

    def __init__(self) -> None:
        self.retained: dict[str, bytes] = {}
        self.sent: list[tuple[str, bytes]] = []
        self.dies_at: str | None = None

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        assert retain
        if topic == self.dies_at:
            self.dies_at = None
            raise Kill
        self.sent.append((topic, payload))
        self.retained[topic] = payload
        if not payload:
            del self.retained[topic]

    def flush(self) -> None:
        """Do nothing: all messages are acknowledged."""

    def states(self) -> dict[str, str]:
        """Return the retained mode of each device."""
        found = {topic: json.loads(payload) for topic, payload in self.retained.items() if topic.startswith("fleetpulse/state/")}
        assert all(topic == state_topic(state["device_id"]) for topic, state in found.items())
        return {state["device_id"]: state["mode"] for state in found.values()}

    def take(self) -> list[str]:
        """Return the topics published since the last call, without the marker."""
        taken, self.sent = [topic for topic, _ in self.sent if topic != MARKER], []
        return taken


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a home with the two tables of a lifecycle job."""
    home = Home(tmp_path / "home")
    home.prepare(Deployment(allowed_lateness_ms=1_000))
    for table in (MESSAGES, JUDGEMENTS):
        tables.create(home, table)
    return home


@pytest.fixture
def broker() -> BrokerStub:
    return BrokerStub()


def started(home: Home, broker: BrokerStub, prefix: str = "") -> VerdictPublisher:
    """Start a publisher, and publish until all devices are published."""
    publisher = VerdictPublisher(home, broker, prefix, broker.retained.get(MARKER))
    publisher.step()
    while not publisher.is_complete:
        publisher.step()
    return publisher


def transition(device: str, number: int, from_mode: str, to_mode: str, at_ms: int | None = None, **more: Any) -> dict[str, Any]:
    at = {"event_time_ms": START + 1_000 * number if at_ms is None else at_ms, "life_ms": START, "last_seen_ms": START}
    facts = {"kind": "transition", "device_id": device, "transition_no": number, "trigger": "signal"}
    return {**facts, **at, "from_mode": from_mode, "to_mode": to_mode, **more}


def commit(home: Home, *rows: dict[str, Any], writer: str = "job") -> None:
    number = tables.landed(home, JUDGEMENTS, writer) + 1
    tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), writer, number)


def online(home: Home, *devices: str) -> None:
    commit(home, *(transition(device, 1, "provisioned", "online") for device in devices))


def topics(*devices: str) -> list[str]:
    return [state_topic(device) for device in devices]


def test_the_published_modes_follow_a_judged_fleet(home: Home, broker: BrokerStub) -> None:
    judged = JudgedHome(home)
    policy = parse_policy({"rules": {"timeout": "60s", "forget_after": "10m"}}).normalised()
    judged.land_and_judge(row(0, "fleet/_/_/policy", policy=policy, effective_from_s=-3600), signal(1, "a"))
    judged.land_and_judge(signal(1, "b"), tick(5))
    publisher = started(home, broker)
    assert broker.states() == {"a": "online", "b": "online"}
    judged.land_and_judge(signal(50, "b"), tick(70))
    publisher.step()
    assert broker.states() == {"a": "offline", "b": "online"}
    judged.land_and_judge(tick(2_000))
    publisher.step()
    assert broker.states() == {}, "both are forgotten"


def test_each_change_is_published_once(home: Home, broker: BrokerStub) -> None:
    publisher = started(home, broker)
    online(home, "a", "b")
    publisher.step()
    assert broker.take() == topics("a", "b")
    publisher.step()
    assert broker.take() == []
    commit(home, {"kind": "summary", "key_group": 0, "counts": "{}"}, {"kind": "late", "device_id": "b"})
    commit(home, transition("a", 2, "online", "offline"), transition("a", 3, "offline", "online"))
    commit(home, transition("a", 4, "online", "degraded"))
    publisher.step()
    assert broker.take() == topics("a"), "only the newest mode is published"
    assert broker.states() == {"a": "degraded", "b": "online"}


def test_a_restart_publishes_only_what_changed_meanwhile(home: Home, broker: BrokerStub) -> None:
    online(home, "a", "b")
    started(home, broker)
    assert broker.take() == topics("a", "b")
    commit(home, transition("b", 2, "online", "offline"))
    started(home, broker)
    assert broker.take() == topics("b")


@pytest.mark.parametrize("dies_at", ["position", MARKER, state_topic("b")])
def test_a_kill_repeats_messages_with_the_same_content(
    dies_at: str, home: Home, broker: BrokerStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    online(home, "a", "b")
    publisher = started(home, broker)
    broker.take()
    commit(home, transition("a", 2, "online", "offline"), transition("b", 2, "online", "degraded"))
    commit(home, {"kind": "summary", "key_group": 0, "counts": "{}"})
    broker.dies_at = dies_at
    with monkeypatch.context() as patched:
        if dies_at == "position":
            patched.setattr(publisher_module, "atomic_write", lambda *_, **__: (_ for _ in ()).throw(Kill))
        with pytest.raises(Kill):
            publisher.step()
    broker.dies_at = None
    before = {topic: payload for topic, payload in broker.sent if topic != MARKER}
    started(home, broker)
    after = {topic: payload for topic, payload in broker.sent if topic != MARKER}
    assert {**after, **before} == after, "the same content again"
    assert broker.states() == {"a": "offline", "b": "degraded"}
    broker.take()
    started(home, broker)
    assert broker.take() == []


def test_messages_that_the_broker_lost_are_published_again(home: Home, broker: BrokerStub) -> None:
    online(home, "a", "b")
    publisher = started(home, broker)
    older = dict(broker.retained)
    commit(home, transition("b", 2, "online", "offline"))
    publisher.step()
    broker.take()
    broker.retained = dict(older)  # a broker that was killed may have an older store
    started(home, broker)
    assert broker.take() == topics("b")
    broker.retained.clear()
    started(home, broker)
    assert broker.take() == topics("a", "b")
    other = broker.retained.pop(MARKER)
    broker.retained[MARKER] = other.replace(b"token", b"other")
    started(home, broker)
    assert broker.take() == topics("a", "b")


def test_a_log_without_the_next_versions_leads_to_all_devices(home: Home, broker: BrokerStub) -> None:
    online(home, "a", "b")
    publisher = started(home, broker)
    online(home, "c")
    commit(home, transition("a", 2, "online", "forgotten"))
    log = home.table(JUDGEMENTS.name) / "_delta_log"
    tables.open_table(home.table(JUDGEMENTS.name)).create_checkpoint()
    for version in range(publisher.version + 2):  # a clean-up of the log removes the oldest versions
        (log / f"{version:020d}.json").unlink()
    for _ in range(3):
        publisher.step()
    assert publisher.is_complete
    assert broker.states() == {"b": "online", "c": "online"}
    assert state_topic("a") in broker.take()


def test_changes_during_the_publishing_of_all_devices_are_not_overwritten(
    home: Home, broker: BrokerStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "PART_DEVICES", 5)
    devices = [f"d{number}" for number in range(20)]
    online(home, *devices)
    paced: list[int] = []
    publisher = VerdictPublisher(home, broker, "", None, paced.append)
    number = 1
    while not publisher.is_complete:
        number += 1
        commit(home, *(transition(device, number, "online", "offline") for device in devices[:number]))
        publisher.step()
        assert load_position(home) is None or publisher.is_complete
    assert broker.states() == {device: "offline" if place < number else "online" for place, device in enumerate(devices)}
    assert number > 3, "there are several parts"
    assert sum(paced) == len(broker.take())


def test_the_rate_is_limited_and_a_stop_ends_the_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now_s = [100.0]
    monkeypatch.setattr(publisher_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    broker: Any = SimpleNamespace(pump=lambda wait_s: now_s.__setitem__(0, now_s[0] + wait_s))
    stop: Any = SimpleNamespace(is_set=lambda: now_s[0] > 200)
    pace = publisher_module._Pace(broker, stop)
    for _ in range(100):
        pace(publisher_module.RATE_PER_S)
    assert now_s[0] == pytest.approx(199)
    with refused("publisher-stopped"):
        pace(3 * publisher_module.RATE_PER_S)


def test_an_amendment_publishes_the_corrected_present(home: Home, broker: BrokerStub) -> None:
    online(home, "a", "b", "c")
    commit(home, transition("a", 2, "online", "offline"), transition("c", 2, "online", "offline"))
    publisher = started(home, broker)
    broker.take()
    amended = {"amendment_no": 1, "life_ms": START, "event_time_ms": START + 2_000, "device_id": "a"}
    past = transition("b", 0, "online", "offline", START + 500, kind=JudgementKind.ADD.value, amendment_no=1)
    gone = {"kind": "retract", "device_id": "c", "life_ms": START, "event_time_ms": START}
    commit(
        home,
        {**amended, "kind": "retract", "transition_no": 2},
        past,
        *({**gone, "transition_no": number, "amendment_no": number} for number in (1, 2)),
    )
    publisher.step()
    assert broker.states() == {"a": "online", "b": "online"}, "an addition in the past is not the present"
    assert broker.take() == topics("a", "b", "c")


def test_rows_of_an_outbox_do_not_replace_a_newer_mode(home: Home, broker: BrokerStub) -> None:
    online(home, "a")
    commit(home, transition("a", 3, "offline", "degraded"))
    publisher = started(home, broker)
    commit(home, transition("a", 2, "online", "offline"), writer="unsaid-1")
    publisher.step()
    assert broker.states() == {"a": "degraded"}


def test_discovery_is_published_when_a_device_appears_and_removed_when_it_leaves(home: Home, broker: BrokerStub) -> None:
    config = discovery_topic(DISCOVERY_PREFIX, "a")
    publisher = started(home, broker, DISCOVERY_PREFIX)

    def step(*rows: dict[str, Any]) -> Sequence[str]:
        commit(home, *rows)
        publisher.step()
        return broker.take()

    assert step(transition("a", 1, "provisioned", "online")) == [state_topic("a"), config]
    assert step(transition("a", 2, "online", "offline")) == [state_topic("a")]
    assert step(transition("a", 3, "offline", "decommissioned")) == [config, state_topic("a")]
    assert not broker.retained.keys() & {config, state_topic("a")}
    assert step(transition("a", 4, "decommissioned", "provisioned")) == [state_topic("a"), config]
    started(home, broker, "plant")
    assert config not in broker.retained, "a changed prefix removes the former messages"
    assert discovery_topic("plant", "a") in broker.retained


def test_a_home_without_judgements_publishes_nothing(tmp_path: Path, broker: BrokerStub) -> None:
    home = Home(tmp_path / "new")
    home.prepare(None)
    assert started(home, broker).is_complete
    assert broker.take() == []
