"""Spark's Python workers."""

import gc
from functools import cache


@cache
def freeze_gc() -> None:
    """Spare a worker's garbage collections what it has loaded; call it where a task's work ends.

    PySpark collects all generations after each task of a worker that it uses again. What is loaded by then (numba, NumPy,
    Arrow) stays for good, and to walk through it costs more than the task's own work on a small block.
    """
    gc.collect()
    gc.freeze()
