"""How long a contender may take for a run, and what becomes of one whose process has ended."""

import sys
from pathlib import Path

import pytest

from bench.lifecycle.generate import Fleet, Input
from bench.lifecycle.harness import Crashed, DidNotFinish, WarmProcess
from bench.peers import flink as flink_peer
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
    """Return PyFlink's contender, with another program in place of what its environment and its JARs would run."""
    monkeypatch.setattr(flink_peer, "command", lambda: ([sys.executable, "-c", program], {}))
    monkeypatch.setattr(flink_peer, "request", lambda *_: {})
    return WarmProcess(flink_peer.NAME, work / "flink", limit_s)


def test_what_the_first_version_alone_takes_is_part_of_flinks_limit(
    source: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = _flink(ANSWERS_AFTER_300_MS, 60, tmp_path, monkeypatch)
    assert warm.run(source, "in-time").messages == 600
    with pytest.raises(DidNotFinish):
        warm.run(source, "each-in-time-and-not-both", 0.5)
    warm.end()


def test_a_process_that_has_ended_is_said_and_not_waited_for(
    source: Input, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = _flink("raise SystemExit('no memory')", 60, tmp_path, monkeypatch)
    warm._process.wait()
    with refused("contender-failed", Crashed):
        warm.run(source, "none")
    warm.end()
