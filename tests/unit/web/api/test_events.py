"""Server-sent events: rows of the feed, continued by the id of the last event; bounded, and ended with the server."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.web.access import WebRole, grant_token, revoke_token
from fleetpulse.web.api import events
from fleetpulse.web.api.routes import PREFIX
from fleetpulse.web.app import create_app
from tests.support.api import Api
from tests.support.asgi import Answer, Client
from tests.support.histories.histories import signal, tick
from tests.support.homes.api_home import ApiHome, api_home

pytestmark = pytest.mark.unit
ADDRESS = f"{PREFIX}/transitions/events"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ApiHome:
    monkeypatch.setattr(events, "_POLL_S", 0.01)
    return api_home(tmp_path / "home")


@pytest.fixture
def api(made: ApiHome) -> Iterator[Api]:
    opened = Api(made.home)
    yield opened
    opened.close()


def _parsed(answer: Answer) -> list[tuple[str, str, Any]]:
    """Return id, type and data of each event."""
    found: list[tuple[str, str, Any]] = []
    for block in answer.text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
    return found


def _receive(api: Api, address: str, count: int, headers: dict[str, str] | None = None) -> list[tuple[str, str, Any]]:
    """Receive a number of events, and close the connection."""
    answer = api.client.run(api.client.send(address, headers or {}, on_part=lambda one: len(_parsed(one)) < count))
    assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, "text/event-stream"), answer.text
    return _parsed(answer)


def test_the_events_are_the_rows_of_the_feed(api: Api) -> None:
    rows = api.rows("/transitions/feed?after=oldest")["changes"]
    found = _receive(api, f"{ADDRESS}?after=oldest", len(rows))
    assert [data for _, _, data in found] == rows
    assert [(one, kind) for one, kind, _ in found] == [(row["cursor"], row["kind"]) for row in rows]


def test_a_client_continues_after_the_last_event(api: Api) -> None:
    rows = api.rows("/transitions/feed?after=oldest")["changes"]
    found = _receive(api, f"{ADDRESS}?after=oldest", len(rows) - 3, {"Last-Event-ID": rows[2]["cursor"]})
    assert [data["device_id"] for _, _, data in found] == [row["device_id"] for row in rows[3:]]


def test_a_new_commit_is_pushed(api: Api, made: ApiHome) -> None:
    def on_part(answer: Answer) -> bool:
        if not written:
            written.append(made.batch(signal(600, "fresh"), tick(620)))
        return not _parsed(answer)

    written: list[None] = []
    answer = api.client.run(api.client.send(ADDRESS, on_part=on_part))
    assert "fresh" in {data["device_id"] for _, _, data in _parsed(answer)}
    assert not answer.is_complete, "the client closed the connection"
    assert api.app.state.streams.open == 0


def test_a_comment_is_sent_while_nothing_changes(api: Api, made: ApiHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "HEARTBEAT_S", 0.0)
    answer = api.client.run(api.client.send(ADDRESS, on_part=lambda one: ": heartbeat" not in one.text))
    latest = DeltaLog(made.home.table(JUDGEMENTS.name)).latest()
    assert f": heartbeat\nid: {latest + 1}.0\n\n" in answer.text


def test_streams_end_with_the_server(api: Api) -> None:
    def on_part(_: Answer) -> bool:
        api.app.state.streams.close()
        return True

    answer = api.client.run(api.client.send(ADDRESS, on_part=on_part))
    assert answer.is_complete
    assert api.app.state.streams.open == 0


def test_a_stream_ends_after_its_token_is_revoked(made: ApiHome, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_part(_: Answer) -> bool:
        revoke_token(made.home, "program")
        return True

    monkeypatch.setattr(events, "HEARTBEAT_S", 0.0)
    headers = {"Authorization": f"Bearer {grant_token(made.home, 'program', WebRole.API_READER, 5)}"}
    app = create_app(made.home, hosts=("localhost",))
    client = Client(app)
    try:
        answer = client.run(client.send(ADDRESS, headers, on_part=on_part))
    finally:
        app.state.live.stop()
    assert (answer.status, answer.is_complete, app.state.streams.open) == (200, True, 0)
    assert [(kind, data["code"]) for _, kind, data in _parsed(answer)] == [("error", "not-authenticated")]


def test_the_number_of_streams_is_bounded(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_STREAMS", 2)

    async def several() -> tuple[list[Answer], Answer]:
        opened = asyncio.Event()

        def on_part(_: Answer) -> bool:
            if api.app.state.streams.open == 2:
                opened.set()
            return not refused.is_set()

        refused = asyncio.Event()
        monkeypatch.setattr(events, "HEARTBEAT_S", 0.0)
        streams = [asyncio.create_task(api.client.send(ADDRESS, on_part=on_part)) for _ in range(2)]
        await opened.wait()
        third = await api.client.send(ADDRESS)
        refused.set()
        return list(await asyncio.gather(*streams)), third

    streams, third = api.client.run(several())
    assert [one.status for one in streams] == [200, 200]
    assert (third.status, third.json()["error"]["code"]) == (503, "busy")
    assert api.app.state.streams.open == 0


def test_a_feed_that_cannot_be_continued_ends_with_an_error(api: Api, made: ApiHome) -> None:
    def on_part(_: Answer) -> bool:
        if not written:
            known = set(log.table.glob("kind=transition/*"))
            made.batch(signal(600, "fresh"), tick(620))
            written.extend(set(log.table.glob("kind=transition/*")) - known)
            for path in written:
                path.unlink()
        return True

    log = DeltaLog(made.home.table(JUDGEMENTS.name))
    written: list[Path] = []
    answer = api.client.run(api.client.send(ADDRESS, on_part=on_part))
    assert answer.is_complete
    assert [(kind, data["code"]) for _, kind, data in _parsed(answer)] == [("error", "cursor-expired")]


def test_a_wrong_cursor_is_an_error_with_its_status(api: Api) -> None:
    assert api.get("/transitions/events?after=x").status == 400
    assert api.get("/transitions/events?after=999.0").status == 410
    assert api.get("/transitions/events", method="HEAD").headers["content-type"] == "text/event-stream; charset=utf-8"
