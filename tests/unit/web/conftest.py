"""Fixtures of the tests of the API: a home with rows for each route, and the application over it."""

from collections.abc import Iterator

import pytest

from tests.support.api import Api
from tests.support.homes.api_home import ApiHome, api_home


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ApiHome:
    """Return the home of a module's tests, which may add rows."""
    return api_home(tmp_path_factory.mktemp("made") / "home")


@pytest.fixture(scope="module")
def api(made: ApiHome) -> Iterator[Api]:
    """Serve the home of a module's tests."""
    opened = Api(made.home)
    yield opened
    opened.close()
