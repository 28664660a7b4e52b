"""Benchmark of RocksDB against the HDFS-backed state store on an aggregation.

``.venv/bin/python bench/state_store.py [--keys 300000] [--batches 12] [--json]`` prints the figures
of both providers, and their ratios. The query keeps a count and the greatest payload of each key.
transformWithState does not support the HDFS-backed provider, so this does not measure the lifecycle
job: it compares memory, checkpoint and recovery. Each provider runs in a separate process, and
recovers in a second one. Bytes do not depend on the machine. Times do: compare them only with each
other.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from fleetpulse.paths import ROOT

sys.path.insert(0, str(ROOT))
STATE = "org.apache.spark.sql.execution.streaming.state"
PROVIDERS = {"rocksdb": f"{STATE}.RocksDBStateStoreProvider", "hdfs": f"{STATE}.HDFSBackedStateStoreProvider"}
ROWS_A_BATCH = 100_000
MB = 1_000_000


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run(provider: str, folder: Path, keys: int, batches: int) -> dict[str, Any]:
    """Run batches of the query on a checkpoint, and return the figures."""
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    from fleetpulse.io.spark.session import SparkResources, spark_session

    extra = {
        "spark.sql.streaming.stateStore.providerClass": PROVIDERS[provider],
        "spark.sql.streaming.stateStore.encodingFormat": "unsaferow",
    }
    spark = spark_session("state-store", local_dir=folder / "spark", size=SparkResources(memory="2g"), extra=extra)
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", ROWS_A_BATCH).option("numPartitions", 2).load()
    keyed = rows.select(
        F.pmod(F.xxhash64("value"), F.lit(keys)).alias("key"), F.sha2(F.col("value").cast("string"), 256).alias("p")
    )
    counted = keyed.groupBy("key").agg(F.count("*").alias("n"), F.max("p").alias("newest"))
    checkpoint = folder / "checkpoint"
    query = counted.writeStream.format("noop").outputMode("update").option("checkpointLocation", str(checkpoint)).start()
    done: list[dict[str, Any]] = []
    sizes: list[int] = []
    while len(done) < batches:
        assert query.isActive, query.exception()
        done = [json.loads(one.json) for one in query.recentProgress]
        sizes.append(_size(checkpoint / "state"))
        time.sleep(0.2)
    query.stop()
    runtime: Any = spark._jvm.java.lang.Runtime.getRuntime()  # noqa: SLF001 - pyspark has no public access to the heap
    spark._jvm.System.gc()  # noqa: SLF001
    heap = runtime.totalMemory() - runtime.freeMemory()
    state = done[batches - 1]["stateOperators"][0]
    warm = done[batches // 2 : batches]
    spark.stop()
    return {
        "state_rows": state["numRowsTotal"],
        "batch_p50_ms": median(one["batchDuration"] for one in warm),
        "state_commit_p50_ms": median(one["stateOperators"][0]["commitTimeMs"] for one in warm),
        "first_batch_ms": done[0]["batchDuration"],
        "store_memory_mb": round(state["memoryUsedBytes"] / MB, 1),
        "heap_mb": round(heap / MB, 1),
        "checkpoint_mb": round(max(sizes) / MB, 1),
        "checkpoint_mb_a_batch": round(max(sizes) / MB / len(done), 2),
    }


def _measured(provider: str, folder: Path, keys: int, batches: int) -> dict[str, Any]:
    command = [
        sys.executable,
        __file__,
        "--one",
        provider,
        "--folder",
        str(folder),
        "--keys",
        str(keys),
        "--batches",
        str(batches),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise SystemExit(f"{provider} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure both providers, and print the figures."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--keys", type=int, default=300_000)
    options.add_argument("--batches", type=int, default=12)
    options.add_argument("--json", action="store_true")
    options.add_argument("--one", choices=PROVIDERS)
    options.add_argument("--folder", type=Path)
    arguments = options.parse_args()
    if arguments.one:
        print(json.dumps(run(arguments.one, arguments.folder, arguments.keys, arguments.batches)))
        return
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for provider in PROVIDERS:
            place = Path(folder) / provider
            place.mkdir()
            found[provider] = _measured(provider, place, arguments.keys, arguments.batches)
            found[provider]["first_batch_after_restart_ms"] = _measured(provider, place, arguments.keys, 1)["first_batch_ms"]
    if arguments.json:
        for provider, figures in found.items():
            print(json.dumps({"provider": provider, "keys": arguments.keys, **figures}))
        return
    print(f"{'':32}{'rocksdb':>12}{'hdfs':>12}{'hdfs/rocksdb':>14}")
    for name in found["rocksdb"]:
        rocksdb, hdfs = found["rocksdb"][name], found["hdfs"][name]
        print(f"{name:32}{rocksdb:>12}{hdfs:>12}{hdfs / rocksdb if rocksdb else 0:>14.2f}")


if __name__ == "__main__":
    main()
