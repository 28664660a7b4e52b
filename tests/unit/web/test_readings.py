"""Requests that read tables: their number is limited, for the API and for pages, and a known device is not searched."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from fleetpulse.core.errors import FleetError
from fleetpulse.web import live, readings
from tests.support.asgi import Answer, Client
from tests.support.homes.api_home import api_home
from tests.support.page_client import served

pytestmark = pytest.mark.unit
OF_TABLES = (
    "/api/v1/late", "/api/v1/devices/a", "/api/v1/devices/a/why", "/devices/a/messages", "/devices/a/past", "/devices/a/streams",
    "/devices/a?span=all", "/devices/a?why=1", "/past", "/quality", "/stream/sessions", "/stream/vitals?device=a",
)  # fmt: skip
OF_MEMORY = ("/api/v1/fleet", "/", "/devices?q=a", "/devices/a", "/changes")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with served(api_home(tmp_path_factory.mktemp("read") / "home").home) as opened:
        assert opened.get("/").status == 200
        yield opened


def busy(client: Client, address: str) -> Answer:
    """Return the answer to a request while others read tables on all cores."""
    limiter = client.app.state.readings
    holders = [object() for _ in range(int(limiter.total_tokens))]

    async def occupied() -> Answer:
        for one in holders:
            limiter.acquire_on_behalf_of_nowait(one)
        try:
            return await client.send(address)
        finally:
            for one in holders:
                limiter.release_on_behalf_of(one)

    return client.run(occupied())


def test_requests_that_read_tables_wait_for_a_core(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "QUERY_S", 0.01)
    for address in OF_TABLES:
        answer = busy(client, address)
        assert (answer.status, "too many requests" in answer.text) == (503, True), address
        if address.startswith("/api"):
            assert answer.json()["error"]["code"] == "busy"
    for address in OF_MEMORY:
        assert busy(client, address).status == 200, address
    for address in OF_TABLES[:4]:
        assert client.get(address).status == 200, address


def test_tables_are_searched_only_for_a_device_that_is_not_in_memory(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = list[str]()
    monkeypatch.setattr(live, "require_known", lambda _home, device_id: searched.append(device_id))
    for address in ("/api/v1/devices/a/messages", "/api/v1/devices/a/twin", "/devices/a/messages", "/devices/a/past"):
        assert client.get(address).status == 200, address
    assert searched == []
    client.get("/api/v1/devices/unheard/messages")
    assert searched == ["unheard"]


def test_a_page_waits_for_the_facts_without_a_core(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def unloaded() -> NoReturn:
        raise FleetError("the facts of the fleet are not loaded yet", code="facts-not-loaded")

    monkeypatch.setattr(readings, "QUERY_S", 0.01)
    monkeypatch.setattr(client.app.state.live, "reached", unloaded)
    for address in ("/past", "/devices/a/messages"):
        assert "not loaded yet" in busy(client, address).text, address


def test_the_api_of_tables_does_not_wait_for_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = api_home(tmp_path / "home")
    monkeypatch.setattr(live.LiveFleet, "_refresh", lambda _fleet: None)  # the first load lasts
    monkeypatch.setattr(live, "_FIRST_S", 0.01)
    with served(made.home) as opened:
        for part in ("messages", "twin", "vitals"):
            assert opened.get(f"/api/v1/devices/a/{part}").status == 200, part
            assert opened.get(f"/api/v1/devices/unheard/{part}").status == 404, part
