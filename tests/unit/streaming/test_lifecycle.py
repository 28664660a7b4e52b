"""The lifecycle job's process, without Spark: what becomes of it when the JVM is gone, and what it leaves behind."""

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


class Gone:
    """What stands for a query or a session whose JVM was killed: whatever it is asked fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, _: str) -> Any:
        raise self._error


@pytest.mark.parametrize("error", [Py4JNetworkError("an answer is missing"), ConnectionRefusedError(111, "Connection refused")])
def test_a_jvm_that_is_gone_is_said_and_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    home, stopped = Home(tmp_path / "home"), list[str]()
    home.prepare(None)
    tables.create(home, MESSAGES)
    health = SimpleNamespace(follow=lambda *_, **__: None, stop=lambda: stopped.append("figures"))
    monkeypatch.setattr(lifecycle, "compile_in_background", lambda: None)
    monkeypatch.setattr(lifecycle, "spark_session", lambda *_, **__: Gone(error))
    monkeypatch.setattr(lifecycle, "start", lambda *_, **__: Gone(error))
    monkeypatch.setattr(lifecycle, "StreamHealth", lambda *_, **__: health)
    with refused("jvm-ended"):
        run_lifecycle(home, StopSignal(), LifecycleOptions(0, 200, None, 0), SparkResources())
    assert stopped == ["figures"]


def test_what_a_killed_spark_was_writing_goes_and_all_else_stays(tmp_path: Path) -> None:
    aside = "5c2d7c1e-4f0e-4a52-9d6b-0d3f2c9a1b7e"
    names = ["7.changelog", ".7.changelog.crc", ".tmp", "a.tmp", ".metadata.new"]
    left = [f".7.changelog.{aside}.TID12.tmp", f"..7.changelog.{aside}.TID12.tmp.crc", f".8.{aside}.tmp"]
    folder = tmp_path / "state" / "0" / "1"
    folder.mkdir(parents=True)
    for name in (*names, *left):
        (folder / name).write_text("x")
    remove_temporary_files(tmp_path)
    assert {path.name for path in folder.iterdir()} == set(names)


def test_a_jvms_temporary_files_lie_with_the_session_whatever_its_folder_is_called() -> None:
    told = settings(Path('/a "b" c/spark'), SparkResources())[JAVA_OPTIONS_KEY]
    assert '"-Djava.io.tmpdir=/a \\"b\\" c/spark/tmp"' in told


class _Query:
    """A query that is initialized for a while, and then is active, or has failed."""

    def __init__(self, error: str | None, looks: int = 2) -> None:
        self.error, self.looks = error, looks

    @property
    def status(self) -> dict[str, Any]:
        self.looks -= 1
        return {"message": "Initializing sources" if self.looks >= 0 else "Waiting for next trigger"}

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        return self.looks > 0 or self.error is None

    def exception(self) -> Exception | None:
        return None if self.error is None else RuntimeError(self.error)


_LATE = "[STREAM_FAILED] Query failed: Python worker failed to connect back."


@pytest.mark.parametrize(
    ("errors", "starts", "runs"),
    [
        ([None], 1, True),
        ([_LATE, _LATE, None], 3, True),
        (["the checkpoint is damaged", None], 1, False),
        ([_LATE] * 9, 5, False),
    ],
)
def test_a_query_whose_source_connects_too_late_is_started_again_and_no_other(
    errors: list[str | None], starts: int, runs: bool
) -> None:
    begun: list[_Query] = []

    def begin() -> Any:
        begun.append(_Query(errors[len(begun)]))
        return begun[-1]

    query = start_with_retries(begin, look_s=0)
    assert (len(begun), query.isActive) == (starts, runs)
    assert query is begun[-1]


def test_a_query_that_is_no_longer_wanted_is_not_started_again() -> None:
    begun: list[_Query] = []

    def begin() -> Any:
        begun.append(_Query(_LATE))
        return begun[-1]

    assert start_with_retries(begin, lambda: True, 0) is begun[0]
    assert len(begun) == 1
