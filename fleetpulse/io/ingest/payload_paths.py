"""Paths in payloads: JMESPath expressions, compiled to functions.

JMESPath (https://jmespath.org) is the path language of mappings; its library parses and validates
expressions. Nearly all mappings consist of fields, indexes, comparisons and logical operators. These
run as nested functions, at a tenth of the cost of the library's interpreter. Any other expression
runs in that interpreter.
Source: docs/adr/0037-jmespath-in-mappings.md
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Final, cast

import jmespath
from jmespath.exceptions import JMESPathError

from fleetpulse.core.messages.mapping import Path, is_true

MAX_CHARACTERS: Final = 512
_COMPARATORS: Final = ("eq", "ne")
_HINT: Final = 'write an index in brackets, as in items[0], and a name with other signs in quotes, as in "device-id"'


@lru_cache(1_000)
def compile_path(expression: str) -> Path:
    """Compile a path.

    Args:
        expression: JMESPath expression of at most `MAX_CHARACTERS`.

    Returns:
        Function from a JSON value to the value at the path. It returns None if there is no value, or
        if a function in the expression rejects its argument.

    Raises:
        ValueError: the expression is invalid.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"a path has at most {MAX_CHARACTERS} characters; got {len(expression)}")
    try:
        compiled = jmespath.compile(expression)
    except JMESPathError as error:
        position = getattr(error, "lex_position", None)
        where = "it is not valid JMESPath" + ("" if position is None else f" at character {position + 1}")
        raise ValueError(f"{where}; {_HINT}") from None
    except RecursionError:
        raise ValueError("it has too many nested expressions") from None
    parsed = cast("Mapping[str, Any]", compiled.parsed)
    return _function(parsed) or _interpreted(compiled)


def field_of(path: Path) -> str | None:
    """Return the name of the field that a compiled path consists of; None if it is another expression."""
    return cast("str", path.args[0]) if isinstance(path, partial) and path.func is _value_of_field else None


def _interpreted(compiled: Any) -> Path:
    def search(value: Any) -> Any:
        try:
            return compiled.search(value)
        except (JMESPathError, RecursionError, TypeError, ValueError, ArithmeticError):
            return None

    return search


def _function(node: Mapping[str, Any]) -> Path | None:
    """Return a function that evaluates a syntax tree; None if a node has an unsupported type."""
    kind, value = node["type"], node.get("value")
    if kind in _LEAVES:
        return _LEAVES[kind](value)
    children = [_function(child) for child in node["children"]]
    if kind not in _OPERATORS or any(child is None for child in children) or (kind == "comparator" and value not in _COMPARATORS):
        return None
    return _OPERATORS[kind](value, *children)


def _field(name: str) -> Path:
    return partial(_value_of_field, name)


def _value_of_field(name: str, value: Any) -> Any:
    return cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None


def _index(place: int) -> Path:
    return lambda value: value[place] if isinstance(value, list) and -len(value) <= place < len(value) else None


def _chain(_: None, first: Path, *rest: Path) -> Path:
    if not rest:
        return first
    following = _chain(None, *rest)
    return lambda value: following(first(value))


def _comparison(operator: str, left: Path, right: Path) -> Path:
    if operator == "eq":
        return lambda value: _equal(left(value), right(value))
    return lambda value: not _equal(left(value), right(value))


def _either(_: None, left: Path, right: Path) -> Path:
    return lambda value: found if is_true(found := left(value)) else right(value)


def _both(_: None, left: Path, right: Path) -> Path:
    return lambda value: right(value) if is_true(found := left(value)) else found


def _negation(_: None, inner: Path) -> Path:
    return lambda value: not is_true(inner(value))


def _equal(left: Any, right: Any) -> bool:
    """Compare as the library does: a boolean equals no number."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return left == right


_LEAVES: Final[Mapping[str, Callable[[Any], Path]]] = {
    "current": lambda _: lambda value: value,
    "identity": lambda _: lambda value: value,
    "field": _field,
    "index": _index,
    "literal": lambda constant: lambda _: constant,
}
_OPERATORS: Final[Mapping[str, Callable[..., Path]]] = {
    "subexpression": _chain,
    "index_expression": _chain,
    "pipe": _chain,
    "comparator": _comparison,
    "or_expression": _either,
    "and_expression": _both,
    "not_expression": _negation,
}
