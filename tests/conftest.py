"""Configuration of all test layers: options of the JVM, profiles of Hypothesis."""

import gc
import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

from tests.support.form import FORM, Form

_main = sys.modules["__main__"]
if not hasattr(_main, "__file__"):  # a worker of xdist: pyspark takes a main module without a file for a doctest, and exits
    _main.__file__ = str(Path(__file__))

# JVMs of tests live for a minute or two. The second JIT compiler would use half of that time, and
# finish when they end. Spark's launcher reads this variable in every process that a test starts.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")
# Tables of tests are small: delta-rs wakes each of its threads for a few kilobytes. One takes a sixth less CPU.
os.environ.setdefault("TOKIO_WORKER_THREADS", "1")

# The default suite and --all run the same examples each time. The long form runs more of them, and
# other ones each time.
_EXAMPLES = {Form.DEFAULT: 50, Form.ALL: 100, Form.LONG: 400}
settings.register_profile(
    "fleet",
    max_examples=_EXAMPLES[FORM],
    derandomize=FORM is not Form.LONG,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
# Mutation tests (tests/mutants) need no shrinking of examples.
settings.register_profile("mutants", settings.get_profile("fleet"), max_examples=250, phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("FLEET_PROFILE", "fleet"))


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of garbage collections, which become rare: they took a tenth of unit tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_unconfigure() -> None:
    """Let the interpreter free everything at its end."""
    gc.unfreeze()
