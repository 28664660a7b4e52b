"""Paths in payloads: compiled functions equal the interpreter of the library."""

from itertools import product
from typing import Any

import jmespath
import pytest
from jmespath.exceptions import JMESPathError

from fleetpulse.io.ingest.payload_paths import compile_path

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 1.5, "", "a", [], {}, [1], {"a": 1}, {"a": {"b": [1, {"a": "x"}]}, "b": 0}, {"a": [], "b": "x"}),
    *({"a": "a", "b": "a"}, {"a": True, "b": 1}, {"a": False, "b": 0}, {"a": None}, [[1], {"a": 2}], {"a b": 3, "ü": 4}),
)
EXPRESSIONS = (
    *("a", "a.b", "a.b[0]", "a.b[1].a", "[0]", "[-1]", "[-3]", "[1].a", "@", "@.a", '"a b"', '"ü"', "'a'", "`[1]`"),
    *("a == b", "a != b", "a == `true`", "a == `1`", "a == `null`", "@ == 'a'", "a || b", "a || @", "a && b", "!a", "!a && b"),
    *(
        "a | b",
        "a.b | [0]",
        "a | !b",
        "(a || b) == 'x'",
        "length(@)",
        "a.b[*].a",
        "a > b",
        "keys(@)[0]",
        "to_number(a)",
        "[a, b]",
    ),
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_compiled_path_finds_what_the_library_finds(expression: str) -> None:
    path = compile_path(expression)
    for value in VALUES:
        try:
            expected = jmespath.search(expression, value)
        except JMESPathError:
            expected = None
        found = path(value)
        assert (found, type(found)) == (expected, type(expected)), value


def test_all_pairs_are_compared_as_in_the_library() -> None:
    for left, right in product(VALUES, VALUES):
        value = {"a": left, "b": right}
        assert compile_path("a == b")(value) is jmespath.search("a == b", value), value


@pytest.mark.parametrize("expression", ["", "a.", "a.0", "a-b", "a[", "nope(", "a" * 600, "(" * 400 + "a" + ")" * 400])
def test_an_invalid_path_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r"JMESPath|characters|nested"):
        compile_path(expression)


def test_a_function_that_does_not_exist_finds_nothing() -> None:
    assert compile_path("nope(@)")({"a": 1}) is None
