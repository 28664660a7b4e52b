"""The one entry: what is missing is one sentence, and a ready environment starts nothing but the command."""

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


def start(launcher: Path, *words: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [launcher, *words],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def fake_venv(folder: Path, kind: str = "runtime") -> Path:
    """An environment that is ready by its stamp, and whose Python prints what it is called with."""
    (folder / "bin").mkdir(parents=True)
    (folder / ".fleet").mkdir()
    python = folder / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$PYTHONPATH|$PYTHONSAFEPATH|$FLEET_VENV|$*"\n')
    python.chmod(0o755)
    (folder / ".fleet" / f"{kind}.txt").write_bytes((ROOT / "requirements" / f"{kind}.txt").read_bytes())
    return folder


def test_the_command_answers() -> None:
    done = start(ROOT / "fleet", "version", FLEET_VENV=sys.prefix)
    assert (done.returncode, done.stdout.strip()) == (0, __version__), done.stderr


def test_a_ready_environment_is_used_from_any_folder_and_by_a_link(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path / "venv")
    link = tmp_path / "fleet"
    link.symlink_to(ROOT / "fleet")
    done = start(link, "status", "--home", "a b", folder=tmp_path, FLEET_VENV="venv", PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{ROOT}|1|{venv}|-m cli status --home a b"


def test_no_python_is_one_sentence_with_what_to_do(tmp_path: Path) -> None:
    done = start(ROOT / "fleet", "version", FLEET_VENV=str(tmp_path / "none"), FLEET_PYTHON="python-that-is-not-there")
    assert done.returncode == 1
    assert done.stderr.startswith("fleet: Python 3.11 or newer is needed, found none on PATH; install one")
    assert done.stderr.count("\n") == 1


def test_a_python_may_lie_in_a_folder_with_a_space(tmp_path: Path) -> None:
    named = tmp_path / "my python" / "python3"
    named.parent.mkdir()
    named.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1 ;; *) echo 3.10.1 ;; esac\n')
    named.chmod(0o755)
    done = start(ROOT / "fleet", "version", FLEET_VENV=str(tmp_path / "none"), FLEET_PYTHON=str(named))
    assert done.returncode == 1 and f"found 3.10.1 as {named};" in done.stderr, done.stderr


def test_an_error_of_the_command_is_one_line_and_an_exit_code() -> None:
    done = start(ROOT / "fleet", "test", "no-such-layer", FLEET_VENV=sys.prefix)
    assert done.returncode == 2
    assert done.stderr.startswith('fleet: "no-such-layer" is not a test layer')


def test_an_environment_is_ready_only_while_its_stamp_equals_the_lock(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path / "venv")
    assert is_ready(ROOT, venv, "runtime")
    assert not is_ready(ROOT, venv, "dev")
    (venv / ".fleet" / "runtime.txt").write_text("another lock")
    assert not is_ready(ROOT, venv, "runtime")


def test_a_runtime_start_keeps_the_tools_of_who_develops(tmp_path: Path) -> None:
    assert kind_to_install(tmp_path, "runtime") == "runtime"
    assert kind_to_install(fake_venv(tmp_path / "venv", "dev"), "runtime") == "dev"


def test_what_was_broken_off_is_installed_anew_and_what_was_ready_stays_so_meanwhile(tmp_path: Path) -> None:
    venv, told, uv = fake_venv(tmp_path / "venv"), tmp_path / "told", tmp_path / "uv"
    stamps = venv / ".fleet"
    (stamps / "operations.txt").write_text("of an older lock")

    def install(end: str) -> str:
        uv.write_text(f'#!/bin/sh\necho "$*; $(ls "{stamps}" | tr "\\n" " ")" > "{told}"\n{end}\n')
        uv.chmod(0o755)
        with suppress(EnvironmentFault):
            sync(uv, ROOT, venv, "operations")
        return told.read_text()

    refused = install("exit 1")
    assert "--reinstall" not in refused and refused.endswith("; runtime.txt \n") and not is_ready(ROOT, venv, "operations")
    assert "--reinstall" not in install("kill -9 $$"), "what was refused changed nothing"
    again = install("echo 'No space left on device (os error 28)'; exit 2")
    assert "--reinstall-package apache-airflow " in again and "--reinstall-package pyspark " not in again
    assert again.endswith("; runtime.txt \n"), "what is whole is neither taken away nor made anew"
    assert "--reinstall-package apache-airflow " in install("exit 1"), "what was refused mended nothing either"
    assert "--reinstall-package apache-airflow " in install("exit 0")
    assert is_ready(ROOT, venv, "operations") and is_ready(ROOT, venv, "runtime")
    assert "--reinstall" not in install("exit 0")


def test_a_second_installer_waits_its_turn_and_says_so_when_it_never_comes(tmp_path: Path) -> None:
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


def test_the_deepest_cause_is_the_gist() -> None:
    assert gist("error: outer\n  Caused by: the disk is full.\n") == "Caused by: the disk is full"
    assert gist("") == "no output"
