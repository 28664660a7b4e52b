"""Start of `./fleet`: each fault is one sentence, and a ready environment is used unchanged."""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from cli.common.bootstrap import EnvironmentFault, gist, is_ready, kind_to_install, only_one, sync
from fleetpulse import __version__
from fleetpulse.paths import ROOT


def start(launcher: Path, *arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [launcher, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def fake_venv(folder: Path, kind: str = "runtime") -> Path:
    """Create an environment that is ready by its stamp; its Python prints its variables and arguments."""
    (folder / "bin").mkdir(parents=True)
    (folder / ".fleet").mkdir()
    python = folder / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH|$PYTHONSAFEPATH|$FLEET_VENV|$*"\n')
    python.chmod(0o755)
    (folder / ".fleet" / f"{kind}.txt").write_bytes((ROOT / "requirements" / f"{kind}.txt").read_bytes())
    return folder


def test_the_command_prints_its_version() -> None:
    result = start(ROOT / "fleet", "version", FLEET_VENV=sys.prefix)
    assert (result.returncode, result.stdout.strip()) == (0, __version__), result.stderr


def test_a_ready_environment_is_used_from_any_folder_and_through_a_link(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path / "venv")
    link = tmp_path / "fleet"
    link.symlink_to(ROOT / "fleet")
    result = start(link, "status", "--home", "a b", folder=tmp_path, FLEET_VENV="venv", PYTHONPATH="")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{ROOT}|1|{venv}|-m cli status --home a b"


def test_an_absent_python_is_reported_in_one_sentence_with_a_remedy(tmp_path: Path) -> None:
    result = start(ROOT / "fleet", "version", FLEET_VENV=str(tmp_path / "none"), FLEET_PYTHON="python-that-is-not-there")
    assert result.returncode == 1
    assert result.stderr.startswith("fleet: Python 3.11 or newer is needed, found none on PATH; install one")
    assert result.stderr.count("\n") == 1


def test_the_path_of_python_may_contain_a_space(tmp_path: Path) -> None:
    python = tmp_path / "my python" / "python3"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1 ;; *) echo 3.10.1 ;; esac\n')
    python.chmod(0o755)
    result = start(ROOT / "fleet", "version", FLEET_VENV=str(tmp_path / "none"), FLEET_PYTHON=str(python))
    assert result.returncode == 1 and f"found 3.10.1 as {python};" in result.stderr, result.stderr


def test_an_error_of_the_command_is_one_line_and_an_exit_code() -> None:
    result = start(ROOT / "fleet", "test", "no-such-layer", FLEET_VENV=sys.prefix)
    assert result.returncode == 2
    assert result.stderr.startswith('fleet: "no-such-layer" is not a test layer')


def test_an_environment_is_ready_only_while_its_stamp_equals_the_lock(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path / "venv")
    assert is_ready(ROOT, venv, "runtime")
    assert not is_ready(ROOT, venv, "dev")
    (venv / ".fleet" / "runtime.txt").write_text("another lock")
    assert not is_ready(ROOT, venv, "runtime")


def test_a_runtime_start_keeps_installed_development_tools(tmp_path: Path) -> None:
    assert kind_to_install(tmp_path, "runtime") == "runtime"
    assert kind_to_install(fake_venv(tmp_path / "venv", "dev"), "runtime") == "dev"


def test_an_interrupted_installation_is_repeated_and_ready_kinds_stay_ready(tmp_path: Path) -> None:
    venv, record, uv = fake_venv(tmp_path / "venv"), tmp_path / "record", tmp_path / "uv"
    stamps = venv / ".fleet"
    (stamps / "operations.txt").write_text("of an older lock")

    def install(end: str) -> str:
        uv.write_text(f'#!/bin/sh\necho "$*; $(ls "{stamps}" | tr "\\n" " ")" > "{record}"\n{end}\n')
        uv.chmod(0o755)
        with suppress(EnvironmentFault):
            sync(uv, ROOT, venv, "operations")
        return record.read_text()

    failed = install("exit 1")
    assert "--reinstall" not in failed and failed.endswith("; runtime.txt \n") and not is_ready(ROOT, venv, "operations")
    assert "--reinstall" not in install("kill -9 $$"), "the failed run before changed nothing"
    repeated = install("echo 'No space left on device (os error 28)'; exit 2")
    assert "--reinstall-package apache-airflow " in repeated and "--reinstall-package pyspark " not in repeated
    assert repeated.endswith("; runtime.txt \n"), "the runtime environment stays ready and is not reinstalled"
    assert "--reinstall-package apache-airflow " in install("exit 1"), "the failed run before repaired nothing"
    assert "--reinstall-package apache-airflow " in install("exit 0")
    assert is_ready(ROOT, venv, "operations") and is_ready(ROOT, venv, "runtime")
    assert "--reinstall" not in install("exit 0")


def test_only_spark_is_built_and_the_tool_that_builds_it_is_pinned_by_hash(tmp_path: Path) -> None:
    venv, record, uv = fake_venv(tmp_path / "venv"), tmp_path / "record", tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "$*" > "{record}"\n')
    uv.chmod(0o755)
    sync(uv, ROOT, venv, "runtime")
    build = ROOT / "requirements" / "build.txt"
    assert f" --only-binary :all: --no-binary pyspark --build-constraints {build} " in record.read_text()
    assert [line for line in build.read_text().splitlines() if "==" in line and line.startswith("setuptools==")]


def test_a_second_installer_waits_for_the_lock_and_fails_after_its_timeout(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with only_one(lock, 1.0):
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    with pytest.raises(EnvironmentFault, match="stop it and try again"), only_one(lock, 0.0):
        pass
    release.set()
    with only_one(lock, 60.0):
        thread.join(60)
        assert not thread.is_alive()


def test_the_gist_of_an_error_is_its_deepest_cause() -> None:
    assert gist("error: outer\n  Caused by: the disk is full.\n") == "Caused by: the disk is full"
    assert gist("") == "no output"
