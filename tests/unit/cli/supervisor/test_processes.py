"""The processes of a run, and a disk that is full."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cli.commands.run.job import _Log
from cli.common.output import cell
from cli.supervisor import processes
from cli.supervisor.processes import Job, last_error_line
from fleetpulse.io.home.home import Home
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


class Ended:
    """A process that died."""

    pid = 2**22 + 1  # no process has it
    returncode = 1

    def poll(self) -> int:
        return 1

    def wait(self) -> int:
        return 1


class Usage(NamedTuple):
    free: int


def job(tmp_path: Path, restarts: int, monkeypatch: pytest.MonkeyPatch, free: int) -> tuple[Job, list[int]]:
    made = Job(Home(tmp_path), "landing", restarts=restarts)
    process: Any = Ended()
    made._process = process
    started: list[int] = []
    monkeypatch.setattr(made, "start", lambda: started.append(1))
    monkeypatch.setattr(processes.shutil, "disk_usage", lambda path: Usage(free))
    return made, started


def test_what_a_dead_job_left_is_killed_once_and_its_number_then_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died, _ = job(tmp_path, 1, monkeypatch, free=1_000)
    killed: list[int] = []
    monkeypatch.setattr(processes.os, "killpg", lambda group, _: killed.append(group))
    for _ in range(5):  # the disk stays full for long
        died.watch()
    died.stop()
    assert killed == [Ended.pid]


def test_a_job_that_died_is_started_again_so_many_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died, started = job(tmp_path, 2, monkeypatch, free=10**9)
    died.watch()
    died.watch()
    with refused("job-ended"):
        died.watch()
    assert len(started) == 2


def test_a_full_disk_is_waited_out_and_costs_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died, started = job(tmp_path, 1, monkeypatch, free=1_000)
    for _ in range(10):
        died.watch()
    assert not started
    monkeypatch.setattr(processes.shutil, "disk_usage", lambda path: Usage(10**9))
    died.watch()
    assert len(started) == 1


def test_where_nothing_is_started_again_a_full_disk_is_the_reason_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died, _ = job(tmp_path, 0, monkeypatch, free=1_000)
    with refused("job-ended"):
        died.watch()


def test_a_line_that_cannot_be_written_is_no_end_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        log = _Log()
        log.write("a line\n")
        log.flush()
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()


def test_a_sentence_of_ours_is_not_cut_off_before_what_to_do(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("noise\nfleet: it failed " + "x" * 400 + "; do this\nmore noise\n")
    assert last_error_line(log).endswith("do this")


def test_what_died_long_ago_counts_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died, started = job(tmp_path, 1, monkeypatch, free=10**9)
    at_s = 1_000.0
    monkeypatch.setattr(processes.time, "monotonic", lambda: at_s)
    died.watch()
    with refused("job-ended"):
        died.watch()
    at_s += 601
    died.watch()
    assert (len(started), died.died) == (2, 2)


def test_nothing_that_a_terminal_obeys_is_shown() -> None:
    assert cell("payload", "a\x1b[31mb\n[c]é") == "a\\x1b\\[31mb\\n\\[c]é"
