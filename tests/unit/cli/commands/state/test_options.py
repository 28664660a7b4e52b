"""Options of ``fleet state`` that say nothing together are refused, before anything is looked at."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from fleetpulse.core.errors import Misuse


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["bootstrap", "--damaged", "--registry"], "recover from a snapshot"),
        (["bootstrap", "--damaged", "--devices", "a.csv"], "recover from a snapshot"),
        (["bootstrap", "--version", "3", "--at", "2026-01-31T12:00:00Z"], "give one of them"),
        (["bootstrap", "--registry", "--only", "true"], "name one"),
        (["migrate", "--for", "10m"], "add --canary"),
        (["migrate", "--for", "10m", "--dry-run"], "add --canary"),
        (["migrate", "--canary", "--json"], "omit --json"),
        (["migrate", "--dry-run", "--json"], "omit one of them"),
        (["rescale", "--key-groups", "8", "--dry-run", "--json"], "omit one of them"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_with_what_to_do(tmp_path: Path, given: list[str], why: str) -> None:
    done = CliRunner().invoke(app, ["state", *given, "--home", str(tmp_path / "home")])
    assert isinstance(done.exception, Misuse)
    assert why in str(done.exception)
