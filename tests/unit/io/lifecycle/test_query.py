"""Restart of a query without Spark: only if one of its Python processes connected too late."""

from typing import Any

import pytest

from fleetpulse.io.lifecycle.query import start_with_retries

pytestmark = pytest.mark.unit


class _Query:
    """Query stub that initializes for some checks, and is then active or failed."""

    def __init__(self, error: str | None, checks: int = 2) -> None:
        self.error, self.checks = error, checks

    @property
    def status(self) -> dict[str, Any]:
        self.checks -= 1
        return {"message": "Initializing sources" if self.checks >= 0 else "Waiting for next trigger"}

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        return self.checks > 0 or self.error is None

    def exception(self) -> Exception | None:
        return None if self.error is None else RuntimeError(self.error)


_NOT_CONNECTED = "[STREAM_FAILED] Query failed: Python worker failed to connect back."


@pytest.mark.parametrize(
    ("errors", "starts", "runs"),
    [
        ([None], 1, True),
        ([_NOT_CONNECTED, _NOT_CONNECTED, None], 3, True),
        (["the checkpoint is damaged", None], 1, False),
        ([_NOT_CONNECTED] * 9, 5, False),
    ],
)
def test_query_restarts_only_if_its_source_connected_too_late(errors: list[str | None], starts: int, runs: bool) -> None:
    started: list[_Query] = []

    def start() -> Any:
        started.append(_Query(errors[len(started)]))
        return started[-1]

    query = start_with_retries(start, poll_s=0)
    assert (len(started), query.isActive) == (starts, runs)
    assert query is started[-1]


@pytest.mark.parametrize(("bounded", "starts"), [(True, 2), (False, 1)])
def test_bounded_query_restarts_if_a_process_of_its_first_batch_connected_too_late(bounded: bool, starts: int) -> None:
    class Initialized(_Query):
        @property
        def status(self) -> dict[str, Any]:
            return {"message": "Processing new data"}

        @property
        def lastProgress(self) -> Any:  # noqa: N802 - Spark's name
            self.checks -= 1
            return None if self.error or self.checks > 0 else {"batchId": 0}

    started: list[Initialized] = []

    def start() -> Any:
        started.append(Initialized(None if started else _NOT_CONNECTED))
        return started[-1]

    assert start_with_retries(start, poll_s=0, bounded=bounded) is started[-1]
    assert len(started) == starts


def test_cancelled_query_is_not_restarted() -> None:
    started: list[_Query] = []

    def start() -> Any:
        started.append(_Query(_NOT_CONNECTED))
        return started[-1]

    assert start_with_retries(start, lambda: True, 0) is started[0]
    assert len(started) == 1
