"""Prose of docstrings and documents: entries name real fields, lines are short, private words are absent."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetpulse.paths import ROOT

pytestmark = pytest.mark.unit
SOURCES = [
    path
    for folder in ("fleetpulse", "streaming", "batch", "cli", "dags", "bench", "tests/support")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.name.endswith("_pb2.py")
]
DOCUMENTS = [
    path
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if not path.read_text().startswith("<!-- generated")
]
MAX_COLUMNS = 120
_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n|\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^    ([a-z_]\w*(?:, [a-z_]\w*)*):", re.MULTILINE)
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_PRIVATE = re.compile(
    r"what came of|is told of|are told of|\bunsaid\b(?!-)|\bwhoever\b|\bstands at\b|\bput into words\b", re.IGNORECASE
)
_Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _documented(path: Path) -> Iterator[tuple[_Documented, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, _Documented) and (text := ast.get_docstring(node)):
            yield node, text + "\n"


def _names_of(node: _Documented) -> set[str]:
    """Return the parameters of a function, or the fields and attributes of a class."""
    if not isinstance(node, ast.ClassDef):
        return {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    inner = list(ast.walk(node))
    attributes = {one.attr for one in inner if isinstance(one, ast.Attribute)}
    return fields | attributes | {one.arg for one in inner if isinstance(one, ast.arg)}


def test_entries_of_a_docstring_name_parameters_or_fields() -> None:
    wrong = [
        (str(path.relative_to(ROOT)), node.name, name)
        for path in SOURCES
        for node, text in _documented(path)
        for section in _SECTION.findall(text)
        for names in _ENTRY.findall(section)
        for name in names.split(", ")
        if name not in _names_of(node)
    ]
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_of_a_document_has_short_lines_and_no_private_words(document: Path) -> None:
    text = _FENCED.sub("", document.read_text())
    assert [line for line in text.splitlines() if len(line) > MAX_COLUMNS and not line.startswith(("|", "<!--"))] == []
    assert _PRIVATE.findall(text) == []


def test_docstrings_have_no_private_words() -> None:
    found = [
        (str(path.relative_to(ROOT)), node.name) for path in SOURCES for node, text in _documented(path) if _PRIVATE.search(text)
    ]
    assert found == []
