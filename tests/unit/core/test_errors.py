"""Codes of errors: each error of the product has one, and tests expect existing codes."""

import ast
import pickle
import re
from collections.abc import Iterator

import pytest

from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.paths import ROOT
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
PRODUCT = ("fleetpulse", "streaming", "batch", "cli", "bench")
CLASSES = ("FleetError", "Misuse", "Crashed")
CODE = re.compile(r"[a-z]+(-[a-z0-9]+){1,4}")


def calls(folder: str, *names: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the position and node of each call of named functions or classes in a folder.

    A call of a conditional expression counts for both of its names.
    """
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = [node.func.body, node.func.orelse] if isinstance(node.func, ast.IfExp) else [node.func]
                if any(isinstance(one, ast.Name) and one.id in names for one in called):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def code_of(call: ast.Call) -> str | None:
    """Return the literal code of a call, or None."""
    for keyword in call.keywords:
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
            return keyword.value.value
    return None


def test_each_error_of_the_product_has_a_code() -> None:
    found = [one for folder in PRODUCT for one in calls(folder, *CLASSES)]
    assert len(found) > 200
    assert [where for where, call in found if not CODE.fullmatch(code_of(call) or "")] == []


def test_tests_expect_codes_that_exist() -> None:
    existing = {code_of(call) for folder in (*PRODUCT, "tests") for _, call in calls(folder, *CLASSES)}  # tests raise errors, too
    existing |= {"policy-faulty", "file-damaged"}  # set by error classes with a fixed code
    expected = {
        (call.args[0].value, where)
        for where, call in calls("tests", "refused")
        if call.args and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    }
    assert len(expected) > 50
    assert {
        (code, where)
        for code, where in expected
        if code not in existing and not where.startswith("tests/unit/core/test_errors.py")
    } == set()


def test_an_error_keeps_its_code_when_it_is_pickled() -> None:
    error = pickle.loads(pickle.dumps(Misuse("no", code="a-code")))
    assert (str(error), error.code, error.exit_code) == ("no", "a-code", 2)


def test_an_error_with_another_code_is_not_the_expected_one() -> None:
    with pytest.raises(AssertionError, match="expected a-code, got b-code: no"), refused("a-code"):
        raise FleetError("no", code="b-code")
