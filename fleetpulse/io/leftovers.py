"""What is no table and grows all the same: logs of processes, and what a killed Spark left on the disk.

Rule: what a process may have open is never removed; a log that is long is put aside by copying, since its writer keeps it open.
"""

import os
import shutil
from pathlib import Path
from typing import Final

from fleetpulse.io.home import Home
from fleetpulse.io.services import in_use

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
    shutil.copyfile(log, fresh)
    fresh.replace(aside)
    os.truncate(log, 0)  # who has it open writes at its end, wherever that is


def spark_remains(home: Home, now_s: float) -> list[Path]:
    """Return folders that a killed Spark left, a day old at least; none while a run uses the home."""
    if in_use(home):
        return []
    return sorted(
        path for path in (home.path / "spark").glob("**/local/*") if path.is_dir() and now_s - path.stat().st_mtime > DAY_S
    )


def remove_folders(folders: list[Path]) -> None:
    """Remove folders with all that is in them; what cannot be removed is left for the next time."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
