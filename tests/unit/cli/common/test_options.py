"""Options that several commands share: homes and modes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.common.options import check_mode
from fleetpulse.core.errors import FleetError, Misuse
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.replay import Deployment
from fleetpulse.core.times import format_instant
from fleetpulse.paths import home_folder
from tests.support.histories.histories import START, signal, tick
from tests.support.homes.homes import landed_home
from tests.support.refusals import refused


@pytest.mark.parametrize("address", ["s3://bucket/home", "s3a://bucket/home", "file:///srv/home", "abfss://a@b/c"])
def test_a_home_on_an_object_store_is_refused(address: str) -> None:
    with refused("home-is-an-address"):
        home_folder(Path(address))
    for command in ("status", "plan", "quality run"):
        done = CliRunner().invoke(app, [*command.split(), "--home", address])
        assert isinstance(done.exception, FleetError) and done.exception.code == "home-is-an-address"


def test_folders_are_homes() -> None:
    for folder in (".fleet", "/srv/fleet", "a:b/c", "../home"):
        assert home_folder(Path(folder)) == Path(folder)


def test_an_unknown_mode_is_refused() -> None:
    check_mode(None)
    for mode in Mode:
        check_mode(mode.value)
    check_mode("unjudged", "unjudged")
    for name in ("on", "ONLINE", "", "unjudged"):
        with refused("mode-unknown", Misuse):
            check_mode(name)


def test_commands_refuse_an_unknown_mode(tmp_path: Path) -> None:
    home = landed_home(tmp_path / "home", [signal(0, "pump"), tick(100)], Deployment(10_000))
    for command in ("devices", f"rewind --to {format_instant(START)}"):
        done = CliRunner().invoke(app, [*command.split(), "--home", str(home.path), "--mode", "on"])
        assert isinstance(done.exception, Misuse) and done.exception.code == "mode-unknown"
    assert CliRunner().invoke(app, ["devices", "--home", str(home.path), "--mode", "unjudged"]).exit_code == 0
