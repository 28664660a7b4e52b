"""The doors between the rooms are shut."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse.paths import ROOT

ROOMS = {  # room -> what it may import besides the standard library and itself
    "fleetpulse/core": set(),
    "fleetpulse/columnar": {"fleetpulse.core", "fleetpulse.paths", "numpy", "pyarrow", "numba"},
    "fleetpulse/orchestration": {"airflow", "deltalake", "fastapi", "fleetpulse.core", "fleetpulse.io", "fleetpulse.reports"}
    | {"fleetpulse.paths", "fleetpulse.settings"},  # a task is an entry, where settings are read once
    "dags": {"airflow", "fleetpulse.core", "fleetpulse.orchestration"},
}


def imported(path: Path) -> set[str]:
    """Return the modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_import_linter_keeps_every_contract() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_a_pure_room_imports_only_what_the_table_grants(room: str) -> None:
    granted = ROOMS[room] | {room.replace("/", ".")}
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    strangers = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in files
        for module in imported(path)
        if module.partition(".")[0] not in sys.stdlib_module_names
        and not any(module == name or module.startswith(f"{name}.") for name in granted)
    }
    assert not strangers


def test_options_that_several_commands_have_are_worded_once() -> None:
    def named(path: Path) -> set[str]:
        targets = [one.targets for one in ast.parse(path.read_text()).body if isinstance(one, ast.Assign)]
        return {target.id for some in targets for target in some if isinstance(target, ast.Name) and target.id.endswith("Option")}

    shared = ROOT / "cli/common/options.py"
    assert named(shared) >= {"HomeOption", "JsonOption"}
    again = {f"{path.name}: {name}" for path in sorted((ROOT / "cli").rglob("*.py")) for name in named(path) & named(shared)}
    assert again == {f"options.py: {name}" for name in named(shared)}
