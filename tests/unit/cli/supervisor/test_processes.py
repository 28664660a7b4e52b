"""Processes of a run: limited restarts, and no restart while the disk is full."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cli.commands.run.job import _Log
from cli.common.output import cell
from cli.supervisor import processes
from cli.supervisor.processes import Job, Run, last_error_line, listener_tls
from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.embedded.broker import ListenerTls
from fleetpulse.io.mqtt.embedded.broker_log import BrokerLog
from fleetpulse.settings import Settings
from tests.support.refusals import refused

pytestmark = pytest.mark.unit


class DeadProcess:
    """A process that has ended with exit code 1."""

    pid = 2**22 + 1  # no process has this id
    returncode = 1

    def poll(self) -> int:
        return 1

    def wait(self) -> int:
        return 1


class Usage(NamedTuple):
    free: int


def dead_job(tmp_path: Path, restarts: int, monkeypatch: pytest.MonkeyPatch, free: int) -> tuple[Job, list[int]]:
    job = Job(Home(tmp_path), "landing", restarts=restarts)
    process: Any = DeadProcess()
    job._process = process
    started: list[int] = []
    monkeypatch.setattr(job, "start", lambda: started.append(1))
    monkeypatch.setattr(processes.shutil, "disk_usage", lambda path: Usage(free))
    return job, started


def test_the_process_group_of_a_dead_job_is_killed_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = dead_job(tmp_path, 1, monkeypatch, free=1_000)
    killed: list[int] = []
    monkeypatch.setattr(processes.os, "killpg", lambda group, _: killed.append(group))
    for _ in range(5):  # the disk stays full
        job.watch()
    job.stop()
    assert killed == [DeadProcess.pid]


def test_a_dead_job_is_restarted_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, started = dead_job(tmp_path, 2, monkeypatch, free=10**9)
    job.watch()
    job.watch()
    with refused("job-ended"):
        job.watch()
    assert len(started) == 2


def test_a_full_disk_delays_a_restart_and_does_not_count_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, started = dead_job(tmp_path, 1, monkeypatch, free=1_000)
    for _ in range(10):
        job.watch()
    assert not started
    monkeypatch.setattr(processes.shutil, "disk_usage", lambda path: Usage(10**9))
    job.watch()
    assert len(started) == 1


def test_a_job_without_restarts_ends_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = dead_job(tmp_path, 0, monkeypatch, free=1_000)
    with refused("job-ended"):
        job.watch()


def test_a_job_survives_a_log_line_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        log = _Log()
        log.write("a line\n")
        log.flush()
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.close()


def test_an_error_message_of_fleet_is_not_cut_off(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("noise\nfleet: it failed " + "x" * 400 + "; do this\nmore noise\n")
    assert last_error_line(log).endswith("do this")


def test_deaths_before_the_restart_window_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, started = dead_job(tmp_path, 1, monkeypatch, free=10**9)
    at_s = 1_000.0
    monkeypatch.setattr(processes.time, "monotonic", lambda: at_s)
    job.watch()
    with refused("job-ended"):
        job.watch()
    at_s += 601
    job.watch()
    assert (len(started), job.died) == (2, 2)


def test_a_service_reports_failed_logins_once_a_minute_and_omits_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, path = Home(tmp_path / "home"), tmp_path / "broker.log"
    home.prepare(None)
    run = Run(home, alone=False)
    run._log = BrokerLog(path, 0)
    at_s = 1_000.0
    monkeypatch.setattr(processes.time, "monotonic", lambda: at_s)
    reports: list[str] = []
    for logins in (1, 2, 0, 0):
        with path.open("a") as log:
            log.write('[1] 2026/11/27 07:37:23.1 [ERR] 10.0.0.7:1 - mid:2 - "b" - authentication error - User "ann"\n' * logins)
        run._read_broker_log()
        reports.append(capsys.readouterr().err)
        at_s += 31
    run._log.close()
    assert ["1 login (" in reports[0], reports[1], "3 logins" in reports[2], reports[3]] == [True, "", True, ""]


def test_control_characters_are_escaped_in_the_terminal() -> None:
    assert cell("payload", "a\x1b[31mb\n[c]é") == "a\\x1b\\[31mb\\n\\[c]é"


def test_tls_settings_of_the_broker_are_complete_names_of_files(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert listener_tls(home, Settings()) is None
    found = listener_tls(home, Settings(broker_certificate="tls/cert.pem", broker_key="/etc/key.pem"))
    assert found == ListenerTls(str(tmp_path / "home" / "tls" / "cert.pem"), "/etc/key.pem")
    assert listener_tls(home, Settings(broker_client_authority="ca.pem")) is not None, "reported as incomplete"
