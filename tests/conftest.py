"""What holds for tests of all layers."""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

from tests.form import FORM, Form

_main = sys.modules["__main__"]
if not hasattr(_main, "__file__"):  # a worker of xdist: pyspark takes a main module without a file for a doctest's, and exits
    _main.__file__ = str(Path(__file__))

# JVMs of tests live for a minute or two: what their second compiler makes is done when they end, and takes half of their time.
# Spark's launcher reads this, here and in every process that a test starts.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1")

# The default suite and --all run the same examples every time; the long form runs more of them, and other ones each time.
_EXAMPLES = {Form.DEFAULT: 100, Form.ALL: 250, Form.LONG: 400}
settings.register_profile(
    "fleet",
    max_examples=_EXAMPLES[FORM],
    derandomize=FORM is not Form.LONG,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
# A planted fault needs no smaller example (tests/mutants).
settings.register_profile("mutants", settings.get_profile("fleet"), phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("FLEET_PROFILE", "fleet"))
