"""Options of ``fleet state``: conflicting options are refused before any file is read."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from fleetpulse.core.errors import FleetError, Misuse


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["bootstrap", "--damaged", "--registry"], "recover from a snapshot"),
        (["bootstrap", "--damaged", "--devices", "a.csv"], "recover from a snapshot"),
        (["bootstrap", "--version", "3", "--at", "2026-01-31T12:00:00Z"], "give one of them"),
        (["bootstrap", "--registry", "--only", "true"], "name one"),
        (["bootstrap", "--registry", "--drops-at-most", "0"], "omit it with"),
        (["migrate", "--for", "10m"], "add --canary"),
        (["migrate", "--for", "10m", "--dry-run"], "add --canary"),
        (["migrate", "--canary", "--json"], "omit --json"),
        (["migrate", "--dry-run", "--json"], "omit one of them"),
        (["rescale", "--key-groups", "8", "--dry-run", "--json"], "omit one of them"),
    ],
)
def test_an_option_without_effect_is_refused_with_a_remedy(tmp_path: Path, arguments: list[str], remedy: str) -> None:
    result = CliRunner().invoke(app, ["state", *arguments, "--home", str(tmp_path / "home")])
    assert isinstance(result.exception, Misuse)
    assert remedy in str(result.exception)


def test_a_filter_is_parsed_before_a_home_is_read(tmp_path: Path) -> None:
    arguments = ["state", "bootstrap", "--only", "reflect('java.lang.System', 'exit') = '0'", "--home", str(tmp_path / "home")]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, FleetError) and error.code == "filter-invalid"
