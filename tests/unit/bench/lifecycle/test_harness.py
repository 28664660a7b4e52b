"""Warm process of a contender: its time limit, and the error after the process has ended."""

import sys
from pathlib import Path

import pytest

from bench.lifecycle.generate import Fleet, Input
from bench.lifecycle.harness import Crashed, DidNotFinish, WarmProcess
from bench.peers import flink
from tests.support.refusals import refused

ANSWERS_AFTER_300_MS = """
import sys, time
for _ in sys.stdin:
    time.sleep(0.3)
    print('{"batch_ms": []}', flush=True)
"""


@pytest.fixture
def source() -> Input:
    return Input(Fleet(100, 6, batches=2), Path(), (600, 600), 0)


def _flink(program: str, limit_s: float, work: Path, monkeypatch: pytest.MonkeyPatch) -> WarmProcess:
    """Return the contender PyFlink, with another program in place of its own command."""
    monkeypatch.setattr(flink, "command", lambda: ([sys.executable, "-c", program], {}))
    monkeypatch.setattr(flink, "request", lambda *_: {})
    return WarmProcess(flink.NAME, work / "flink", limit_s)


def test_the_run_over_the_first_version_counts_towards_the_limit_of_flink(
    source: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = _flink(ANSWERS_AFTER_300_MS, 60, tmp_path, monkeypatch)
    assert warm.run(source, "in-time").messages == 600
    with pytest.raises(DidNotFinish):
        warm.run(source, "each-in-time-and-not-both", 0.5)
    warm.end()


def test_an_ended_process_is_reported_without_waiting(source: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm = _flink("raise SystemExit('no memory')", 60, tmp_path, monkeypatch)
    warm._process.wait()
    with refused("contender-failed", Crashed):
        warm.run(source, "none")
    warm.end()
