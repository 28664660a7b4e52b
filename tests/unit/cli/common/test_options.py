"""Options that several commands share: a home is a folder."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app
from fleetpulse.core.errors import FleetError
from fleetpulse.paths import home_folder
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
