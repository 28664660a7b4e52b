"""Readiness: 200 only if the facts can be read and are fresh, otherwise 503 with the reason."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette

from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.home.home import Home
from fleetpulse.web.app import create_app
from fleetpulse.web.live import STALE_S
from tests.support.asgi import Client
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
