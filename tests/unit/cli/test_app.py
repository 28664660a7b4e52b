"""The command imports what a verb uses; its table of verbs equals the verbs."""

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
    alone = typer.Typer()
    import_module(f"cli.{module}").register(alone)
    return dict(get_group(alone).commands)


def test_the_table_of_verbs_equals_the_verbs_themselves() -> None:
    modules = dict.fromkeys(verb.module for verb in VERBS.values())
    made = {
        module: {
            name: Verb(module, " ".join(inspect.cleandoc(command.help).partition("\n\n")[0].split()), command.hidden)
            for name, command in _commands(module).items()
        }
        for module in modules
    }
    listed = {module: {name: verb for name, verb in VERBS.items() if verb.module == module} for module in modules}
    assert listed == made
    assert {module: list(verbs) for module, verbs in listed.items()} == {module: list(verbs) for module, verbs in made.items()}


def test_every_module_that_adds_verbs_to_the_command_is_in_the_table() -> None:
    def adds(path: Path) -> bool:
        functions = [one for one in ast.parse(path.read_text()).body if isinstance(one, ast.FunctionDef)]
        return any(one.name == "register" and one.args.args[0].arg == "app" for one in functions)

    paths = sorted((ROOT / "cli").rglob("*.py"))
    found = {".".join(path.relative_to(ROOT / "cli").with_suffix("").parts) for path in paths if adds(path)}
    assert found == {verb.module for verb in VERBS.values()}


def test_the_command_has_the_verbs_of_the_table_and_their_help() -> None:
    group: Any = get_command(app)
    assert group.list_commands(None) == list(VERBS)
    assert all(group.get_command(None, name).name == name for name in VERBS)
    assert group.get_command(None, "nothing") is None
    told = CliRunner().invoke(app, ["--help"]).stdout.replace("│", " ")
    shown, words = {line.split()[0] for line in told.splitlines() if line.strip()}, " ".join(told.split())
    assert shown & set(VERBS) == {name for name, verb in VERBS.items() if not verb.hidden}
    assert [name for name, verb in VERBS.items() if not verb.hidden and verb.help not in words] == []


def test_a_slip_in_a_verb_is_answered_with_those_that_are_near() -> None:
    done = CliRunner().invoke(app, ["statsu"])
    assert done.exit_code == 2
    assert "No such command 'statsu'" in done.output and "'status'" in done.output


def _loaded(script: str, among: set[str]) -> list[str]:
    """Run a script in a Python of its own; return those packages that it has imported at its end."""
    whole = f"import atexit, sys\natexit.register(lambda: print('loaded', *sorted({among} & set(sys.modules))))\n{script}"
    done = subprocess.run([sys.executable, "-c", whole], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


def _fleet(*words: str) -> str:
    return f"sys.argv = {['fleet', *words]}\nfrom cli.entry import run\nrun()"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(_fleet("--help"), id="help"),
        pytest.param(_fleet("version"), id="version"),
        pytest.param("import cli.entry, cli.commands.run.job", id="jobs"),
    ],
)
def test_what_reads_no_table_imports_nothing_heavy(script: str) -> None:
    assert _loaded(script, HEAVY) == []


def test_the_health_check_of_a_service_imports_nothing_that_the_service_runs_on(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.prepare(Deployment())
    words = ("service", "bridge", "--check", "--home", str(home.path))
    assert _loaded(_fleet(*words), HEAVY | {"bcrypt", "cli.supervisor.processes", "rich", "structlog", "urllib.request"}) == []


def test_a_job_has_no_optional_part_of_its_libraries(tmp_path: Path) -> None:
    script = _fleet("job", "simulator", "--home", str(tmp_path / "absent"))  # it ends once all is imported
    assert _loaded(script, HEAVY | {"dns", "paho", "rich", "structlog"}) == ["paho", "structlog"]
