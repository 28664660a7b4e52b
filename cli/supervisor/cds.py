"""Spark's classes kept for later starts: the rehearsal in a process of its own, ended with whoever wants it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.spark.cds_archive import class_archive, fresh_archive, keep, makes_none
from fleetpulse.io.spark.jars import jars_of_spark
from fleetpulse.io.spark.java import find_java
from fleetpulse.io.system.process import Stop

_REHEARSED_S: Final = 600.0  # some forty seconds on a machine that does nothing else
_ABSENT: Final = "a start takes some seconds longer, and nothing else differs"


def classes_are_kept() -> bool:
    """Whether there is nothing more to be done for later starts of Spark: they find its classes, or this Java keeps none."""
    java, jars = find_java(), jars_of_spark()
    return class_archive(java, jars) is not None or makes_none(java, jars)


def keep_classes(stop: Stop | None = None) -> str:
    """Keep Spark's classes as the JVM has them, where that has not been done; no start needs them, so it may come to nothing.

    Args:
        stop: when to leave it; None goes on to its end.

    Returns:
        What came of it, for a person.

    Raises:
        FleetError: Java or a JAR cannot be had.
    """
    java, jars = find_java(), jars_of_spark()
    if class_archive(java, jars) is not None:
        return "Spark's classes are kept"
    try:
        fresh = fresh_archive()
        with tempfile.TemporaryDirectory(prefix="fleet-", ignore_cleanup_errors=True) as folder:
            try:
                _rehearse(Path(folder), fresh, stop)
                kept = keep(fresh, java, jars)
            finally:
                fresh.unlink(missing_ok=True)
    except (FleetError, OSError) as error:
        return f"Spark's classes are not kept ({error}); {_ABSENT}"
    return f"Spark's classes are kept: {kept.stat().st_size / 1e6:.0f} MB"


def _rehearse(folder: Path, fresh: Path, stop: Stop | None) -> None:
    log = folder / "log"
    command = [sys.executable, "-P", "-m", "batch.cds_training", str(folder), str(fresh)]
    with log.open("wb") as said:
        running = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, start_new_session=True)
    limit = time.monotonic() + _REHEARSED_S
    try:
        while running.poll() is None and time.monotonic() < limit:
            if stop is not None and stop.is_set():
                break
            time.sleep(0.1)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)  # with the JVM, and Spark's Python
            running.wait()
    if running.returncode != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = lines[-1][:200] if lines else "it said nothing"
        raise FleetError("it was ended" if running.returncode < 0 else why, code="class-archive-failed")
