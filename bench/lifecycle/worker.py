"""Process of a contender on Spark, with one session for all rounds.

Rule 1: a micro-batch is one version of the input; a run that was divided otherwise is an error.
Rule 2: a contender with a number of cores in its name may use only so many cores, the JVM's own
threads included. Only Linux can enforce it.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.lifecycle.batch_parts import parts_of, stages_since
from bench.lifecycle.contenders import ON_SPARK, split_name, start
from bench.lifecycle.generate import Fleet, Input
from bench.lifecycle.serving import serve
from bench.peers.scala_jar import compiled
from fleetpulse.io.spark.jars import own_jars
from fleetpulse.io.spark.session import SparkResources, spark_session

MEMORY: Final = "4g"  # JVM heap of every contender
_REPORTS: Final = "1000"  # number of progress reports kept, more than the micro-batches of a run


def runner(name: str, local_dir: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Start the session; return the function that runs a request.

    A request has the fields of the input, and ``place``, the folder of the run.
    """
    extra = {
        "spark.driver.extraClassPath": os.pathsep.join(map(str, [*own_jars(), compiled()])),
        "spark.sql.streaming.numRecentProgressUpdates": _REPORTS,
    }
    contender_name, cores = split_name(name)
    size = SparkResources(memory=MEMORY)
    if cores is not None:
        if hasattr(os, "sched_setaffinity"):  # Linux; children inherit it
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
        size = SparkResources(cores, MEMORY)
    spark = spark_session(f"bench-{name}", local_dir=local_dir, size=size, extra=extra)
    contender, next_stage = ON_SPARK[contender_name], 0

    def run(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal next_stage
        source = Input(Fleet(**request["fleet"]), Path(request["path"]), tuple(request["counts"]), request["newest_ms"])
        query = start(contender, spark, source, Path(request["place"]))
        try:
            query.processAllAvailable()
            batches = [batch for batch in query.recentProgress if batch["numInputRows"]]
        finally:
            query.stop()
        if len(batches) != len(source.counts):
            raise RuntimeError(f"one batch per version expected; got {len(batches)} over {len(source.counts)} versions")
        answer = {"batch_ms": [batch["durationMs"]["triggerExecution"] for batch in batches]}
        if cores is None:
            return answer
        stages, next_stage = stages_since(spark, next_stage)
        return {**answer, "parts": [asdict(parts) for parts in parts_of(batches, stages)]}

    return run


if __name__ == "__main__":
    serve(runner(sys.argv[1], Path(sys.argv[2])))
