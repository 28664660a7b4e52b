"""Route of the modes over time: range, filters and errors."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlencode

import pytest

from fleetpulse.core.policy import parse_policy
from fleetpulse.core.replay import Deployment
from fleetpulse.core.times import HOUR_MS
from fleetpulse.web.access import User, WebRole
from fleetpulse.web.api import modes
from fleetpulse.web.app import create_app
from tests.support.asgi import LIMIT_S, Client
from tests.support.histories.histories import START, row, signal, tick
from tests.support.homes.homes import JudgedHome, empty

pytestmark = pytest.mark.unit
PATH = "/api/v1/fleet/modes"
RULES = parse_policy({"rules": {"timeout": "30m"}}).normalised()
IN_FORCE = row(0, "fleet/_/_/policy", policy=RULES, effective_from_s=-1000)
FIRST_MS = START // HOUR_MS * HOUR_MS


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    judged = JudgedHome(empty(tmp_path / "home", Deployment(10_000)))
    judged.land_and_judge(IN_FORCE, signal(10, "a"), signal(20, "b"), signal(6_000, "a"), tick(2 * 3_600))
    app = create_app(judged.home, hosts=("localhost",), authenticate=lambda _: User("test", WebRole.API_READER))
    app.state.live.start()
    try:
        yield Client(app)
    finally:
        app.state.live.stop()


def test_modes_are_those_of_the_last_day_before_the_frontier(client: Client) -> None:
    answer = client.get(PATH)
    content = answer.json()
    hours = content["hours"]
    assert len(hours) == 25 and hours[-1]["hour_ms"] == content["frontier_ms"] // HOUR_MS * HOUR_MS
    assert hours[-3:] == [
        {"hour_ms": FIRST_MS, "devices": {"offline": 2}},
        {"hour_ms": FIRST_MS + HOUR_MS, "devices": {"offline": 1, "online": 1}},
        {"hour_ms": FIRST_MS + 2 * HOUR_MS, "devices": {"offline": 1, "online": 1}},
    ]
    assert client.get(PATH, {"If-None-Match": answer.headers["etag"]}).status == 304


def test_range_and_filters_are_parameters(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"from": str(START), "to": str(START + 1), "site": "site", "class": "default"}
    first = client.get(f"{PATH}?{urlencode(given)}").json()["hours"]
    assert [one["hour_ms"] for one in first] == [FIRST_MS] and sum(first[0]["devices"].values()) == 2
    assert client.get(f"{PATH}?{urlencode({**given, 'site': 'other'})}").json()["hours"][0]["devices"] == {}
    monkeypatch.setattr(modes, "modes_over_time", None)
    assert client.get(f"{PATH}?{urlencode(given)}").json()["hours"] == first, "equal requests are read once"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"from": "noon"}, "instant-invalid"),
        ({"from": "5", "to": "4"}, "parameter-invalid"),
        ({"from": "0", "to": str(START)}, "parameter-invalid"),
        ({"site": "x" * 201}, "parameter-invalid"),
        ({"from": "9" * 30}, "instant-invalid"),
        ({"to": "9" * 15}, "parameter-invalid"),
    ],
)
def test_invalid_parameters_are_refused(client: Client, given: dict[str, str], code: str) -> None:
    answer = client.get(f"{PATH}?{urlencode({'from': str(START), **given})}")
    assert (answer.status, answer.json()["error"]["code"]) == (400, code)


def test_the_hours_in_memory_are_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A year of hours has several megabytes, and each pair of instants is a request of its own."""
    monkeypatch.setattr(client.app.state.modes, "_most", 100)  # type: ignore[attr-defined]
    for number in range(12):
        given = {"from": str(START - 23 * HOUR_MS + number), "to": str(START + number)}
        assert len(client.get(f"{PATH}?{urlencode(given)}").json()["hours"]) in (23, 24)
        known = client.app.state.modes._known  # type: ignore[attr-defined]
        assert 0 < sum(map(len, known.values())) <= 100


def test_requests_that_wait_for_the_tables_leave_threads_to_others(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    free, entered = Event(), list[str | None]()

    def read(*wanted: Any) -> list[dict[str, Any]]:
        entered.append(wanted[-1])
        free.wait(LIMIT_S)
        return []

    async def many() -> tuple[int, set[int]]:
        waiting = [asyncio.create_task(client.send(f"{PATH}?class={number}")) for number in range(60)]
        while not entered:
            await asyncio.sleep(0)
        other = await client.send("/api/v1/devices")
        free.set()
        return other.status, {one.status for one in await asyncio.gather(*waiting)}

    monkeypatch.setattr(modes, "modes_over_time", read)
    assert client.get("/api/v1/devices").status == 200
    try:
        assert client.run(asyncio.wait_for(many(), LIMIT_S / 2)) == (200, {200})
    finally:
        free.set()
