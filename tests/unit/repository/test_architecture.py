"""Imports between packages, and conventions that each file follows."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse.paths import ROOT

ALLOWED = {  # package -> allowed imports in addition to the standard library and itself
    "fleetpulse/core": set(),
    "fleetpulse/columnar": {"fleetpulse.core", "fleetpulse.paths", "numpy", "pyarrow", "numba"},
    "fleetpulse/orchestration": {"airflow", "deltalake", "fastapi", "fleetpulse.core", "fleetpulse.io", "fleetpulse.reports"}
    | {"fleetpulse.paths", "fleetpulse.settings"}  # a task is an entry point, which reads the settings once
    | {"fleetpulse.web", "starlette"},  # the plugin mounts the operations page
    "dags": {"airflow", "fleetpulse.core", "fleetpulse.orchestration"},
}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, at any place in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_import_linter_finds_no_broken_contract() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("package", ALLOWED)
def test_a_restricted_package_imports_only_its_allowed_dependencies(package: str) -> None:
    allowed = ALLOWED[package] | {package.replace("/", ".")}
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    violations = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in files
        for module in imported(path)
        if module.partition(".")[0] not in sys.stdlib_module_names
        and not any(module == name or module.startswith(f"{name}.") for name in allowed)
    }
    assert not violations


def test_options_shared_by_commands_are_defined_once() -> None:
    def option_names(path: Path) -> set[str]:
        targets = [one.targets for one in ast.parse(path.read_text()).body if isinstance(one, ast.Assign)]
        return {target.id for some in targets for target in some if isinstance(target, ast.Name) and target.id.endswith("Option")}

    shared = ROOT / "cli/common/options.py"
    assert option_names(shared) >= {"HomeOption", "JsonOption"}
    definitions = {
        f"{path.name}: {name}"
        for path in sorted((ROOT / "cli").rglob("*.py"))
        for name in option_names(path) & option_names(shared)
    }
    assert definitions == {f"options.py: {name}" for name in option_names(shared)}


def test_tests_expect_an_error_by_its_code() -> None:
    by_class = re.compile(r"pytest\.raises\(\s*(?:FleetError|Misuse)\b")
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    assert len(tests) > 200
    found = [str(path.relative_to(ROOT)) for path in tests if by_class.search(path.read_text())]
    assert found == [], "use tests.support.refusals.refused"


def test_a_folder_of_a_package_has_at_most_fifteen_modules() -> None:
    folders = {
        path.parent
        for package in ("fleetpulse", "streaming", "batch", "cli", "dags", "bench")
        for path in (ROOT / package).rglob("*.py")
    }
    assert len(folders) > 60
    crowded = {str(one.relative_to(ROOT)): len(list(one.glob("*.py"))) for one in folders}
    assert {name: count for name, count in crowded.items() if count > 15} == {}
