"""What is no table and grows all the same: logs of processes and of Airflow, pages, and what a killed Spark left on the disk.

Rule: what a process may have open is never removed; a log that is long is put aside by copying, since its writer keeps it open.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import in_use
from fleetpulse.io.spark.scratch import BLOCKS, TEMPORARY

LONG_BYTES: Final = 64 * 1024 * 1024
DAY_S: Final = 86_400


def old_logs(home: Home, keep_ms: int | None, now_s: float) -> list[Path]:
    """Return the logs that nobody has written to for longer than they are kept, but for those of processes that run."""
    if keep_ms is None:
        return []
    running = {path.stem for path in (home.path / "run").glob("*.json")}
    return sorted(
        path
        for path in home.logs.glob("*.log*")
        if path.name.partition(".")[0] not in running and now_s - path.stat().st_mtime > keep_ms / 1000
    )


def long_logs(home: Home) -> list[Path]:
    """Return the logs that are so long that they are put aside."""
    return sorted(path for path in home.logs.glob("*.log") if path.stat().st_size > LONG_BYTES)


def put_aside(log: Path) -> None:
    """Copy a log to ``<name>.1``, over what lies there, and begin it anew; lines that are written in between are lost."""
    aside = log.with_name(f"{log.name}.1")
    fresh = log.with_name(f"{log.name}.1.new")
    try:
        shutil.copyfile(log, fresh)
    except OSError:
        fresh.unlink(missing_ok=True)  # of a full disk it would keep what it took
        raise
    fresh.replace(aside)
    os.truncate(log, 0)  # who has it open writes at its end, wherever that is


def spark_remains(home: Home, now_s: float) -> list[Path]:
    """Return folders that a killed Spark left, a day old at least; none while a run uses the home."""
    if in_use(home):
        return []
    place = home.path / "spark"
    left = (path for pattern in ("local/*", f"{TEMPORARY}/*", BLOCKS) for path in place.glob(f"**/{pattern}"))
    return sorted(path for path in left if path.is_dir() and now_s - path.stat().st_mtime > DAY_S)


def airflow_logs(home: Home) -> Path:
    """Return where the Airflow of ``./fleet up`` keeps the logs of its tasks and of its reading of the DAGs."""
    return home.path / "airflow" / "logs"


def old_files(folder: Path, keep_ms: int | None, now_s: float) -> list[Path]:
    """Return the files anywhere below a folder that nobody has written to for longer than they are kept; all stay with None."""
    if keep_ms is None:
        return []
    return sorted(path for path, at_s in _below(folder) if now_s - at_s > keep_ms / 1000)


def old_backtests(home: Home, keep_ms: int | None, now_s: float) -> list[Path]:
    """Return the folders of runs of ``fleet_backtest`` in which nothing was written for longer than they are kept."""
    if keep_ms is None:
        return []
    runs = [path for path in (home.path / "airflow" / "fleet" / "backtests").glob("*") if path.is_dir() and not path.is_symlink()]
    return sorted(
        path for path in runs if now_s - max([path.stat().st_mtime, *(at_s for _, at_s in _below(path))]) > keep_ms / 1000
    )


def remove_empty(folder: Path, now_s: float) -> None:
    """Remove the empty folders below a folder in which nothing has changed for a day: in a younger one a file may be made now."""
    for at, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):  # it is not empty, or gone
            if Path(at) != folder and now_s - Path(at).stat().st_mtime > DAY_S:
                Path(at).rmdir()


def _below(folder: Path) -> Iterator[tuple[Path, float]]:
    """Give the files below a folder and when each was last written to, epoch seconds; links are passed over."""
    for at, _, names in os.walk(folder):
        for path in (Path(at, name) for name in names):
            with suppress(FileNotFoundError):
                if not path.is_symlink():
                    yield path, path.stat().st_mtime
