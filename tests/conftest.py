"""What holds for tests of all layers."""

import sys
from pathlib import Path

_main = sys.modules["__main__"]
if not hasattr(_main, "__file__"):  # a worker of xdist: pyspark takes a main module without a file for a doctest's, and exits
    _main.__file__ = str(Path(__file__))
