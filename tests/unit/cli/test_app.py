"""Verbs of the command line: one table lists them, and each imports only its dependencies."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command, get_group
from typer.testing import CliRunner

from cli.app import VERBS, Verb, app
from fleetpulse.core.replay import Deployment
from fleetpulse.io.home.home import Home
from fleetpulse.paths import ROOT

pytestmark = pytest.mark.unit
HEAVY = {"deltalake", "duckdb", "numba", "numpy", "pandas", "pyarrow", "pydantic_settings", "pyspark"}


def _commands(module: str) -> dict[str, Any]:
    application = typer.Typer()
    import_module(f"cli.{module}").register(application)
    return dict(get_group(application).commands)


def test_the_table_of_verbs_equals_the_registered_verbs() -> None:
    modules = dict.fromkeys(verb.module for verb in VERBS.values())
    registered = {
        module: {
            name: Verb(module, " ".join(inspect.cleandoc(command.help).partition("\n\n")[0].split()), command.hidden)
            for name, command in _commands(module).items()
        }
        for module in modules
    }
    listed = {module: {name: verb for name, verb in VERBS.items() if verb.module == module} for module in modules}
    assert listed == registered
    assert {module: list(verbs) for module, verbs in listed.items()} == {
        module: list(verbs) for module, verbs in registered.items()
    }


def test_every_module_that_registers_verbs_is_in_the_table() -> None:
    def registers(path: Path) -> bool:
        functions = [one for one in ast.parse(path.read_text()).body if isinstance(one, ast.FunctionDef)]
        return any(one.name == "register" and one.args.args[0].arg == "app" for one in functions)

    paths = sorted((ROOT / "cli").rglob("*.py"))
    found = {".".join(path.relative_to(ROOT / "cli").with_suffix("").parts) for path in paths if registers(path)}
    assert found == {verb.module for verb in VERBS.values()}


def test_the_command_has_the_verbs_of_the_table_and_their_help() -> None:
    group: Any = get_command(app)
    assert group.list_commands(None) == list(VERBS)
    assert all(group.get_command(None, name).name == name for name in VERBS)
    assert group.get_command(None, "nothing") is None
    help_text = CliRunner().invoke(app, ["--help"]).stdout.replace("│", " ")
    shown, text = {line.split()[0] for line in help_text.splitlines() if line.strip()}, " ".join(help_text.split())
    assert shown & set(VERBS) == {name for name, verb in VERBS.items() if not verb.hidden}
    assert [name for name, verb in VERBS.items() if not verb.hidden and verb.help not in text] == []


def test_a_misspelt_verb_gets_similar_verbs_as_suggestions() -> None:
    result = CliRunner().invoke(app, ["statsu"])
    assert result.exit_code == 2
    assert "No such command 'statsu'" in result.output and "'status'" in result.output


def _loaded(script: str, packages: set[str]) -> list[str]:
    """Run a script in a new Python process; return the packages that it has imported at its end."""
    program = f"import atexit, sys\natexit.register(lambda: print('loaded', *sorted({packages} & set(sys.modules))))\n{script}"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1) and "Traceback" not in result.stderr, result.stderr
    return result.stdout.splitlines()[-1].split()[1:]


def _fleet(*arguments: str) -> str:
    return f"sys.argv = {['fleet', *arguments]}\nfrom cli.entry import run\nrun()"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(_fleet("--help"), id="help"),
        pytest.param(_fleet("version"), id="version"),
        pytest.param("import cli.entry, cli.commands.run.job", id="jobs"),
    ],
)
def test_verbs_that_read_no_table_import_no_heavy_packages(script: str) -> None:
    assert _loaded(script, HEAVY) == []


def test_the_health_check_of_a_service_imports_none_of_its_dependencies(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(Deployment())
    arguments = ("service", "bridge", "--check", "--home", str(home.path))
    assert (
        _loaded(_fleet(*arguments), HEAVY | {"bcrypt", "cli.supervisor.processes", "rich", "structlog", "urllib.request"}) == []
    )


def test_the_audit_costs_a_verb_that_changes_nothing_no_import_and_an_audited_verb_no_pandas(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(Deployment())
    packages = {"deltalake", "duckdb", "pandas", "pyarrow"}
    assert _loaded(_fleet("access", "list", "--home", str(home.path)), packages) == []
    assert _loaded(_fleet("access", "revoke", "nobody", "--home", str(home.path)), packages) == ["deltalake", "pyarrow"]


def test_a_job_imports_no_optional_parts_of_its_libraries(tmp_path: Path) -> None:
    script = _fleet("job", "simulator", "--home", str(tmp_path / "absent"))  # it ends after its imports
    assert _loaded(script, HEAVY | {"dns", "paho", "rich", "structlog"}) == ["paho", "structlog"]
