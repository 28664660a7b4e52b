"""OpenAPI 3.1 document of the API, from declarations beside its routes.

Rule 1: a route has one `Operation`. The server's routes, the document and docs/reference/api.md are made from it.
Rule 2: an object in a schema has all of its properties in every answer, and no other ones.

Source: https://spec.openapis.org/oas/v3.1.1.html
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from fleetpulse import __version__
from fleetpulse.core.tables import Column

PREFIX: Final = "/api/v1"
JSON: Final = "application/json"
Schema = Mapping[str, Any]
Endpoint = Callable[[Request], Awaitable[Response]]

_JSON_TYPES: Final = {
    "string": "string", "long": "integer", "int": "integer", "double": "number", "boolean": "boolean", "binary": "string",
}  # fmt: skip
_MEANINGS: Final = {
    304: "The facts have not changed since the version of If-None-Match.",
    400: "A parameter is unknown, given twice, or invalid.",
    401: "The request has no valid token or session.",
    404: "There is no such device, or it had no mode at the instant.",
    410: "The rows after the cursor are no longer available one by one.",
    500: "The server failed; its log has the reason.",
    503: "The facts cannot be read at present, or the server is busy.",
}
_MOST_CELL: Final = 150  # characters of choices in a cell of a table
ALWAYS: Final = (400, 401, 500, 503)  # errors of every route


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a route.

    Attributes:
        name: name.
        meaning: description.
        schema: JSON Schema of the value.
        place: query, path or header.
    """

    name: str
    meaning: str
    schema: Schema
    place: str = "query"


@dataclass(frozen=True, slots=True)
class Operation:
    """Route of the API with its documentation.

    Attributes:
        path: path below `PREFIX`.
        name: identifier of the operation.
        summary: description in one sentence.
        endpoint: function that answers a request.
        answer: JSON Schema of the body; None if the body is not JSON.
        parameters: parameters; others are refused.
        media: media type of the body.
        errors: status codes of errors beside `ALWAYS`.
        is_tagged: whether the answer has an ETag, with which a client asks for a newer version only.
        notes: further sentences.
    """

    path: str
    name: str
    summary: str
    endpoint: Endpoint
    answer: Schema | None
    parameters: tuple[Parameter, ...] = ()
    media: str = JSON
    errors: tuple[int, ...] = ()
    is_tagged: bool = False
    notes: str = ""


def text(meaning: str, choices: Sequence[str] = (), most: int | None = None) -> Schema:
    """Return the schema of a text."""
    more: dict[str, Any] = {"enum": list(choices)} if choices else {}
    return {"type": "string", "description": meaning, **more, **({} if most is None else {"maxLength": most})}


def whole(meaning: str, least: int | None = None, most: int | None = None, default: int | None = None) -> Schema:
    """Return the schema of a whole number."""
    bounds = {"minimum": least, "maximum": most, "default": default}
    return {"type": "integer", "description": meaning, **{name: value for name, value in bounds.items() if value is not None}}


def flag(meaning: str) -> Schema:
    """Return the schema of a truth value."""
    return {"type": "boolean", "description": meaning}


def optional(schema: Schema) -> Schema:
    """Return a schema that also allows null."""
    if "type" not in schema or "enum" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


def obj(properties: Mapping[str, Schema], meaning: str = "") -> Schema:
    """Return the schema of an object with the given properties."""
    described = {"description": meaning} if meaning else {}
    return {
        "type": "object", **described, "properties": dict(properties), "required": list(properties),
        "additionalProperties": False,
    }  # fmt: skip


def any_object(meaning: str) -> Schema:
    """Return the schema of an object whose properties depend on the case."""
    return {"type": "object", "description": meaning, "additionalProperties": True}


def counts(meaning: str) -> Schema:
    """Return the schema of an object with numbers by name."""
    return {"type": "object", "description": meaning, "additionalProperties": {"type": "integer", "minimum": 0}}


def array(items: Schema, meaning: str = "") -> Schema:
    """Return the schema of a list."""
    return {"type": "array", **({"description": meaning} if meaning else {}), "items": items}


def columns_of(columns: Sequence[Column], names: Sequence[str], required: Sequence[str] = ()) -> dict[str, Schema]:
    """Return the schemas of columns of a table, by name; instants are ``<name>_ms``.

    Args:
        columns: declared columns.
        names: names of the wanted columns.
        required: names of columns that are never null, beside those that are declared so.
    """
    known = {column.name: column for column in columns}
    found: dict[str, Schema] = {}
    for name in names:
        column = known[name]
        is_instant = column.type == "timestamp"
        meaning = f"{column.meaning}; epoch milliseconds" if is_instant else column.meaning
        schema: Schema = {"type": "integer" if is_instant else _JSON_TYPES[column.type], "description": meaning}
        found[f"{name}_ms" if is_instant else name] = schema if column.required or name in required else optional(schema)
    return found


ERROR: Final = obj(
    {"error": obj({"code": text("identifier for programs"), "message": text("fault and remedy, for people")})},
    "Failure of a request.",
)


def document(operations: Sequence[Operation], cookie: str) -> dict[str, Any]:
    """Return the OpenAPI document of operations.

    Args:
        operations: declarations of all routes.
        cookie: name of the cookie of a session.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "fleetpulse",
            "version": __version__,
            "summary": "Read-only API of a fleet: modes of devices, their changes and reasons, and the state of the job.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": PREFIX}],
        "security": [{"token": []}, {"session": []}],
        "paths": {one.path: {"get": _operation(one)} for one in operations},
        "components": {
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "Token of `./fleet access grant`."},
                "session": {"type": "apiKey", "in": "cookie", "name": cookie, "description": "Session of a browser."},
            },
            "schemas": {"Error": ERROR},
            "responses": {
                f"Error{status}": {
                    "description": meaning,
                    "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
                }
                for status, meaning in _MEANINGS.items()
                if status != 304
            },
        },
    }


def _operation(one: Operation) -> dict[str, Any]:
    schema: Schema = {"type": "string"} if one.answer is None else one.answer
    answers: dict[str, Any] = {"200": {"description": "Success.", "content": {one.media: {"schema": schema}}}}
    if one.is_tagged:
        answers["200"]["headers"] = {"ETag": {"description": "Version of the facts.", "schema": {"type": "string"}}}
        answers["304"] = {"description": _MEANINGS[304]}
    answers |= {str(status): {"$ref": f"#/components/responses/Error{status}"} for status in sorted({*ALWAYS, *one.errors})}
    found = {"operationId": one.name, "summary": one.summary, "responses": answers}
    if one.notes:
        found["description"] = one.notes
    tagged = [Parameter("If-None-Match", "ETag of an earlier answer.", {"type": "string"}, "header")] if one.is_tagged else []
    if given := [*one.parameters, *tagged]:
        found["parameters"] = [_parameter(parameter) for parameter in given]
    return found


def _parameter(one: Parameter) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": one.name, "in": one.place, "description": one.meaning, "schema": one.schema}
    if one.schema.get("type") == "array":  # comma-separated
        shown |= {"style": "form", "explode": False}
    return {**shown, "required": True} if one.place == "path" else shown


def pages(operations: Sequence[Operation]) -> str:
    """Return the reference of operations as Markdown, without a heading of the first level."""
    return "".join(_page(one) for one in operations)


def _page(one: Operation) -> str:
    shown = f"\n## GET {PREFIX}{one.path}\n\n{one.summary}\n"
    shown += fill(one.notes, 110) + "\n" if one.notes else ""
    if one.parameters:
        shown += "\n| parameter | value | meaning |\n| --- | --- | --- |\n"
        for parameter in one.parameters:
            shown += f"| `{parameter.name}` | {_value(parameter.schema)} | {_cell(parameter.meaning)} |\n"
    if one.answer is None:
        shown += f"\nAnswer: `{one.media}`.\n"
    else:
        shown += "\n| field | type | meaning |\n| --- | --- | --- |\n"
        shown += "".join(f"| `{path}` | {_type(schema)} | {_cell(_meaning(schema))} |\n" for path, schema in _fields(one.answer))
    if one.errors:
        shown += "\nErrors beside those of every route:\n\n" + "".join(f"- {code}: {_MEANINGS[code]}\n" for code in one.errors)
    return shown


def _cell(meaning: str) -> str:
    return meaning.replace("|", "&#124;")


def _value(schema: Schema) -> str:
    items = schema.get("items", schema)
    choices = items.get("enum", ())
    mark = "`" if len("`, `".join(choices)) < _MOST_CELL else ""
    parts = [f"{mark}{choice}{mark}" for choice in choices] or [str(items["type"])]
    if "minimum" in schema and "maximum" in schema:
        parts.append(f"{schema['minimum']:,} to {schema['maximum']:,}")
    if "default" in schema:
        default = schema["default"]
        parts.append(f"default `{str(default).lower()}`")
    return ("several of " if "items" in schema else "") + ", ".join(parts)


def _type(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    kind = schema["type"]
    return " or ".join(kind) if isinstance(kind, list) else kind


def _meaning(schema: Schema) -> str:
    return schema.get("description") or next((one["description"] for one in schema.get("anyOf", ()) if "description" in one), "")


def _fields(schema: Schema, prefix: str = "") -> list[tuple[str, Schema]]:
    """Return the fields of an object and of the objects in it, with their paths."""
    found: list[tuple[str, Schema]] = []
    for name, inner in schema.get("properties", {}).items():
        found.append((prefix + name, inner))
        for one in inner.get("anyOf", (inner,)):
            found += _fields(one.get("items", one), f"{prefix}{name}{'[]' if 'items' in one else ''}.")
    return found
