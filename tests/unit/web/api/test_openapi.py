"""OpenAPI document and reference, made from declarations."""

import pytest
from jsonschema import Draft202012Validator

from cli.dev.docgen import api
from fleetpulse.core.tables import QUARANTINE
from fleetpulse.web.api.openapi import ALWAYS, any_object, array, columns_of, document, obj, optional, text, whole
from fleetpulse.web.api.routes import operations

pytestmark = pytest.mark.unit


def test_null_is_allowed_where_a_schema_is_optional() -> None:
    for schema, value in (
        (text("t"), "a"),
        (text("t", ("a", "b")), "a"),
        (whole("n", 0, 5), 3),
        (obj({"a": text("t")}), {"a": ""}),
    ):
        assert Draft202012Validator(optional(schema)).is_valid(None)
        assert not Draft202012Validator(schema).is_valid(None)
        assert all(Draft202012Validator(one).is_valid(value) for one in (schema, optional(schema)))


def test_an_object_has_all_of_its_properties_and_no_other() -> None:
    validator = Draft202012Validator(obj({"a": whole("a"), "b": array(text("b"))}))
    assert validator.is_valid({"a": 1, "b": []})
    assert not any(validator.is_valid(one) for one in ({"a": 1}, {"a": 1, "b": [], "c": 1}, {"a": 1, "b": [1]}))
    assert Draft202012Validator(any_object("any")).is_valid({"c": 1})


def test_the_instants_of_a_table_are_numbers_with_their_own_names() -> None:
    found = columns_of(QUARANTINE.columns, ("received_at", "topic", "payload_bytes"), ("payload_bytes",))
    assert {name: schema["type"] for name, schema in found.items()} == {
        "received_at_ms": "integer", "topic": "string", "payload_bytes": "integer",
    }  # fmt: skip
    assert columns_of(QUARANTINE.columns, ("payload_bytes",))["payload_bytes"]["type"] == ["integer", "null"]


def test_each_operation_has_its_errors_and_its_security() -> None:
    made = document(operations(), "fleet_session_x")
    assert made["security"] == [{"token": []}, {"session": []}]
    assert made["components"]["securitySchemes"]["session"]["name"] == "fleet_session_x"
    for one in operations():
        responses = made["paths"][one.path]["get"]["responses"]
        assert set(responses) == {"200", *map(str, (*ALWAYS, *one.errors)), *(["304"] if one.is_tagged else [])}
        for name in (f"Error{status}" for status in (*ALWAYS, *one.errors)):
            assert name in made["components"]["responses"]


def test_the_reference_has_each_route_parameter_and_field_with_a_meaning() -> None:
    reference = api()
    for one in operations():
        [page] = [part for part in reference.split("\n## ") if part.startswith(f"GET /api/v1{one.path}\n")]
        assert one.summary in page
        assert all(f"| `{parameter.name}` |" in page for parameter in one.parameters)
    rows = [line for line in reference.splitlines() if line.startswith("| `")]
    assert [line for line in rows if not line.rstrip(" |").rpartition("|")[2].strip()] == []
    assert [line for line in rows if any(len(cell) > 240 for cell in line.split("|"))] == []
