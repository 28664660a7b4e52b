"""Expectation of errors by their codes, which are more stable than messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fleetpulse.core.errors import FleetError


@contextmanager
def refused(code: str, kind: type[FleetError] = FleetError, *, match: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error with a code; the yielded object has the error after the block.

    Args:
        code: code of the error, see `FleetError`.
        kind: class of the error.
        match: regular expression for facts in the message, such as an instant.
    """
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert caught.value.code == code, f"expected {code}, got {caught.value.code}: {caught.value}"
