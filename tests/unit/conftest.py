"""Fixtures of the unit tests: a new home for each test."""

from pathlib import Path

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.io.home.home import Home
from tests.support.homes.homes import empty


@pytest.fixture
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    """Return a new home in ``tmp_path``.

    The marker ``home`` has these parameters: ``tables``, a deployment with which all tables are
    created (default: no tables); ``name``, the name of the folder (default: ``home``).
    A module that needs more overrides the fixture with one that takes ``home``.
    """
    marker = request.node.get_closest_marker("home")
    parameters = marker.kwargs if marker else {}
    path, deployment = tmp_path / parameters.get("name", "home"), parameters.get("tables")
    if isinstance(deployment, Deployment):
        return empty(path, deployment)
    new_home = Home(path)
    new_home.prepare(None)
    return new_home
