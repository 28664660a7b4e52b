"""Harness side of the Flink peer: environment, JARs and input.

Rule 1: the environment has a separate lock file with hashes, and is installed into the project's
cache on first use.
Rule 2: if it cannot be installed, the benchmark reports the reason and continues.
Rule 3: the peer reads the heartbeats and errors of the table, in order, from one Parquet file:
Flink does not order rows between files. Writing that file is not measured.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pyspark

from bench.lifecycle.contenders import rules
from bench.lifecycle.generate import KINDS, Input
from bench.lifecycle.worker import MEMORY
from cli.common.bootstrap import EnvironmentFault, find_uv, gist
from fleetpulse.core.errors import FleetError
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.spark.jars import Jar, resolve_jars
from fleetpulse.io.spark.java import find_java
from fleetpulse.paths import ROOT, cache_dir

pc: Any = pyarrow.compute  # its functions are generated at run time, unknown to type checkers
NAME: Final = "pyflink-keyed-process"
LOCK: Final = Path(__file__).parent / "pyflink" / "requirements.txt"
PARQUET: Final = Jar(
    "org.apache.flink",
    "flink-sql-parquet",
    "2.3.0",
    "f30617f4a5a6d437750f155ff72178ab34439aec91df64d96621c260559ba5fd",
)
_LIMIT_S: Final = 900


def environment() -> Path:
    """Return the Python executable of PyFlink's environment; install it if needed.

    Raises:
        FleetError: the installation failed, with the installer's message.
    """
    venv = cache_dir() / "bench" / "pyflink"
    python, stamp = venv / "bin" / "python", venv / "fleet.txt"
    if not (stamp.exists() and stamp.read_bytes() == LOCK.read_bytes()):
        shutil.rmtree(venv, ignore_errors=True)
        try:
            uv = str(find_uv(ROOT, cache_dir()))
        except EnvironmentFault as fault:
            raise FleetError(str(fault), code="environment-failed") from None
        _call([uv, "venv", "--quiet", "--python", sys.executable, str(venv)])
        _call([uv, "pip", "sync", "--quiet", "--require-hashes", "--python", str(python), str(LOCK)])
        _call([str(python), "-c", "import pyflink.datastream"])
        shutil.copyfile(LOCK, stamp)
    return python


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise FleetError(f"{Path(command[0]).name} {command[1]} took longer than {_LIMIT_S} s", code="command-timeout") from None
    if done.returncode:
        raise FleetError(f"{Path(command[0]).name} {command[1]}: {gist(done.stderr or done.stdout)}", code="command-failed")


def command() -> tuple[list[str], dict[str, str]]:
    """Return the command line and environment variables of the peer's process.

    Raises:
        FleetError: the environment or the JARs cannot be installed.
    """
    resolve_jars(jars=[PARQUET])
    python = environment()
    hadoop = (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-*.jar")  # classes that Flink's Parquet format needs
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK_"))},
        "JAVA_HOME": str(find_java()),
        "JAVA_TOOL_OPTIONS": f"-Xmx{MEMORY} -Duser.timezone=UTC",
        "HADOOP_CLASSPATH": os.pathsep.join(map(str, hadoop)),
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")]),
        "TZ": "UTC",
    }
    return [str(python), "-P", "-m", "bench.peers.pyflink.job"], variables


def request(source: Input, place: Path, versions: int) -> dict[str, Any]:
    """Return the request to run over the first versions of an input."""
    return {
        "file": str(_rows(source, versions)),
        "place": str(place),
        "rules": list(rules(source)),
        "jars": [jar.as_uri() for jar in resolve_jars(jars=[PARQUET])],
        "mode": "thread",
    }


def _rows(source: Input, versions: int) -> Path:
    target = source.path.parent / f"rows-{versions}.parquet"
    if target.exists():
        return target
    fresh = target.with_name(f".{os.getpid()}-{target.name}")
    log = DeltaLog(source.path)
    files = [path for version in range(versions + 1) for path, _ in log.appended(version)]  # version 0 creates the table
    schema = pa.schema(
        [
            ("device_id", pa.string()),
            ("event_ms", pa.int64()),
            ("received_ms", pa.int64()),
            ("boot", pa.string()),
            ("seq", pa.int64()),
            ("code", pa.string()),
        ]
    )
    with pq.ParquetWriter(fresh, schema) as writer:
        for path in files:
            table = pq.ParquetFile(path).read(columns=["kind", "device_id", "event_time", "received_at", "boot", "seq", "code"])
            table = table.filter(pc.is_in(table["kind"], pa.array(KINDS)))
            columns = [table["device_id"], _ms(table["event_time"]), _ms(table["received_at"])]
            columns += [table["boot"], table["seq"], pc.fill_null(table["code"], "")]
            writer.write_table(pa.table(columns, schema=schema))
    fresh.replace(target)
    return target


def _ms(instants: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.divide(instants.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), 1000)
