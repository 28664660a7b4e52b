"""References in documents: each named file, name, heading, decision, command and option exists.

tests/e2e/operations/test_documents.py runs the commands.
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

import pytest
from typer.main import get_command

from cli.app import app
from fleetpulse.paths import ROOT
from tests.support.documents import commands_of

pytestmark = pytest.mark.unit
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCES = [path for folder in ("fleetpulse", "streaming", "batch", "cli", "bench", "dags", "tests", "infra")
           for path in sorted((ROOT / folder).rglob("*.py"))]  # fmt: skip
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_RULES = ROOT / "docs/concepts/where-decided.md"
_CODE = re.compile(r"`([^`]+)`")
_DECISION = re.compile(r"docs/adr/\d{4}[a-z0-9-]*(?:\.md)?")


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = _HEADING.findall(_FENCED.sub("", document.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_link_in_a_document_leads_to_an_existing_file_and_heading(document: Path) -> None:
    broken = list[str]()
    for link in _LINK.findall(_FENCED.sub("", document.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_each_decision_named_in_sources_and_documents_exists() -> None:
    named = {
        (name, str(path.relative_to(ROOT))) for path in [*DOCUMENTS, *SOURCES] for name in _DECISION.findall(path.read_text())
    }
    assert len(named) > 3
    assert {one for one in named if not any((ROOT / "docs" / "adr").glob(f"{one[0].removeprefix('docs/adr/')}*"))} == set()
    numbers = {int(path.name[:4]) for path in (ROOT / "docs" / "adr").glob("[0-9]*.md")}
    assert numbers == set(range(1, len(numbers) + 1)), "one number, one decision"
    cited = {
        (int(number), str(path.relative_to(ROOT)))
        for path in [*DOCUMENTS, *SOURCES]
        for number in re.findall(r"\bADR (\d+)", path.read_text())
    }
    assert {one for one in cited if one[0] not in numbers} == set()


def _absent(cell: str, *roots: Path) -> Iterator[str]:
    """Yield the files of a cell that do not exist, and the names that the file before them does not have."""
    text = ""
    for named in _CODE.findall(cell):
        if "/" not in named and "." not in named:
            if not re.search(rf"\b{named}\b", text):
                yield named
        elif found := [root / named for root in roots if (root / named).exists()]:
            text = found[0].read_text() if found[0].is_file() else ""
        else:
            yield named


def test_each_rule_names_existing_code_and_an_existing_test() -> None:
    lines = [
        line for line in _RULES.read_text().splitlines() if line.startswith("| ") and not line.startswith(("| rule", "| ---"))
    ]
    rules = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert len(rules) > 30
    assert all("test_" in test and _CODE.search(code) for _, code, test in rules)
    assert [
        one for _, code, test in rules for one in (*_absent(code, ROOT / "fleetpulse", ROOT), *_absent(test, ROOT / "tests"))
    ] == []


def _fault_of(command: str) -> str | None:
    """Return the fault of a command line of ``./fleet``; None if its command and options exist."""
    arguments, verb, name = shlex.split(command)[1:], cast("Any", get_command(app)), "fleet"
    if arguments[0] == "COMMAND":
        return None
    while arguments and hasattr(verb, "commands") and not arguments[0].startswith("-"):
        if arguments[0] not in verb.commands and "show" in verb.commands:
            arguments = ["show", *arguments]  # the default verb, as in `fleet device ID`
        if arguments[0] not in verb.commands:
            return f"{name} has no command {arguments[0]}"
        name, verb = arguments[0], verb.commands[arguments.pop(0)]
    if hasattr(verb, "commands") or arguments == ["--help"]:
        return None
    context = verb.make_context(name, [], resilient_parsing=True)
    context.resilient_parsing = False
    try:
        verb.make_parser(context).parse_args(list(arguments))
    except Exception as error:  # noqa: BLE001 - the errors of Typer are private
        return str(error)
    return None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_and_options_in_a_document_exist(document: Path) -> None:
    found = [(command, _fault_of(command)) for command in commands_of(document) if command.startswith("./fleet")]
    assert [one for one in found if one[1]] == []


def test_absent_commands_and_options_are_found() -> None:
    assert "nothing" in (_fault_of("./fleet nothing") or "")
    assert "--nothing" in (_fault_of("./fleet status --nothing") or "")
    assert _fault_of("./fleet device ID --json") is None


def _labels_in_svg(path: Path) -> Counter[str]:
    """Return the texts of a figure; the lines of a text are joined by spaces."""
    space = "{http://www.w3.org/2000/svg}"
    found: Counter[str] = Counter()
    for one in ET.parse(path).iter(f"{space}text"):
        lines = [line for line in one.iter(f"{space}tspan") if "outer" in line.get("class", "")]
        found[" ".join("".join(line.itertext()).strip() for line in lines or [one])] += 1
    return found


def test_the_figure_of_the_lifecycle_shows_its_source() -> None:
    edges = re.findall(r"^ +(\w+) --> (\w+): (.+)$", (ROOT / "docs/images/lifecycle.mmd").read_text(), re.MULTILINE)
    modes = {mode for *ends, _ in edges for mode in ends}
    assert len(edges) > 10
    expected = Counter([*modes, *(triggers for *_, triggers in edges)])
    shown = _labels_in_svg(ROOT / "docs/images/lifecycle.svg")
    assert {text: count for text, count in shown.items() if text} == expected, "draw it again, see CONTRIBUTING"
