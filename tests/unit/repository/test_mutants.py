"""Planted faults: their texts match the code, and a planted fault is removed after its test."""

import ast
from pathlib import Path

import pytest

from fleetpulse.paths import ROOT
from tests.mutants.faults import FAULTS, INTERPRETED, Change, Fault
from tests.mutants.run import main, planted, stale

pytestmark = pytest.mark.unit
FILE = "some.py"


def _fault(old: str, new: str = "x", test: str = f"{FILE}::test_it") -> Fault:
    return Fault("slip", (Change(FILE, old, new),), (test,))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / FILE).write_text("def test_it():\n    assert 1 < 2 < 3\n")
    return tmp_path


def test_every_fault_has_a_unique_text_and_existing_tests() -> None:
    assert stale(FAULTS, ROOT) == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_the_documented_score_counts_all_faults() -> None:
    assert f"{len(FAULTS)} of {len(FAULTS)} planted faults are caught" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("fault", [*FAULTS, Fault("interpreted", INTERPRETED, ())], ids=lambda fault: fault.name)
def test_a_fault_is_valid_python_that_differs_from_the_code(fault: Fault) -> None:
    texts: dict[str, str] = {}
    for change in fault.changes:
        before = texts.setdefault(change.file, (ROOT / change.file).read_text())
        texts[change.file] = before.replace(change.old, change.new)
    for file, text in texts.items():
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((ROOT / file).read_text())), file


@pytest.mark.parametrize(("old", "count"), [("5", 0), ("<", 2)])
def test_a_fault_is_stale_without_a_unique_text_and_an_existing_test(tree: Path, old: str, count: int) -> None:
    for change in INTERPRETED:
        path = tree / change.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(one.old for one in INTERPRETED if one.file == change.file))
    (error,) = stale([_fault(old)], tree)
    assert f'fault "slip": its old text must stand in {FILE} once; found {count} times' in error
    assert stale([_fault("1 < 2")], tree) == []
    (error,) = stale([_fault("1 < 2", test=f"{FILE}::test_else")], tree)
    assert f'there is no test "{FILE}::test_else"' in error


def test_a_planted_fault_is_removed_after_an_interruption(tree: Path) -> None:
    before = (tree / FILE).read_text()

    def interrupted() -> None:
        with planted(_fault("1 < 2", "1 > 2"), tree):
            assert "1 > 2 < 3" in (tree / FILE).read_text()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tree / FILE).read_text() == before


def test_faults_are_listed_and_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", FAULTS[0].name]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(f"{FAULTS[0].name}: {FAULTS[0].changes[0].file}")
    with pytest.raises(SystemExit) as ended:
        main(["--only", "none-such"])
    assert ended.value.code == 2
    assert 'there is no fault "none-such"; ./fleet test mutants --list shows all' in capsys.readouterr().err
