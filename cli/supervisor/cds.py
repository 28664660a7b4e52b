"""Creation of the class data sharing (CDS) archive that speeds up Spark's starts.

A training run in a separate process creates it; that process ends with its caller.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from fleetpulse.core.errors import FleetError
from fleetpulse.io.spark.cds_archive import class_archive, fresh_archive, publish_archive, writes_no_archive
from fleetpulse.io.spark.jars import jars_of_spark
from fleetpulse.io.spark.java import find_java
from fleetpulse.io.system.process import StopSignal

_TRAINING_TIMEOUT_S: Final = 600.0  # the training run takes about 40 s on an idle machine
_ABSENT: Final = "Spark starts take a few seconds longer, and nothing else differs"


def archive_is_ready() -> bool:
    """Return whether the archive exists, or this Java cannot create one."""
    java, jars = find_java(), jars_of_spark()
    return class_archive(java, jars) is not None or writes_no_archive(java, jars)


def create_archive(stop: StopSignal | None = None) -> str:
    """Create the class archive of Spark, unless it exists.

    The archive is optional: if it cannot be created, the returned text gives the reason.

    Args:
        stop: signal that ends the training run early; None for a run to its end.

    Returns:
        Outcome in one line, for the user.

    Raises:
        FleetError: Java or a JAR is not available.
    """
    java, jars = find_java(), jars_of_spark()
    if class_archive(java, jars) is not None:
        return "Spark's class archive is ready"
    try:
        fresh = fresh_archive()
        with tempfile.TemporaryDirectory(prefix="fleet-", ignore_cleanup_errors=True) as folder:
            try:
                _run_training(Path(folder), fresh, stop)
                archive = publish_archive(fresh, java, jars)
            finally:
                fresh.unlink(missing_ok=True)
    except (FleetError, OSError) as error:
        return f"Spark's class archive is not created ({error}); {_ABSENT}"
    return f"Spark's class archive is ready: {archive.stat().st_size / 1e6:.0f} MB"


def _run_training(folder: Path, fresh: Path, stop: StopSignal | None) -> None:
    log = folder / "log"
    command = [sys.executable, "-P", "-m", "batch.cds_training", str(folder), str(fresh)]
    with log.open("wb") as output:
        running = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True)
    limit = time.monotonic() + _TRAINING_TIMEOUT_S
    try:
        while running.poll() is None and time.monotonic() < limit:
            if stop is not None and stop.is_set():
                break
            time.sleep(0.1)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)  # with its JVM and Python workers
            running.wait()
    if running.returncode != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        why = lines[-1][:200] if lines else "no output"
        raise FleetError("the training run was killed" if running.returncode < 0 else why, code="class-archive-failed")
