"""Slow start of the Python source: after Spark's timeout of ten seconds, the query starts again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetpulse.paths import ROOT
from streaming.simulator.scenario import Scenario
from tests.support.histories.definition import defined_judgements, emitted_judgements
from tests.support.histories.histories import START
from tests.support.histories.recordings import record
from tests.support.wait import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1200)]
_SLOW_ONCE = """
import os, sys, time

if "pyspark.sql.streaming.python_streaming_source_runner" in sys.orig_argv:
    try:
        os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
        time.sleep(11)
    except FileExistsError:
        pass
"""


def test_a_replay_with_a_slow_source_restarts_its_query_and_keeps_its_verdicts(tmp_path: Path) -> None:
    home, marker, site = tmp_path / "home", tmp_path / "was-slow", tmp_path / "site"
    recording = record(tmp_path / "fleet.ndjson.gz", Scenario(5, 10, START, history_ms=90 * 60_000))
    policy = tmp_path / "policy.toml"
    policy.write_text('[rules]\ntimeout = "20m"\n')
    site.mkdir()
    (site / "sitecustomize.py").write_text(_SLOW_ONCE.format(marker=str(marker)))
    command = [sys.executable, "-P", "-m", "cli", "replay", str(recording), "--home", str(home)]
    done = subprocess.run(
        [*command, "--policy", str(policy), "--lateness", "1m"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])},
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert marker.exists(), "the first process of the source was slow"
    log = (home / "logs" / "lifecycle.log").read_text()
    assert log.count("did not connect within Spark's 10 s") >= 1, "on a busy machine the next process may be late, too"
    assert emitted_judgements(home) == defined_judgements(recording, {"rules": {"timeout": "20m"}}, 60_000)
