"""What is compiled is compiled before the first batch, and anew when a source of it has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fleetpulse
from fleetpulse.columnar.jit.sources import SOURCES_DIGEST, digest_of
from fleetpulse.paths import ROOT

_SOURCES = Path(fleetpulse.__file__).parent
_FOLD = """
from fleetpulse.columnar.warmup import warm
from pathlib import Path
import sys

warm()
known = set(Path(sys.argv[1]).rglob("*.nbc"))
from bench.fold import cpu_us_per_message

cpu_us_per_message(20, 6)
assert known, "nothing was kept"
assert set(Path(sys.argv[1]).rglob("*.nbc")) == known, "a fold compiles what was not warm"
"""
# Both ways to judge, over a random history in which devices without a row of ours fail: those are judged by what is compiled.
_BOTH = """
from fleetpulse.core.lifecycle import TRANSITIONS, Mode, Trigger
from tests.support.histories.dense import dense_history, difference

history, course = dense_history(4)
assert TRANSITIONS[Mode.ONLINE, Trigger.ERRORS] is Mode.FLAGGED, "the table is not the changed one"
assert (said := difference(history, course)) is None, said
"""


def _run(script: str, tree: Path, cache: Path) -> None:
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)])}
    command = [sys.executable, "-P", "-c", script, str(cache)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
def test_a_fold_finds_everything_compiled_until_a_table_changes(tmp_path: Path) -> None:
    tree, cache = tmp_path / "tree", tmp_path / "cache"
    shutil.copytree(_SOURCES, tree / "fleetpulse", ignore=shutil.ignore_patterns("__pycache__"))
    _run(_FOLD, tree, cache)
    machine = tree / "fleetpulse" / "core" / "lifecycle.py"
    text = machine.read_text()
    assert "(_M.ONLINE, _T.ERRORS): _M.DEGRADED" in text
    machine.write_text(text.replace("(_M.ONLINE, _T.ERRORS): _M.DEGRADED", "(_M.ONLINE, _T.ERRORS): _M.FLAGGED"))
    _run(_BOTH, tree, cache)
    _run(_FOLD, tree, cache)
    assert len({place.name for place in cache.rglob("fold-*")}) == 1, "what was compiled of the table before is still there"


def test_a_change_in_any_source_of_the_kernels_changes_their_digest(tmp_path: Path) -> None:
    folder = tmp_path / "columnar"
    (folder / "fold").mkdir(parents=True)
    digests = [digest_of([folder])]
    for name, text in (("one.py", ""), ("fold/one.py", ""), ("fold/one.py", "x = 1"), ("fold/two.py", "x = 1")):
        (folder / name).write_text(text)
        digests.append(digest_of([folder]))
    (folder / "fold" / "two.py").rename(folder / "two.py")
    digests.append(digest_of([folder]))
    assert len(set(digests)) == 6


def test_what_is_compiled_is_known_by_all_sources_that_it_holds() -> None:
    assert digest_of([_SOURCES / "columnar", _SOURCES / "core"]) == SOURCES_DIGEST
    bare = [path.name for path in (_SOURCES / "columnar").rglob("*.py") if "njit" in path.read_text()]
    assert bare == ["cache.py"], "who compiles by numba's own decorator keeps it by one file alone"
