"""Start of ``fleet up``: the home that it makes."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.supervisor.up import UpOptions, up
from fleetpulse.io.home.home import Home
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("chosen", "groups"),
    [
        ({"CORES": "2"}, 8),
        ({"CORES": "16"}, 39),
        ({"SPARK_MASTER": "spark://10.0.0.5:7077", "EXECUTORS": "4", "EXECUTOR_CORES": "4"}, 39),
    ],
)
def test_up_makes_a_home_with_key_groups_for_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], groups: int
) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(f"FLEET_{name}", value)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))  # ends the start after the home is made
    home = Home(tmp_path / "home")
    with refused("disk-nearly-full"):
        up(home, UpOptions(None, None, None, False, None, 0, None), None)
    assert home.key_groups() == groups
