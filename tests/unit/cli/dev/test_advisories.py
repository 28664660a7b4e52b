"""Known vulnerabilities: an unreachable service is a skipped check, never a passed one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.dev.advisories import LOCK, PROBE, check_advisories

pytestmark = pytest.mark.unit
UV = {"name": "uv", "version": "1", "vulns": []}
SOUND = {"name": "sound", "version": "1", "vulns": []}
FLAWED = {
    "name": "flawed",
    "version": "1",
    "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["1.1"], "description": ""}],
}
UNKNOWN = {"name": "uv", "skip_reason": "not found"}


def pip_audit(folder: Path, answers: dict[str, Any], accepted: str = "") -> tuple[list[str], str]:
    """Run the check with a program that prints an answer for each lock; a string goes to standard error."""
    (folder / "pyproject.toml").write_text(f"[tool.fleet]\n{accepted}")
    (folder / "answers.json").write_text(json.dumps(answers))
    (folder / "program.py").write_text(
        "import json, sys\n"
        "answer = json.load(open('answers.json'))[sys.argv[sys.argv.index('--requirement') + 1]]\n"
        "isinstance(answer, str) and sys.exit(answer)\n"
        "print(json.dumps({'dependencies': answer, 'fixes': []}))\n"
        "sys.exit(any(one.get('vulns') for one in answer))\n"
    )
    return check_advisories(folder, [sys.executable, "-I", str(folder / "program.py")])


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ("Could not connect to PyPI's vulnerability feed", "skipped: Could not connect"),
        ([UNKNOWN], "skipped: the advisory service"),
    ],
)
def test_a_service_without_an_answer_skips_the_check(tmp_path: Path, probe: Any, reason: str) -> None:
    faults, summary = pip_audit(tmp_path, {PROBE: probe})
    assert faults == [] and summary.startswith(reason)


def test_a_missing_program_skips_the_check_with_the_reason(tmp_path: Path) -> None:
    faults, summary = check_advisories(tmp_path, [str(tmp_path / "absent")])
    assert faults == [] and summary.startswith("skipped: [Errno 2]")


def test_packages_that_the_service_does_not_know_are_named(tmp_path: Path) -> None:
    assert pip_audit(tmp_path, {PROBE: [UV], LOCK: [SOUND, {"name": "own", "skip_reason": "not found"}]}) == (
        [],
        "1 packages checked; unknown to the service: own",
    )


def test_a_vulnerability_is_a_fault(tmp_path: Path) -> None:
    faults, _ = pip_audit(tmp_path, {PROBE: [UV], LOCK: [SOUND, FLAWED]})
    assert faults == ["flawed 1: PYSEC-1, fixed in 1.1; run: ./fleet lock --upgrade"]


def test_a_failure_after_the_probe_is_a_fault(tmp_path: Path) -> None:
    faults, _ = pip_audit(tmp_path, {PROBE: [UV], LOCK: "requirement has no hash"})
    assert faults == [f"pip-audit cannot check {LOCK}: requirement has no hash"]


@pytest.mark.parametrize("accepted", ["PYSEC-1", "CVE-1"])
def test_an_accepted_vulnerability_is_no_fault_as_long_as_it_applies(tmp_path: Path, accepted: str) -> None:
    table = f'[tool.fleet.advisories]\n{accepted} = "unused code"\n'
    assert pip_audit(tmp_path, {PROBE: [UV], LOCK: [FLAWED]}, table)[0] == []
    faults, _ = pip_audit(tmp_path, {PROBE: [UV], LOCK: [SOUND]}, table)
    assert faults == [f"pyproject.toml accepts {accepted}, which applies to no locked package; remove it"]
