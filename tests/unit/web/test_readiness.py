"""Readiness: 200 only if the facts can be read and are fresh, otherwise 503 with the reason."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
from starlette.applications import Starlette

from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.home.home import Home
from fleetpulse.web.app import create_app
from fleetpulse.web.live import STALE_S
from fleetpulse.web.readiness import MOST_WAITING
from tests.support.asgi import LIMIT_S, Client
from tests.support.homes.served import small_fleet

pytestmark = pytest.mark.unit


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return small_fleet(tmp_path / "home").home


@pytest.fixture
def app(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starlette]:
    monkeypatch.setattr("fleetpulse.web.readiness.WAIT_S", 10.0)
    made = create_app(home, hosts=("localhost",))
    made.state.live.start()
    yield made
    made.state.live.stop()


def _refused(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setattr("fleetpulse.web.readiness.WAIT_S", 0.5)
    answer = Client(app).get("/readyz")
    assert answer.status == 503
    return answer.json()["error"]["code"], answer.json()["error"]["message"]


def test_a_server_with_fresh_facts_is_ready_without_a_login(app: Starlette) -> None:
    assert Client(app).get("/readyz").json() == {"status": "ready"}
    assert Client(app).get("/healthz").status == 200


def test_a_server_whose_facts_cannot_be_read_is_not_ready(app: Starlette, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = home.table(JUDGEMENTS.name) / "_delta_log" / f"{0:020d}.json"
    content = commit.read_text()
    commit.write_text("damaged")
    code, text = _refused(app, monkeypatch)
    assert code == "facts-not-loaded"
    assert "not loaded yet" in text and "cannot be read" in text and "try again" in text
    assert str(home.path) not in text and "HOME" in text, "everybody may ask"
    assert Client(app).get("/healthz").status == 200, "the process runs"
    commit.write_text(content)
    monkeypatch.setattr("fleetpulse.web.readiness.WAIT_S", 10.0)
    assert Client(app).get("/readyz").status == 200, "the next refresh succeeds"


def test_a_server_with_old_facts_is_not_ready(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Client(app).get("/readyz").status == 200
    live = app.state.live
    live.stop()
    live._refreshed_s -= 3 * STALE_S
    code, text = _refused(app, monkeypatch)
    assert code == "facts-stale"
    assert "45 s ago" in text and "within 15 s" in text and "./fleet status" in text


def test_a_server_whose_newest_refresh_failed_is_not_ready(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Client(app).get("/readyz").status == 200
    app.state.live.stop()
    app.state.live.fault = "the disk is away"
    assert "(the disk is away)" in _refused(app, monkeypatch)[1]


def test_a_server_that_nobody_asked_for_a_while_refreshes_and_is_ready(app: Starlette) -> None:
    assert Client(app).get("/readyz").status == 200
    app.state.live._refreshed_s -= 1_000
    assert Client(app).get("/readyz").status == 200
    assert app.state.live.age_s < STALE_S


def test_requests_that_wait_leave_threads_to_users(app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may send them, so they must not hold the threads of requests with a login."""
    free, entered = Event(), list[float]()

    def await_fresh(limit_s: float) -> bool:
        entered.append(limit_s)
        return free.wait(LIMIT_S)

    async def many() -> tuple[int, int]:
        waiting = [asyncio.create_task(client.send("/readyz")) for _ in range(60)]
        while len(entered) < MOST_WAITING:
            await asyncio.sleep(0)
        refused = await asyncio.wait_for(client.send("/api/v1/fleet"), LIMIT_S)
        free.set()
        return refused.status, len([one for one in await asyncio.gather(*waiting) if one.status == 200])

    monkeypatch.setattr(app.state.live, "await_fresh", await_fresh)
    client = Client(app)
    try:
        assert client.run(many()) == (401, 60)
    finally:
        free.set()
