"""Errors by their codes, which do not change when their sentences do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fleetpulse.core.errors import FleetError


@contextmanager
def refused(code: str, kind: type[FleetError] = FleetError, *, match: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expect an error with a code; its sentence can be read from what is yielded, once the block has ended.

    Args:
        code: see `FleetError`.
        kind: the class of the error.
        match: regular expression of the facts that the sentence names, such as an instant or a fault among several.
    """
    with pytest.raises(kind, match=match) as caught:
        yield caught
    assert caught.value.code == code, f"expected {code}, got {caught.value.code}: {caught.value}"
