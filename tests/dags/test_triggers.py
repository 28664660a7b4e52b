"""Triggers over real Delta logs, checkpoints and a real broker: events, their rate, and restarts."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from fleetpulse.core.replay import Deployment
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.address import BrokerAddress, save_address
from fleetpulse.io.mqtt.alerts import send
from fleetpulse.io.mqtt.embedded.broker import Broker
from tests.support.airflow import OF_AIRFLOW
from tests.support.airflow_tasks import batch
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import JudgedHome, commit_batch, empty

pytestmark = OF_AIRFLOW


async def first(trigger: Any, within_s: float = 60.0) -> Any:
    """Return the payload of a trigger's first event, after the trigger has had time to save its position."""
    events = trigger.run()
    event = await asyncio.wait_for(anext(events), within_s)
    continuing = asyncio.ensure_future(anext(events, None))
    await asyncio.sleep(0.3)
    continuing.cancel()
    await asyncio.gather(continuing, return_exceptions=True)
    await events.aclose()
    return event.payload


async def is_quiet(trigger: Any, for_s: float = 0.4) -> bool:
    """Return whether a trigger emits no event for a while."""
    events = trigger.run()
    try:
        await asyncio.wait_for(anext(events), for_s)
    except TimeoutError:
        return True
    finally:
        await events.aclose()
    return False


def rows(count: int, kind: str = "late") -> pa.Table:
    return pa.table({"kind": [kind] * count, "number": list(range(count))})


@pytest.fixture
def watch(tmp_path: Path) -> Callable[..., Any]:
    """Return a factory of watchers of one table, which creates them as the triggerer does after a restart."""
    from fleetpulse.orchestration.triggers import DeltaLogWatch

    def create(**given: Any) -> Any:
        defaults = {
            "table": str(tmp_path / "table"),
            "notes": str(tmp_path / "notes"),
            "name": "late",
            "every_s": 0.02,
            "least_s": 0.0,
        }
        name, kwargs = DeltaLogWatch(**{**defaults, **given}).serialize()
        assert name == "fleetpulse.orchestration.triggers.DeltaLogWatch"
        return DeltaLogWatch(**kwargs)

    return create


def append(tmp_path: Path, table: pa.Table) -> None:
    write_deltalake(str(tmp_path / "table"), table, mode="append", partition_by=["kind"])


def test_a_log_watcher_reports_new_rows_and_resumes_after_a_restart(tmp_path: Path, watch: Any) -> None:
    append(tmp_path, rows(5))  # before the watcher starts

    async def scenario() -> list[Any]:
        events: list[Any] = [await is_quiet(watch())]
        append(tmp_path, rows(3))
        events.append(await first(watch()))
        events.append(await is_quiet(watch()))
        append(tmp_path, rows(2))  # while no triggerer runs
        append(tmp_path, rows(4))
        events.append(await first(watch()))
        events.append(await is_quiet(watch()))
        return events

    assert asyncio.run(scenario()) == [
        True,
        {"table": "table", "from_version": 0, "version": 1, "rows": 3},
        True,
        {"table": "table", "from_version": 1, "version": 3, "rows": 6},
        True,
    ]


def test_an_event_of_late_messages_contains_the_position_of_the_job(tmp_path: Path, watch: Any) -> None:
    from fleetpulse.orchestration.assets import CONFIG, LATE

    home = empty(tmp_path / "home", Deployment())
    append(tmp_path, rows(1))

    async def scenario() -> list[Any]:
        events: list[Any] = [await is_quiet(watch(home=str(home.path)))]
        append(tmp_path, rows(1))
        events.append(await first(watch(home=str(home.path))))  # before the first batch
        commit_batch(home.checkpoint, 4, START)
        append(tmp_path, rows(2))
        events.append(await first(watch(home=str(home.path))))
        return events

    _, before, after = asyncio.run(scenario())
    assert before == {"table": "table", "from_version": 0, "version": 1, "rows": 1}
    reached = judged_up_to(home.checkpoint)
    assert reached is not None
    assert after == {**before, "from_version": 1, "version": 2, "rows": 2, "batch": 4, "received_at_ms": reached[1]}
    assert [vars(watcher.trigger)["home"] for watcher in LATE.watchers] == [str(CONFIG.home)]


def test_a_rewrite_or_a_commit_to_another_partition_gives_no_event(tmp_path: Path, watch: Any) -> None:
    for _ in range(2):
        append(tmp_path, rows(1))

    async def scenario() -> list[Any]:
        events: list[Any] = [await is_quiet(watch(part="kind=late"))]
        DeltaTable(str(tmp_path / "table")).optimize.compact()
        append(tmp_path, rows(7, "transition"))
        events.append(await is_quiet(watch(part="kind=late")))
        append(tmp_path, rows(2))
        events.append(await first(watch(part="kind=late")))
        return events

    assert asyncio.run(scenario()) == [True, True, {"table": "table", "from_version": 3, "version": 4, "rows": 2}]


def test_the_rate_of_events_of_a_log_is_limited_across_restarts(tmp_path: Path, watch: Any) -> None:
    append(tmp_path, rows(1))

    async def scenario() -> list[Any]:
        events: list[Any] = [await is_quiet(watch(least_s=600.0))]
        append(tmp_path, rows(1))
        events.append((await first(watch(least_s=600.0)))["rows"])
        append(tmp_path, rows(1))
        events.append(await is_quiet(watch(least_s=600.0)))
        append(tmp_path, rows(1))
        events.append((await first(watch(least_s=0.0)))["rows"])
        return events

    assert asyncio.run(scenario()) == [True, 1, True, 2]


def test_a_log_cleared_while_events_are_held_back_gives_no_event(tmp_path: Path, watch: Any) -> None:
    append(tmp_path, rows(1))
    log = tmp_path / "table" / "_delta_log"

    async def scenario() -> list[Any]:
        events: list[Any] = [await is_quiet(watch())]
        append(tmp_path, rows(1))
        events.append((await first(watch()))["rows"])
        for _ in range(3):
            append(tmp_path, rows(1, "transition"))
        events.append(await is_quiet(watch(least_s=600.0, part="kind=late")))
        for version in range(4):
            (log / f"{version:020d}.json").unlink()
        events.append(await is_quiet(watch(least_s=600.0, part="kind=late")))
        events.append(await is_quiet(watch(part="kind=late")))
        return events

    assert asyncio.run(scenario()) == [True, 1, True, True, True]


def test_a_watcher_waits_for_a_table_that_does_not_exist_yet(tmp_path: Path, watch: Any) -> None:
    async def scenario() -> list[Any]:
        events: list[Any] = [await is_quiet(watch())]
        append(tmp_path, rows(1))
        events.append(await first(watch()))
        return events

    assert asyncio.run(scenario()) == [True, {"table": "table", "from_version": -1, "version": 0, "rows": 1}]


def test_an_undelivered_event_is_emitted_again(tmp_path: Path, watch: Any) -> None:
    append(tmp_path, rows(1))

    async def scenario() -> list[Any]:
        await is_quiet(watch())
        append(tmp_path, rows(3))
        interrupted = watch().run()
        undelivered = (await anext(interrupted)).payload
        await interrupted.aclose()  # the triggerer died before it delivered the event
        return [undelivered, await first(watch())]

    undelivered, again = asyncio.run(scenario())
    assert undelivered == again


def test_a_wait_for_a_batch_ends_when_the_batch_is_committed(tmp_path: Path) -> None:
    from fleetpulse.orchestration.triggers import StreamAtBatch

    def waits(until_s: float = 2e9) -> Any:
        return StreamAtBatch(home=str(tmp_path), wanted=3, until_s=until_s, every_s=0.02)

    async def scenario() -> list[Any]:
        events: list[Any] = [await is_quiet(waits())]
        batch(tmp_path, 2)
        events += [await is_quiet(waits()), (await anext(waits(time.time()).run())).payload]
        batch(tmp_path, 4)
        return [*events, (await anext(waits().run())).payload]

    assert asyncio.run(scenario()) == [
        True,
        True,
        {"reached": False, "wanted": 3, "at": 2},
        {"reached": True, "wanted": 3, "at": 4},
    ]


def test_a_wait_for_the_frontier_times_out_and_reports_the_frontier(tmp_path: Path) -> None:
    from fleetpulse.orchestration.triggers import FrontierPast

    trigger = FrontierPast(home=str(tmp_path), wanted=1_000, until_s=time.time())
    assert FrontierPast(**trigger.serialize()[1]).serialize() == trigger.serialize()

    async def only() -> Any:
        return (await anext(trigger.run())).payload

    assert asyncio.run(only()) == {"reached": False, "wanted": 1_000, "at": None}


def test_the_frontier_of_the_trigger_subtracts_lateness_and_jitter(tmp_path: Path) -> None:
    from fleetpulse.orchestration.triggers import FrontierPast

    judged = JudgedHome(empty(tmp_path / "home", Deployment(10_000, verdict_jitter_ms=60_000)))
    judged.land_and_judge(signal(0), tick(100))
    assert FrontierPast.look(str(judged.home.path)) == START + (100 - 10 - 60) * 1000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[tuple[Home, BrokerAddress]]:
    """Return a home whose broker runs."""
    home = Home(tmp_path / "home")
    home.prepare(None)
    running = Broker(home.broker, home.broker_log, port=0)
    address = running.start()
    save_address(home.run("broker"), address)
    yield home, address
    running.stop()


def test_alerts_sent_without_a_triggerer_are_reported_when_one_starts(broker: tuple[Home, BrokerAddress]) -> None:
    from fleetpulse.orchestration.triggers import AlertWatch

    home, address = broker

    def watching() -> Any:
        return AlertWatch(**AlertWatch(home=str(home.path), topic="fleetpulse/alert/#", least_s=0.3, every_s=0.02).serialize()[1])

    async def scenario() -> list[Any]:
        reported: list[Any] = [await is_quiet(watching(), 1.0)]
        send(address, "gateway", "fleetpulse/alert/oslo", b"smoke")  # while no trigger listens
        send(address, "gateway", "fleetpulse/alert/rome", b"water")
        events = watching().run()
        payload = (await asyncio.wait_for(anext(events), 60)).payload
        if payload["count"] == 1:  # they may arrive in separate events
            payload["alerts"] += (await asyncio.wait_for(anext(events), 60)).payload["alerts"]
        reported.append(payload["alerts"])
        continuing = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.5)
        continuing.cancel()
        await asyncio.gather(continuing, return_exceptions=True)
        await events.aclose()
        return [*reported, await is_quiet(watching(), 1.0)]

    assert asyncio.run(scenario()) == [
        True,
        [{"topic": "fleetpulse/alert/oslo", "payload": "smoke"}, {"topic": "fleetpulse/alert/rome", "payload": "water"}],
        True,
    ]


def test_a_failure_is_reported_by_webhook_and_topic_once_an_hour_without_errors(broker: tuple[Home, BrokerAddress]) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    from fleetpulse.io.mqtt.alerts import AlertSubscription
    from fleetpulse.orchestration.config import OrchestrationConfig
    from fleetpulse.orchestration.notifications import notify

    home, address = broker
    posted: list[Any] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    listening = AlertSubscription(address, home.session("test"), "fleetpulse/failed/#")
    deadline_s = time.monotonic() + 60
    while not listening.subscribed and time.monotonic() < deadline_s:
        listening.run_once(0.1)
    failure = {"dag": "fleet_migrate", "run": "manual", "task": "gate", "reason": "3 rows fail\nand more"}
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        place = OrchestrationConfig("fleet", home.path, webhook=f"http://127.0.0.1:{server.server_port}/")
        assert notify(place, failure) == ["webhook", "topic"]
        assert notify(place, failure) == []
        assert notify(place, {**failure, "reason": "4 rows fail"}) == []
        assert notify(place, {**failure, "reason": "another sentence"}) == ["webhook", "topic"]
        server.shutdown()
    while len(listening.waiting) < 2 and time.monotonic() < deadline_s:
        listening.run_once(0.1)
    received = [(topic, json.loads(payload)) for topic, payload in listening.newest(9)]
    listening.close()
    assert [topic for topic, _ in received] == ["fleetpulse/failed/fleet_migrate"] * 2
    assert posted == [payload for _, payload in received]
    assert posted[0]["reason"] == "3 rows fail"
    unreachable = OrchestrationConfig("fleet", home.path / "none", webhook="http://127.0.0.1:1/")
    assert notify(unreachable, failure) == [] and not unreachable.data_folder.exists(), (
        "an undelivered notification is not recorded"
    )
    unwritable = OrchestrationConfig("fleet", Path("/dev/null/none"), webhook="http://127.0.0.1:1/")
    assert notify(unwritable, failure) == []


@pytest.mark.parametrize(
    ("sentence", "same"),
    [
        ("the job is stale: it has judged nothing for 59m30s, and is 1h behind", True),
        ("the job is stale: it has judged nothing for 12h, and is 1d2h5m behind", True),
        ("the job is stale: it has judged nothing for 1m, and is 250ms behind", True),
        ("the job is stale: it has judged nothing for 2m30s, and is 0.5s behind", True),
        ("the job is down: no run or service of it is active", False),
    ],
)
def test_failures_that_differ_only_in_numbers_are_the_same(sentence: str, same: bool) -> None:
    from fleetpulse.orchestration.notifications import _mark

    failure = {
        "dag": "a",
        "run": "scheduled__1",
        "task": "b",
        "reason": "the job is stale: it has judged nothing for 11m, and is 1,200ms behind",
    }
    assert (_mark({**failure, "reason": sentence}) == _mark(failure)) == same
