"""Spark session of a batch job, with a temporary folder that is removed with it."""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

from pyspark.sql import SparkSession

from fleetpulse.core.errors import FleetError
from fleetpulse.io.checkpoints.checkpoint import relocate_each
from fleetpulse.io.home.home import Home
from fleetpulse.io.spark.session import SparkResources, spark_session
from fleetpulse.io.system.locks import lock_holder, named_lock

_PREFIX = "batch-"
_LOCK = "lock"


@contextmanager
def batch_session(home: Home, size: SparkResources) -> Iterator[SparkSession]:
    """Provide a Spark session beside that of the lifecycle job.

    Leftovers of killed sessions are removed.

    Args:
        home: home in whose folder the session writes temporary files.
        size: memory and cores of the session.
    """
    with session_folder(home.path / "spark") as own, _session(own, home.logs / "batch.log", size) as session:
        yield session


def try_session(place: Path, size: SparkResources) -> None:
    """Start and stop a Spark session, to run the checks of its start.

    Args:
        place: empty folder for its temporary files; on a cluster, below a home.
        size: memory and cores of the session.

    Raises:
        FleetError: see `fleetpulse.io.spark.session.spark_session`.
    """
    with _session(place, place / "session.log", size):
        pass


@contextmanager
def _session(place: Path, log: Path, size: SparkResources) -> Iterator[SparkSession]:
    with _output_to(log):
        session = spark_session("fleetpulse-batch", local_dir=place, size=size)
    try:
        yield session
    finally:
        session.stop()


@contextmanager
def session_folder(place: Path) -> Iterator[Path]:
    """Provide a locked temporary folder; remove folders whose locks are not held."""
    place.mkdir(parents=True, exist_ok=True)
    with ExitStack() as cleanup:
        with (place / "batch.lock").open("a") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)  # a folder that is created and not locked yet must not be removed as a leftover
            for left in place.glob(f"{_PREFIX}*"):
                if lock_holder(left / _LOCK) is None:
                    shutil.rmtree(left, ignore_errors=True)
            own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            cleanup.callback(shutil.rmtree, own, ignore_errors=True)
            cleanup.enter_context(named_lock(own / _LOCK, "a session", partial(FleetError, code="session-in-use")))
        yield own


@contextmanager
def plainly_named(home: Home) -> Iterator[Home]:
    """Provide a home under a path that is equal to its URL.

    Spark's state readers would look for ``a%20b`` if the path were ``a b``; such a home is reached
    by a symbolic link.
    """
    real = str(home.path.resolve())
    if quote(real) == real:
        yield home
        return
    with tempfile.TemporaryDirectory(prefix="fleet-") as place:
        link = Path(place) / "home"
        link.symlink_to(real)
        try:
            yield Home(link)
        except FleetError as error:
            error.args = (str(error).replace(str(link), str(home.path)),)
            raise
        finally:
            relocate_each(home.lifecycle)


def cause_of(error: Exception) -> str:
    """Return the most specific message of a Spark error.

    This is the message of a FleetError, or else of the last cause.
    """
    lines = [line.strip(": ") for line in str(error).splitlines() if not line.startswith("An error occurred while calling")]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    specific = [line for line in causes if "FleetError" in line] or causes[-1:] or lines[:1] or ["no message"]
    return specific[0].rpartition("FleetError: ")[2][:400]


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Redirect standard output and error of processes started meanwhile to a log file.

    The JVM and its workers keep the log as output; the command gets its own output back.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    saved = os.dup(1), os.dup(2)
    with log.open("ab") as file:
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            yield
        finally:
            for number, own in enumerate(saved, 1):
                os.dup2(own, number)
                os.close(own)
