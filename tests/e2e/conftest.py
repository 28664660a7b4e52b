"""What holds for tests of real processes."""

from collections.abc import Iterator

import pytest

from tests.begun import end_the_begun


@pytest.fixture(autouse=True)
def nothing_is_left_running() -> Iterator[None]:
    """End what a test that failed has left, or those after it would fail for want of a core."""
    yield
    end_the_begun()
