"""Fixtures of the tests with real processes."""

from collections.abc import Iterator

import pytest

from tests.support.processes import kill_registered


@pytest.fixture(scope="session", autouse=True)
def few_batches() -> Iterator[None]:
    """Limit jobs to one batch in four seconds: each batch takes half a second of CPU, twice that on a slow machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEET_BATCH_EVERY", "4s")
        yield


@pytest.fixture(autouse=True)
def no_process_remains() -> Iterator[None]:
    """End processes that a failed test left, which would take a core from later tests."""
    yield
    kill_registered()
