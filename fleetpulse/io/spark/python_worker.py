"""Garbage collection in Spark's Python workers."""

import gc
from functools import cache


@cache
def freeze_gc() -> None:
    """Exempt loaded objects of a worker from garbage collection; call after a task.

    PySpark collects all generations after each task of a reused worker. The loaded modules (numba,
    NumPy, Arrow) stay in memory; traversing them costs more than a task with a small block.
    """
    gc.collect()
    gc.freeze()
