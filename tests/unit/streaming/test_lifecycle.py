"""Process of the lifecycle job without Spark: a lost JVM, temporary files, restarts of the query."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError

from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import Home
from fleetpulse.io.lifecycle.query import start_with_retries
from fleetpulse.io.spark.scratch import remove_temporary_files
from fleetpulse.io.spark.session import JAVA_OPTIONS_KEY, SparkResources, settings
from fleetpulse.io.system.process import StopSignal
from fleetpulse.io.tables import tables
from streaming import lifecycle
from streaming.lifecycle import LifecycleOptions, run_lifecycle
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


class DeadJvm:
    """Stub of a query or session whose JVM was killed: every access fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, _: str) -> Any:
        raise self._error


@pytest.mark.parametrize("error", [Py4JNetworkError("an answer is missing"), ConnectionRefusedError(111, "Connection refused")])
def test_lost_jvm_is_an_error_and_stream_health_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    home, stopped = Home(tmp_path / "home"), list[str]()
    home.prepare(None)
    tables.create(home, MESSAGES)
    health = SimpleNamespace(follow=lambda *_, **__: None, stop=lambda: stopped.append("figures"))
    monkeypatch.setattr(lifecycle, "compile_in_background", lambda: None)
    monkeypatch.setattr(lifecycle, "spark_session", lambda *_, **__: DeadJvm(error))
    monkeypatch.setattr(lifecycle, "start", lambda *_, **__: DeadJvm(error))
    monkeypatch.setattr(lifecycle, "StreamHealth", lambda *_, **__: health)
    with refused("jvm-ended"):
        run_lifecycle(home, StopSignal(), LifecycleOptions(0, 200, None, 0), SparkResources())
    assert stopped == ["figures"]


def test_only_temporary_files_of_a_killed_spark_are_removed(tmp_path: Path) -> None:
    write_id = "5c2d7c1e-4f0e-4a52-9d6b-0d3f2c9a1b7e"
    kept = ["7.changelog", ".7.changelog.crc", ".tmp", "a.tmp", ".metadata.new"]
    temporary = [f".7.changelog.{write_id}.TID12.tmp", f"..7.changelog.{write_id}.TID12.tmp.crc", f".8.{write_id}.tmp"]
    folder = tmp_path / "state" / "0" / "1"
    folder.mkdir(parents=True)
    for name in (*kept, *temporary):
        (folder / name).write_text("x")
    remove_temporary_files(tmp_path)
    assert {path.name for path in folder.iterdir()} == set(kept)


def test_temporary_folder_of_the_jvm_is_in_that_of_the_session() -> None:
    options = settings(Path('/a "b" c/spark'), SparkResources())[JAVA_OPTIONS_KEY]
    assert '"-Djava.io.tmpdir=/a \\"b\\" c/spark/tmp"' in options


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
