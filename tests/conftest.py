"""What holds for tests of all layers."""

import os
import sys
from pathlib import Path

_main = sys.modules["__main__"]
if not hasattr(_main, "__file__"):  # a worker of xdist: pyspark takes a main module without a file for a doctest's, and exits
    _main.__file__ = str(Path(__file__))

# JVMs of tests live for a minute or two: what their second compiler makes is done when they end, and takes half of their time.
# Spark's launcher reads this, here and in every process that a test starts.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")
