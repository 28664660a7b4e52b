"""Spark's class archive: valid for one Java and its JARs, and never used when truncated."""

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from cli.supervisor import cds
from fleetpulse.io.spark.cds_archive import class_archive, create_options, fresh_archive, publish_archive, use_options
from fleetpulse.io.system.process import StopSignal
from tests.support.wait import await_that

ARCHIVE = b"classes" * 100
_POPEN = subprocess.Popen


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def java(tmp_path: Path) -> Path:
    (tmp_path / "java").mkdir()
    (tmp_path / "java" / "release").write_text('JAVA_VERSION="17.0.15"')
    return tmp_path / "java"


def _jars(tmp_path: Path, *names: str) -> list[Path]:
    for name in names:
        (tmp_path / name).write_bytes(b"jar")
    return [tmp_path / name for name in names]


def _publish(java: Path, jars: list[Path]) -> Path:
    fresh = fresh_archive()
    fresh.write_bytes(ARCHIVE)
    return publish_archive(fresh, java, jars)


def test_archive_is_found_only_for_the_same_java_and_jars(tmp_path: Path, java: Path) -> None:
    jars = _jars(tmp_path, "one.jar", "other.jar")
    assert class_archive(java, jars) is None
    kept = _publish(java, jars)
    assert class_archive(java, jars) == kept and kept.read_bytes() == ARCHIVE
    assert class_archive(java, jars[::-1]) is None, "the order of the class path matters"
    assert class_archive(java, jars[:1]) is None
    assert class_archive(tmp_path / "another java", jars) is None
    os.utime(jars[0], (1, 1))
    assert class_archive(java, jars) is None


def test_truncated_archive_that_would_crash_a_jvm_is_not_used(tmp_path: Path, java: Path) -> None:
    jars = _jars(tmp_path, "one.jar")
    kept = _publish(java, jars)
    kept.write_bytes(ARCHIVE[:-1])
    assert class_archive(java, jars) is None
    assert class_archive(java, jars) != _publish(java, jars) == class_archive(java, jars), "a new archive is found"


def test_new_archive_replaces_only_that_of_its_own_installation(tmp_path: Path, java: Path, cache: Path) -> None:
    jars, others = _jars(tmp_path, "one.jar"), _jars(tmp_path, "another.jar")
    first, another = _publish(java, jars), _publish(java, others)
    os.utime(jars[0], (1, 1))
    second = _publish(java, jars)
    assert {*cache.rglob("*.jsa")} == {second, another} and first != second


def test_a_path_with_a_space_is_one_option(tmp_path: Path) -> None:
    for option in (use_options(tmp_path / "a b.jsa"), create_options(tmp_path / "a b.jsa")):
        assert f'{tmp_path}/a b.jsa"' in option and option.count('"') == 2


@pytest.fixture
def installed(tmp_path: Path, java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cds, "find_java", lambda: java)
    jars = _jars(tmp_path, "one.jar")
    monkeypatch.setattr(cds, "jars_of_spark", lambda: jars)


def _replace_training_run(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run a program instead of the training run; its arguments are a folder and the path of the archive."""

    def start_program(command: list[str], **options: Any) -> Any:
        return _POPEN([command[0], "-c", code, *command[-2:]], **options)

    monkeypatch.setattr(subprocess, "Popen", start_program)


@pytest.mark.usefixtures("installed")
def test_training_run_is_done_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_training_run(monkeypatch, "import sys, pathlib; pathlib.Path(sys.argv[2]).write_bytes(bytes(3_000_000))")
    assert not cds.archive_is_ready()
    assert cds.create_archive() == "Spark's class archive is ready: 3 MB"
    _replace_training_run(monkeypatch, "raise SystemExit(1)")
    assert cds.archive_is_ready() and cds.create_archive() == "Spark's class archive is ready"
    assert len([*cache.rglob("*.*")]) == 1


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys, pathlib; pathlib.Path(sys.argv[2]).write_bytes(b'half'); raise SystemExit('no room')", "no room"),
        ("raise SystemExit(3)", "no output"),
    ],
)
def test_failed_training_run_is_reported_and_leaves_no_file(
    code: str, reason: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _replace_training_run(monkeypatch, code)
    text = cds.create_archive()
    assert text.startswith("Spark's class archive is not created (") and reason in text and "nothing else differs" in text
    assert not [path for path in cache.rglob("*") if path.is_file()]
    assert not cds.archive_is_ready(), "the next run tries again"


@pytest.mark.usefixtures("installed")
def test_java_that_writes_no_archive_is_tried_again_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_training_run(monkeypatch, "pass")
    assert "No such file" in cds.create_archive()
    assert cds.archive_is_ready()
    _replace_training_run(monkeypatch, "import sys, pathlib; pathlib.Path(sys.argv[2]).write_bytes(bytes(3_000_000))")
    assert cds.create_archive() == "Spark's class archive is ready: 3 MB"
    assert cds.archive_is_ready()


@pytest.mark.usefixtures("installed")
def test_unwritable_cache_is_reported_without_an_error(cache: Path) -> None:
    cache.write_text("no folder")
    text = cds.create_archive()
    assert text.startswith("Spark's class archive is not created (cannot write ") and "nothing else differs" in text


@pytest.mark.usefixtures("installed")
def test_training_run_is_killed_when_the_caller_stops(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    _replace_training_run(monkeypatch, f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(600)")
    stop = StopSignal()
    threading.Thread(
        target=lambda: (await_that(started.exists, what="the training run started"), stop.set()), daemon=True
    ).start()
    assert "the training run was killed" in cds.create_archive(stop)
    assert not [path for path in cache.rglob("*") if path.is_file()]
