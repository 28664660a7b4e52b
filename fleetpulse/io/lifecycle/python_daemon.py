"""Spark's daemon of Python workers (``spark.python.daemon.module``): it imports what a task needs, then forks the workers.

A worker that imports NumPy, Arrow and numba and loads the kernels by itself spends one to two CPU seconds, and a batch has five
of them or more. Forked from here they share all of it, also in memory.

Rule: whatever is imported here must leave the process with one thread: only that one goes on in a forked worker.
"""

import gc
import os
import sys
from contextlib import redirect_stdout

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads would start with its import
os.environ.setdefault("VECLIB_MAXIMUM_THREADS", "1")  # likewise on macOS
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")  # likewise Arrow's, of an allocator that is not used


def preload() -> None:
    """Import what the tasks of the lifecycle job use, load the kernels, and spare workers the collection of it."""
    import pyspark.worker  # noqa: F401 - the module that a worker runs

    import fleetpulse.io.lifecycle.group_task
    import fleetpulse.io.tables.bronze  # noqa: F401 - likewise
    from fleetpulse.columnar.warmup import warm
    from fleetpulse.io.system.kernel_cache import keep_kernels

    keep_kernels()
    warm()  # it loads them, where they were kept
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    from pyspark.daemon import manager

    if sys.argv[1:] == ["pyspark.worker"]:
        with redirect_stdout(sys.stderr):  # Spark reads the daemon's port from standard output
            preload()
    manager()
