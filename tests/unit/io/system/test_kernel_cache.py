"""Kernel cache: kernels are compiled once per state of their sources, by one process at a time."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fleetpulse.io.system import kernel_cache
from fleetpulse.paths import ROOT

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))


def test_concurrent_callers_compile_once_and_later_ones_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Path] = []

    def compile_into() -> Path:
        compiled.append(tmp_path)
        return tmp_path

    monkeypatch.setattr(kernel_cache, "_compile", compile_into)
    assert not kernel_cache.kernels_are_kept()
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(kernel_cache.ensure_kernels_compiled) for _ in range(4)]:
            done.result()
    assert compiled == [tmp_path]
    assert kernel_cache.kernels_are_kept() and kernel_cache.compile_in_background() is None
    kernel_cache.ensure_kernels_compiled()
    assert compiled == [tmp_path]


def test_missing_or_outdated_kernels_are_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr(kernel_cache, "_compile", lambda: folder)
    kernel_cache.ensure_kernels_compiled()
    assert kernel_cache.kernels_are_kept()
    monkeypatch.setattr(kernel_cache, "SOURCES_DIGEST", "0" * 16)
    assert not kernel_cache.kernels_are_kept()
    monkeypatch.undo()
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "cache"))
    assert kernel_cache.kernels_are_kept()
    folder.rmdir()
    assert not kernel_cache.kernels_are_kept()


def test_unwritable_cache_costs_only_compile_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLEET_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(kernel_cache, "_compile", lambda: compiled.append(1) or tmp_path)
    kernel_cache.ensure_kernels_compiled()
    assert compiled == [1]


def _run(script: str) -> None:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_spark_planner_imports_no_heavy_library() -> None:
    _run(
        "import sys, fleetpulse.io.lifecycle.bronze_source\n"
        "assert not {'numba', 'pandas', 'deltalake', 'duckdb'} & set(sys.modules)"
    )


def test_spark_workers_fork_from_one_thread_with_preloaded_imports() -> None:
    _run(
        "import os, sys\n"
        "from fleetpulse.io.lifecycle import python_daemon\n"
        "python_daemon.preload()\n"
        "assert {'numba', 'pyspark.worker', 'fleetpulse.io.lifecycle.group_task'} <= set(sys.modules), 'imports are missing'\n"
        "tasks = '/proc/self/task'\n"
        "assert not os.path.isdir(tasks) or len(os.listdir(tasks)) == 1, os.listdir(tasks)\n"
    )
