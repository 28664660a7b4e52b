"""Compiled kernels: warm-up compiles all of them, and again when a source has changed."""

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
assert known, "warm-up cached nothing"
assert set(Path(sys.argv[1]).rglob("*.nbc")) == known, "the fold compiled a kernel that warm-up did not"
"""
_ONE_KERNEL = """
import numpy
from fleetpulse.columnar.jit.take import partition_by_hash

partition_by_hash(numpy.array([1, 2]), 1)
"""
# Compare both implementations on a random history. Compiled kernels judge its devices without internal rows.
_BOTH = """
from fleetpulse.core.lifecycle import TRANSITIONS, Mode, Trigger
from tests.support.histories.dense import dense_history, difference

history, course = dense_history(4)
assert TRANSITIONS[Mode.ONLINE, Trigger.ERRORS] is Mode.FLAGGED, "the transition table is not the changed one"
assert (found := difference(history, course)) is None, found
"""


def _run(script: str, tree: Path, cache: Path) -> None:
    variables = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT)])}
    command = [sys.executable, "-P", "-c", script, str(cache)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
def test_warm_up_compiles_every_kernel_of_a_changed_transition_table_and_removes_the_earlier_ones(tmp_path: Path) -> None:
    tree, cache = tmp_path / "tree", tmp_path / "cache"
    shutil.copytree(_SOURCES, tree / "fleetpulse", ignore=shutil.ignore_patterns("__pycache__"))
    _run(_ONE_KERNEL, tree, cache)
    [earlier] = {path.name for path in cache.rglob("fold-*")}
    lifecycle = tree / "fleetpulse" / "core" / "lifecycle.py"
    text = lifecycle.read_text()
    assert "(_M.ONLINE, _T.ERRORS): _M.DEGRADED" in text
    lifecycle.write_text(text.replace("(_M.ONLINE, _T.ERRORS): _M.DEGRADED", "(_M.ONLINE, _T.ERRORS): _M.FLAGGED"))
    _run(_FOLD, tree, cache)  # first: the comparison compiles kernels, too
    _run(_BOTH, tree, cache)
    [present] = {path.name for path in cache.rglob("fold-*")}
    assert present != earlier, "kernels of the earlier transition table are still used"


def test_a_change_in_any_source_of_the_kernels_changes_the_digest(tmp_path: Path) -> None:
    folder = tmp_path / "columnar"
    (folder / "fold").mkdir(parents=True)
    digests = [digest_of([folder])]
    for name, text in (("one.py", ""), ("fold/one.py", ""), ("fold/one.py", "x = 1"), ("fold/two.py", "x = 1")):
        (folder / name).write_text(text)
        digests.append(digest_of([folder]))
    (folder / "fold" / "two.py").rename(folder / "two.py")
    digests.append(digest_of([folder]))
    assert len(set(digests)) == 6


def test_the_digest_of_compiled_kernels_covers_all_their_sources() -> None:
    assert digest_of([_SOURCES / "columnar", _SOURCES / "core"]) == SOURCES_DIGEST
    compiling = [path.name for path in (_SOURCES / "columnar").rglob("*.py") if "njit" in path.read_text()]
    assert compiling == ["cache.py"], "numba's own decorator caches by one source file only"
