"""Process of the lifecycle job without Spark: a lost JVM, temporary files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError

from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import Home
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
