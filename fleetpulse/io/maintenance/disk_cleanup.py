"""Cleanup of files outside of tables: logs, backtests, leftovers of killed Spark processes.

Rule: a file that a process may have open is never removed. A long log is rotated by copying, since
its writer keeps it open.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from fleetpulse.core.times import DAY_S
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import in_use
from fleetpulse.io.spark.scratch import BLOCKS, TEMPORARY

LONG_BYTES: Final = 64 * 1024 * 1024


def old_logs(home: Home, keep_ms: int | None, now_s: float) -> list[Path]:
    """Return logs older than their retention, without those of running processes.

    Args:
        home: home of the logs.
        keep_ms: retention since the last write, milliseconds; None keeps all logs.
        now_s: current time, epoch seconds.
    """
    if keep_ms is None:
        return []
    running = {path.stem for path in (home.path / "run").glob("*.json")}
    return sorted(
        path
        for path in home.logs.glob("*.log*")
        if path.name.partition(".")[0] not in running and now_s - path.stat().st_mtime > keep_ms / 1000
    )


def long_logs(home: Home) -> list[Path]:
    """Return the logs that are long enough to be rotated, see `rotate_log`."""
    return sorted(path for path in home.logs.glob("*.log") if path.stat().st_size > LONG_BYTES)


def rotate_log(log: Path) -> None:
    """Rotate a log: copy it to ``<name>.1``, and truncate it.

    An existing ``<name>.1`` is replaced. Lines written between copy and truncation are lost.
    """
    rotated = log.with_name(f"{log.name}.1")
    fresh = log.with_name(f"{log.name}.1.new")
    try:
        shutil.copyfile(log, fresh)
    except OSError:
        fresh.unlink(missing_ok=True)  # on a full disk, it would keep occupying space
        raise
    fresh.replace(rotated)
    os.truncate(log, 0)  # its writer appends at the new end


def spark_remains(home: Home, now_s: float) -> list[Path]:
    """Return folders of at least one day that a killed Spark left behind.

    The list is empty while a run or a service uses the home.
    """
    if in_use(home):
        return []
    place = home.path / "spark"
    left = (path for pattern in ("local/*", f"{TEMPORARY}/*", BLOCKS) for path in place.glob(f"**/{pattern}"))
    return sorted(path for path in left if path.is_dir() and now_s - path.stat().st_mtime > DAY_S)


def airflow_logs(home: Home) -> Path:
    """Return the folder of task and DAG processor logs of ``./fleet up``'s Airflow."""
    return home.path / "airflow" / "logs"


def old_files(folder: Path, keep_ms: int | None, now_s: float) -> list[Path]:
    """Return all files below a folder that are older than a retention.

    Args:
        folder: folder to search, with its subfolders.
        keep_ms: retention since the last write, milliseconds; None keeps all files.
        now_s: current time, epoch seconds.
    """
    if keep_ms is None:
        return []
    return sorted(path for path, at_s in _below(folder) if now_s - at_s > keep_ms / 1000)


def old_backtests(home: Home, keep_ms: int | None, now_s: float) -> list[Path]:
    """Return the folders of old runs of the DAG ``fleet_backtest``.

    Args:
        home: home of the runs.
        keep_ms: retention since the last write to a folder, milliseconds; None keeps all folders.
        now_s: current time, epoch seconds.
    """
    if keep_ms is None:
        return []
    runs = [path for path in (home.path / "airflow" / "fleet" / "backtests").glob("*") if path.is_dir() and not path.is_symlink()]
    return sorted(
        path for path in runs if now_s - max([path.stat().st_mtime, *(at_s for _, at_s in _below(path))]) > keep_ms / 1000
    )


def old_approvals(home: Home, now_s: float) -> list[Path]:
    """Return the approvals of runs in Airflow that have left them, unchanged for a week.

    An approval is valid for a day.
    """
    return old_files(home.path / "airflow" / "fleet" / "approvals", 7 * DAY_S * 1000, now_s)


def remove_empty(folder: Path, now_s: float) -> None:
    """Remove the empty folders below a folder that are unchanged for a day.

    A process may still create a file in a folder that changed later.
    """
    for at, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):  # the folder is not empty, or no longer exists
            if Path(at) != folder and now_s - Path(at).stat().st_mtime > DAY_S:
                Path(at).rmdir()


def _below(folder: Path) -> Iterator[tuple[Path, float]]:
    """Yield the files below a folder with their last write, epoch seconds; skip links."""
    for at, _, names in os.walk(folder):
        for path in (Path(at, name) for name in names):
            with suppress(FileNotFoundError):
                if not path.is_symlink():
                    yield path, path.stat().st_mtime
