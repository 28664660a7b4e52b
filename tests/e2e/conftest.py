"""What holds for tests of real processes."""

from collections.abc import Iterator

import pytest

from tests.begun import end_the_begun


@pytest.fixture(scope="session", autouse=True)
def batches_are_few() -> Iterator[None]:
    """Let jobs begin one batch a second at most: tests wait for verdicts, and each batch takes half a second of CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEET_BATCH_EVERY", "1s")
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """End what a test that failed has left, or those after it would fail for want of a core."""
    yield
    end_the_begun()
