"""Routes about devices: pages, filters, files, one device, and explanations."""

import asyncio
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from cli.commands.inspect import status, why
from fleetpulse.reports.present.mirror import LISTED
from fleetpulse.web import queries
from fleetpulse.web.api import answers
from fleetpulse.web.api.routes import PREFIX
from tests.support.api import Api
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.api_home import ODD, ApiHome, api_home

pytestmark = pytest.mark.unit
_COLUMN = {"since": "since_ms", "device": "device_id", "site": "site", "class": "device_class", "mode": "mode"}


def _walk(api: Api, address: str, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = ""
    while after is not None:
        page = api.rows(f"{address}&after={after}")
        found += page[name]
        after = page["next"]
        assert len(found) <= 100, "the pages end"
    return found


@settings(max_examples=10)
@given(sort=st.sampled_from(queries.SORT_KEYS), limit=st.integers(1, 15))
def test_the_pages_of_each_order_have_each_device_once(api: Api, sort: str, limit: int) -> None:
    found = _walk(api, f"/devices?sort={sort}&limit={limit}", "devices")
    everything = api.rows("/devices?limit=1000")["devices"]
    column = _COLUMN[sort.removeprefix("-")]
    wanted = sorted(everything, key=lambda row: row["device_id"])
    none = -1 if column == "since_ms" else ""
    wanted = sorted(wanted, key=lambda row: none if row[column] is None else row[column], reverse=sort.startswith("-"))
    if sort == "-device":
        assert [row["device_id"] for row in found] == sorted((row["device_id"] for row in everything), reverse=True)
    assert [row["device_id"] for row in found] == [row["device_id"] for row in wanted]


@pytest.mark.parametrize("text", ["%", "_", '"', "'", "ünï", "ÜNÏ", "<script>", "SITE-7/", ";", "hx-"])
def test_a_search_finds_the_ids_that_contain_the_text(api: Api, text: str) -> None:
    found = {row["device_id"] for row in api.rows(f"/devices?q={quote(text)}")["devices"]}
    everything = {row["device_id"] for row in api.rows("/devices?limit=1000")["devices"]}
    assert found == {one for one in everything if text.lower() in one.lower()}
    assert found


def test_filters_facets_and_the_count_agree(api: Api) -> None:
    page = api.rows("/devices?mode=offline,online&site=south&facets=mode,site,mode&limit=3")
    assert page["count"] == len(ODD)
    assert page["facets"] == {"mode": [{"value": "offline", "n": len(ODD)}], "site": [{"value": "south", "n": len(ODD)}]}
    assert api.rows("/devices?limit=1")["facets"] == {}
    assert [row["device_id"] for row in api.rows("/devices?never_seen=true")["devices"]] == ["silent"]
    assert set(page["devices"][0]) == {f"{name}_ms" if name in ("since", "last_seen") else name for name in LISTED}


@pytest.mark.parametrize(
    "after", ["x", "bnVsbA==", "WzFd", quote("WyJhIiwgImIiXQ=="), "W10=", "5", "W1tbW1tb" * 500, "WzllOTksICJhIl0="]
)
def test_a_forged_cursor_is_refused(api: Api, after: str) -> None:
    answer = api.get(f"/devices?after={after}")
    assert (answer.status, answer.json()["error"]["code"]) == (400, "parameter-invalid")


def test_an_answer_is_not_sent_again_until_the_facts_change(tmp_path: Path) -> None:
    made = api_home(tmp_path / "home")
    api = Api(made.home)
    first = api.get("/devices?mode=online")
    tag = {"If-None-Match": first.headers["etag"]}
    assert api.get("/devices?mode=online", tag).status == 304
    made.batch(signal(270, "new"), signal(271, "b"), tick(300))
    api.refresh()
    second = api.get("/devices?mode=online", tag)
    assert second.status == 200
    assert {row["device_id"] for row in second.json()["devices"]} == {"a", "b", "new"}
    assert second.json()["version"] != first.json()["version"]
    api.close()


def test_an_answer_is_read_again_if_a_refresh_replaced_its_facts_before_their_version(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.live.reached()
    calls = list[None]()

    def answer() -> dict[str, Any]:
        calls.append(None)
        monkeypatch.setattr(api.live.mirror, "is_replacing", len(calls) == 1)
        return {"n": len(calls)}

    reached, _, found = answers._consistent(api.live, answer)
    assert (found, reached) == ({"n": 2}, api.live.mirror.reached)


def test_files_have_all_devices_that_match_in_the_order_of_the_list(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_FETCHED", 2)
    ids = [row["device_id"] for row in api.rows("/devices?site=south&sort=device&limit=1000")["devices"]]
    lines = api.get("/devices.ndjson?site=south&sort=device")
    assert [json.loads(line)["device_id"] for line in lines.text.splitlines()] == ids
    file = api.get("/devices.csv?site=south&sort=device")
    rows = list(csv.DictReader(io.StringIO(file.text)))
    assert [row["device_id"] for row in rows] == ["'" + one if one[0] in "=+-@" else one for one in ids]
    assert file.headers["content-disposition"] == 'attachment; filename="devices.csv"'
    assert rows[0]["never_seen"] == "false"
    head = api.get("/devices.csv", method="HEAD")
    assert (head.status, head.text, "content-length" in head.headers) == (200, "", False)


def test_a_failure_within_a_file_ends_the_connection(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: object) -> Iterator[list[Any]]:
        yield [("a",) * len(LISTED)]
        raise OSError("broken")

    monkeypatch.setattr(answers._Rows, "parts", fail)
    with pytest.raises(OSError, match="broken"):
        api.get("/devices.csv")
    monkeypatch.undo()
    assert [api.get("/devices.csv").is_complete for _ in range(answers.MOST_EXPORTS + 1)] == [True] * 3


def test_the_number_of_files_at_once_is_bounded(api: Api) -> None:
    api.live.reached()
    open_files = [answers._Rows(api.live.mirror.cursor, "SELECT 1", ()) for _ in range(answers.MOST_EXPORTS)]
    answer = api.get("/devices.csv")
    assert (answer.status, answer.json()["error"]["code"]) == (503, "busy")
    for one in open_files:
        one.close()
        one.close()
    assert api.get("/devices.csv").status == 200


def test_a_client_that_does_not_read_its_file_leaves_the_place_to_others(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(_message: Message | None = None) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        await forever(message)  # the buffer of the connection is full

    async def stalled() -> None:
        scope = api.client._scope(f"{PREFIX}/devices.csv", {"host": "localhost"}, "GET")
        with pytest.raises(TimeoutError):
            await api.app(scope, forever, send)

    monkeypatch.setattr(answers, "EXPORT_S", 0.1)
    api.client.run(stalled())
    monkeypatch.undo()
    assert [api.get("/devices.csv").status for _ in range(answers.MOST_EXPORTS)] == [200] * answers.MOST_EXPORTS
    open_files = [answers._Rows(api.live.mirror.cursor, "SELECT 1", ()) for _ in range(answers.MOST_EXPORTS)]
    for one in open_files:
        one.close()


def test_a_file_that_cannot_be_opened_leaves_the_place_to_others(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.live.reached()
    monkeypatch.setattr(api.live.mirror, "cursor", lambda: 1 / 0)
    for _ in range(answers.MOST_EXPORTS + 1):
        assert api.get("/devices.csv").code == "internal-error"
    monkeypatch.undo()
    assert api.get("/devices.csv").status == 200


def test_a_wrong_parameter_of_a_file_is_an_error_with_its_status(api: Api) -> None:
    assert api.get("/devices.csv?mode=nothing").status == 400


@pytest.mark.parametrize("device_id", ["a", "silent", "site-7/why"])
def test_a_device_is_shown_as_by_the_command(api: Api, made: ApiHome, device_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = api.rows(f"/devices/{quote(device_id, safe='')}")
    status.show_device(made.home, device_id, json_lines=True)
    printed = json.loads(capsys.readouterr().out)
    timeline = printed.pop("timeline")
    printed.pop("retracted_offline")
    assert found["status"] == printed
    assert [row["transition_no"] for row in found["timeline"]] == [row["transition_no"] for row in timeline]
    assert found["device"]["mode"] == printed["mode"]
    assert [row["transition_no"] for row in api.rows(f"/devices/{quote(device_id, safe='')}?limit=1")["timeline"]] == [
        row["transition_no"] for row in timeline[-1:]
    ]


def test_the_timeline_has_rows_as_emitted_on_request(tmp_path: Path) -> None:
    from fleetpulse.core.tables import JUDGEMENTS

    made = api_home(tmp_path / "home")
    retract = {"kind": "retract", "device_id": "a", "life_ms": START + 10_000, "transition_no": 3, "amendment_no": 1,
               "event_time_ms": START + 212_000, "to_mode": "online", "judged_at_ms": START + 900_000}  # fmt: skip
    made.append(JUDGEMENTS, retract)
    api = Api(made.home)
    assert [row["kind"] for row in api.rows("/devices/a")["timeline"]] == ["transition"] * 2
    emitted = api.rows("/devices/a?all=true")["timeline"]
    assert sorted(row["kind"] for row in emitted) == ["retract", *["transition"] * 3]
    api.close()


def test_an_unknown_device_is_an_error_with_a_sentence(api: Api) -> None:
    for address in (
        "/devices/nobody",
        "/devices/nobody/why",
        "/devices/site-7%2Fnobody",
        "/devices/site-7/why/why?at=1700000000000",
    ):
        answer = api.get(address)
        assert answer.status == 404, answer.text
    assert 'no device "nobody" was registered or heard' in api.get("/devices/nobody").json()["error"]["message"]


@pytest.mark.parametrize("device_id", ["a", "silent"])
def test_an_explanation_is_that_of_the_command(
    api: Api, made: ApiHome, device_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    why.why(device_id, home=made.home.path, json_lines=True)
    printed = json.loads(capsys.readouterr().out)
    assert api.rows(f"/devices/{quote(device_id, safe='')}/why") == printed
    earlier = api.rows("/devices/a/why?at=2023-11-14T22:16:00Z")
    assert (earlier["mode"], earlier["transition"]["trigger"]) == ("offline", "silence")


def test_the_end_of_an_address_is_compared_as_sent(api: Api) -> None:
    assert "sentence" in api.rows("/devices/a/why")
    assert api.rows("/devices/site-7%2Fwhy")["device"]["device_id"] == "site-7/why"
    assert api.rows("/devices/site-7%2Fwhy/why")["device_id"] == "site-7/why"
    assert api.get("/devices/site-7/why").status == 404, "the device site-7 is unknown"
