"""Process of a contender on Spark, with one session for all rounds.

Rule: a micro-batch is one version of the input; a run that was divided otherwise is an error.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.lifecycle.contenders import ON_SPARK, start
from bench.lifecycle.generate import Fleet, Input
from bench.lifecycle.serving import serve
from bench.peers.scala_jar import compiled
from fleetpulse.io.spark.jars import resolve_jars
from fleetpulse.io.spark.session import SparkResources, spark_session

MEMORY: Final = "4g"  # JVM heap of every contender
_REPORTS: Final = "1000"  # number of progress reports kept, more than the micro-batches of a run


def runner(name: str, local_dir: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Start the session; return the function that runs a request.

    A request has the fields of the input, and ``place``, the folder of the run.
    """
    extra = {
        "spark.driver.extraClassPath": os.pathsep.join(map(str, [*resolve_jars(), compiled()])),
        "spark.sql.streaming.numRecentProgressUpdates": _REPORTS,
    }
    spark = spark_session(f"bench-{name}", local_dir=local_dir, size=SparkResources(memory=MEMORY), extra=extra)
    contender = ON_SPARK[name]

    def run(request: dict[str, Any]) -> dict[str, Any]:
        source = Input(Fleet(**request["fleet"]), Path(request["path"]), tuple(request["counts"]), request["newest_ms"])
        query = start(contender, spark, source, Path(request["place"]))
        try:
            query.processAllAvailable()
            batches = [batch for batch in query.recentProgress if batch["numInputRows"]]
        finally:
            query.stop()
        if len(batches) != len(source.counts):
            raise RuntimeError(f"one batch per version expected; got {len(batches)} over {len(source.counts)} versions")
        return {"batch_ms": [batch["durationMs"]["triggerExecution"] for batch in batches]}

    return run


if __name__ == "__main__":
    serve(runner(sys.argv[1], Path(sys.argv[2])))
