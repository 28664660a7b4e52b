"""Daemon of Spark's Python workers: preload the imports of tasks, then fork.

The setting is ``spark.python.daemon.module``. A worker that imports NumPy, Arrow and numba itself
and loads the kernels spends one to two CPU seconds. A batch has five workers or more. Workers that
are forked from this daemon share the imports and their memory.

Source: docs/adr/0031-forking-python-daemon.md

Rule 1: imports of this module must not start threads, because only one thread survives a fork.
Rule 2: on a cluster, the daemon ends with an error if it does not find the mark of the session, see
`fleetpulse.io.spark.shared_mark`. Spark passes the error to the driver.
"""

import gc
import os
import sys
from contextlib import redirect_stdout

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # importing NumPy would start threads
os.environ.setdefault("VECLIB_MAXIMUM_THREADS", "1")  # the same on macOS
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # importing Arrow starts a jemalloc thread


def preload() -> None:
    """Import the modules of lifecycle tasks, load the kernels, and freeze all objects.

    Frozen objects are exempt from garbage collection in the workers.
    """
    import pyspark.worker  # noqa: F401 - the module that a worker runs

    import fleetpulse.io.lifecycle.group_task
    import fleetpulse.io.tables.bronze  # noqa: F401 - likewise
    from fleetpulse.columnar.warmup import warm
    from fleetpulse.io.system.kernel_cache import ensure_kernels_compiled

    ensure_kernels_compiled()
    warm()  # loads the cached kernels
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    from fleetpulse.io.spark.shared_mark import require_mark

    require_mark(os.environ)
    from pyspark.daemon import manager

    if sys.argv[1:] == ["pyspark.worker"]:
        with redirect_stdout(sys.stderr):  # Spark reads the daemon's port from standard output
            preload()
    manager()
