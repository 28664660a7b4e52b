"""Every route of the API: it conforms to the OpenAPI document, whatever its parameters are, and never fails with 500.

The requests are generated from the document by Hypothesis and checked with jsonschema, not by Schemathesis: most routes need
ids and cursors that exist, and a generator that knows only the document does not find them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from starlette.routing import Route

from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.web import app as application
from fleetpulse.web.api.openapi import PREFIX
from fleetpulse.web.api.routes import operations
from tests.support.api import Api
from tests.support.asgi import Answer, LastingClient
from tests.support.form import examples
from tests.support.homes.api_home import ODD, api_home

pytestmark = pytest.mark.unit
STREAMS = "/transitions/events"  # tested in test_events.py
ONE_OF_EACH = ("a", "silent", "nobody", *ODD)


class Checked(Api):
    """Application over a home, with its document."""

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self.home = home
        self.document = self.rows("/openapi.json")

    def check(self, path: str, address: str) -> Answer:
        """Send a request, and compare its answer with the document."""
        answer = self.get(address)
        responses = self.document["paths"][path]["get"]["responses"]
        assert str(answer.status) in responses, f"{address}: {answer.status} {answer.text[:300]}"
        assert answer.status != 500, answer.text
        assert answer.is_complete
        declared = responses[str(answer.status)]
        if "$ref" in declared:
            declared = self.document["components"]["responses"][declared["$ref"].rpartition("/")[2]]
        [(media, content)] = declared["content"].items()
        assert answer.headers["content-type"].partition(";")[0] == media
        if media == "application/json":
            schema = {**content["schema"], "components": self.document["components"]}
            faults = [f"{one.json_path}: {one.message[:200]}" for one in Draft202012Validator(schema).iter_errors(answer.json())]
            assert faults == [], f"{address}: {faults}"
        return answer


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    made = Checked(api_home(tmp_path_factory.mktemp("api") / "home").home)
    yield made
    made.close()


def _values(parameter: dict[str, Any], cursors: tuple[str, ...]) -> st.SearchStrategy[str]:
    schema = parameter["schema"]
    wild = st.one_of(
        st.text(max_size=12), st.sampled_from(["", "0", "-1", "1001", "9" * 30, "%", "_", "'", "\x00", "\ud800", "true"])
    )
    if parameter["name"] == "device_id":
        return st.sampled_from(ONE_OF_EACH) | st.text(min_size=1, max_size=12)
    if parameter["name"] == "name":
        return st.sampled_from(["pumps-2", "bad-3", "..", ".", "rollout.json"])
    if parameter["name"] == "after":
        return st.sampled_from(cursors) | wild
    if choices := schema.get("items", schema).get("enum"):
        return st.lists(st.sampled_from(choices), min_size=1, max_size=2 if "items" in schema else 1).map(",".join) | wild
    if schema["type"] == "integer":
        return st.integers(schema["minimum"] - 1, schema["maximum"] + 1).map(str) | wild
    if schema["type"] == "boolean":
        return st.sampled_from(["true", "false"]) | wild
    return st.sampled_from(["a", "north", "default", "2023-11-14T22:16:52Z", "1700000100000"]) | wild


def _encoded(text: str) -> str:
    return quote(text.encode(errors="surrogatepass"), safe="")


@settings(max_examples=examples(8))
@given(data=st.data())
def test_answers_conform_to_the_document_for_any_parameters(api: Checked, data: st.DataObject) -> None:
    cursors = ("newest", "oldest", "0.0", "1.3", "99999.0", api.get("/devices?limit=1").json()["next"])
    cursors += (api.get("/transitions?limit=1").json()["next"], api.get("/devices?limit=1&sort=site").json()["next"])
    cursors += (api.get("/commands?limit=1").json()["next"], api.get("/sessions?limit=1").json()["next"])
    for path, item in api.document["paths"].items():
        if path == STREAMS:
            continue
        parameters = [one for one in item["get"].get("parameters", ()) if one["in"] != "header"]
        chosen = data.draw(
            st.lists(st.sampled_from(parameters), max_size=3, unique_by=lambda one: one["name"]) if parameters else st.just([])
        )
        address, query = path, list[str]()
        for one in parameters:
            if one["in"] == "path":
                address = address.replace(f"{{{one['name']}}}", _encoded(data.draw(_values(one, cursors))))
            elif one in chosen:
                query.append(f"{one['name']}={_encoded(data.draw(_values(one, cursors)))}")
        api.check(path, f"{address}?{'&'.join(query)}")


def test_each_route_answers_with_rows(api: Checked) -> None:
    for path in api.document["paths"]:
        if path != STREAMS:
            answer = api.check(path, path.replace("{device_id}", "a").replace("{name}", "pumps-2"))
            assert answer.status == 200, (path, answer.text)
            assert answer.text
    of_tables = ("/late", "/quarantine", "/coverage", "/stream", "/generations", "/quality", "/transitions")
    for path in (*of_tables, "/commands", "/sessions", "/rollouts", "/devices/a/twin", "/devices/a/vitals"):
        lists = [value for value in api.get(path).json().values() if isinstance(value, list)]
        assert lists and all(lists), path


def test_the_routes_and_the_document_are_the_same(api: Checked) -> None:
    paths = [one.path for one in api.app.routes if isinstance(one, Route)]
    served = {path.removeprefix(PREFIX).replace(":path", "") for path in paths if path.startswith("/api")}
    assert served == set(api.document["paths"]) == {one.path for one in operations()}
    names = [item["get"]["operationId"] for item in api.document["paths"].values()]
    assert len(set(names)) == len(names)
    assert api.document["components"]["securitySchemes"]["session"]["name"] == api.app.state.access.cookie
    assert api.document["openapi"] == "3.1.0"
    for item in api.document["paths"].values():
        for schema in (one["schema"] for one in item["get"].get("parameters", ())):
            Draft202012Validator.check_schema(schema)
        content = item["get"]["responses"]["200"]["content"]
        Draft202012Validator.check_schema(next(iter(content.values()))["schema"])


@pytest.mark.parametrize(
    "address", ["/devices?modes=online", "/fleet?limit=1", "/devices?mode=online&mode=offline", "/late?kind=all&unknown="]
)
def test_a_parameter_that_is_unknown_or_given_twice_is_refused(api: Checked, address: str) -> None:
    answer = api.get(address)
    assert (answer.status, answer.json()["error"]["code"]) == (400, "parameter-invalid")


def test_an_unknown_route_has_an_error_in_json(api: Checked) -> None:
    answer = api.get("/nothing")
    assert (answer.status, answer.json()["error"]["code"]) == (404, "not-found")


def test_every_route_needs_a_user(api: Checked) -> None:
    closed = LastingClient(application.create_app(api.home, hosts=("localhost",)))
    for path in api.document["paths"]:
        assert closed.get(PREFIX + path.replace("{device_id}", "a").replace("{name}", "x")).status == 401, path
    closed.close()


def test_a_damaged_table_is_an_error_with_a_sentence(tmp_path: Path) -> None:
    api = Api(api_home(tmp_path / "home").home)
    try:
        assert api.get("/fleet").status == 200
        for path in tables.paths_of(api.live.home, JUDGEMENTS):
            path.write_bytes(b"damaged")
        for address in ("/late", "/transitions/feed?after=oldest", "/devices/a/why", "/devices/a"):
            answer = api.get(address)
            assert (answer.status, answer.json()["error"]["code"]) == (503, "file-damaged"), answer.text
            assert "restore the home from a backup" in answer.json()["error"]["message"]
    finally:
        api.close()
