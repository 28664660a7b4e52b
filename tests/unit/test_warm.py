"""What is compiled is compiled before the first batch."""

import os
import subprocess
import sys
from pathlib import Path

_FOLD = """
from fleetpulse.columnar.warm import warm
from pathlib import Path
import sys

warm()
known = set(Path(sys.argv[1]).rglob("*.nbc"))
from bench.fold import us_a_message

us_a_message(20, 6)
assert known, "nothing was kept"
assert set(Path(sys.argv[1]).rglob("*.nbc")) == known, "a fold compiles what was not warm"
"""


def test_a_fold_finds_everything_compiled(tmp_path: Path) -> None:
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _FOLD, str(tmp_path)], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
