"""Route of the modes over time: range, filters and errors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from fleetpulse.core.replay import Deployment
from fleetpulse.core.times import HOUR_MS
from fleetpulse.web import api_modes
from fleetpulse.web.access import User, WebRole
from fleetpulse.web.api_modes import PATH
from fleetpulse.web.app import create_app
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import JudgedHome, empty

pytestmark = pytest.mark.unit
FIRST_MS = START // HOUR_MS * HOUR_MS


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    judged = JudgedHome(empty(tmp_path / "home", Deployment(10_000)))
    judged.land_and_judge(signal(10, "a"), signal(20, "b"), signal(3_600, "a"), tick(2 * 3_600))
    app = create_app(judged.home, hosts=("testserver",), authenticate=lambda _: User("test", WebRole.API_READER))
    with TestClient(app) as made:
        yield made


def test_modes_are_those_of_the_last_day_before_the_frontier(client: TestClient) -> None:
    answer = client.get(PATH)
    content = answer.json()
    hours = content["hours"]
    assert len(hours) == 25 and hours[-1]["hour_ms"] == content["frontier_ms"] // HOUR_MS * HOUR_MS
    assert hours[-3:] == [
        {"hour_ms": FIRST_MS, "devices": {"online": 1, "offline": 1}},
        {"hour_ms": FIRST_MS + HOUR_MS, "devices": {"offline": 2}},
        {"hour_ms": FIRST_MS + 2 * HOUR_MS, "devices": {"offline": 2}},
    ]
    assert client.get(PATH, headers={"If-None-Match": answer.headers["ETag"]}).status_code == 304


def test_range_and_filters_are_parameters(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"from": str(START), "to": str(START + 1), "site": "site", "class": "default"}
    first = client.get(PATH, params=given).json()["hours"]
    assert [one["hour_ms"] for one in first] == [FIRST_MS] and sum(first[0]["devices"].values()) == 2
    assert client.get(PATH, params={**given, "site": "other"}).json()["hours"][0]["devices"] == {}
    monkeypatch.setattr(api_modes, "modes_over_time", None)
    assert client.get(PATH, params=given).json()["hours"] == first, "equal requests are read once"


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
def test_invalid_parameters_are_refused(client: TestClient, given: dict[str, str], code: str) -> None:
    answer = client.get(PATH, params={"from": str(START), **given})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
