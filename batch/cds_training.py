"""Training run for the JVM's class data sharing (CDS) archive.

It does a small sample of the Spark work: the job judges a message, a snapshot is taken, and the
state is rescaled. A separate process runs this: `python -m batch.cds_training FOLDER ARCHIVE`. The
JVM writes the loaded classes to the archive when it ends.
"""

import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from batch.common.progress import silent
from batch.state import snapshot
from batch.state.generation import await_termination
from batch.state.operations import StateOperation, rescale
from fleetpulse.core.messages.decode import decode
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Origin, Row, hash64
from fleetpulse.core.tables import MESSAGES
from fleetpulse.io.home.home import KEY_GROUPS, Home
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.spark.cds_archive import create_options
from fleetpulse.io.spark.session import JAVA_OPTIONS_KEY, SparkResources, settings, spark_session
from fleetpulse.io.system.process import StopSignal
from fleetpulse.io.tables import tables

_WRITTEN_S: Final = 240.0  # timeout of writing the archive, which takes a few seconds on an idle machine
_AT_MS: Final = 1_700_000_000_000


def train(folder: Path, archive: Path) -> None:
    """Run the sample; the JVM writes the archive of loaded classes when it ends.

    Args:
        folder: empty folder for temporary files.
        archive: file of the archive.
    """
    home, local = Home(folder / "home"), folder / "spark"
    home.prepare(Deployment(1_000))
    tables.create(home, MESSAGES)
    tables.append(home, MESSAGES, _messages(), "rehearsal", 1)
    quick = "-XX:TieredStopAtLevel=1"  # code of the second compiler would be discarded with the process
    extra = {JAVA_OPTIONS_KEY: f"{settings(local, SparkResources())[JAVA_OPTIONS_KEY]} {quick} {create_options(archive)}"}
    spark = spark_session("fleetpulse-rehearsal", local_dir=local, extra=extra)
    await_termination(start(spark, home, None))
    snapshot.take(spark, home, None, silent)
    with home.state_held("fleet fetch"):
        rescale(StateOperation(spark, home, silent), KEY_GROUPS + 1)
    gateway: Any = spark.sparkContext._gateway  # noqa: SLF001 - pyspark has no public access to the JVM process
    spark.stop()
    gateway.proc.stdin.close()  # ends the JVM
    if ended := gateway.proc.wait(_WRITTEN_S):
        raise SystemExit(f"Java ended with exit code {ended}; the archive is incomplete; try again")


def _messages() -> pa.Table:
    row = decode("fleet/site/device/error", b'{"code": "E1"}', _AT_MS, Origin.MQTT)
    assert isinstance(row, Row), "an error message needs a code only"
    arrival = {"device_hash": hash64(row.device_id), "origin": "replay", "bridge": "rehearsal", "segment": 1}
    return tables.to_table(MESSAGES, [{**asdict(row), **arrival}])


def _end_with(parent: int) -> None:
    """End this process and the JVM as soon as the parent process has ended.

    Otherwise the JVM would continue, and write the archive.
    """
    parent_ended = StopSignal(parent)
    while not parent_ended.wait(1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    train(Path(sys.argv[1]), Path(sys.argv[2]))
