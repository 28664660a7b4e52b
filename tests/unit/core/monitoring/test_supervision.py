"""Supervision of the lifecycle job: a job is started only if it is dead and should run."""

import json
import time
from dataclasses import replace

import pytest

from cli.supervisor.airflow_env import USERS, airflow_home, environment, passwords
from cli.supervisor.processes import Job, Run
from cli.supervisor.sidecars import AirflowSidecar, airflow_port
from fleetpulse.core.monitoring.supervision import (
    FIRST_WAIT_MS,
    LONGEST_CHANGE_MS,
    LONGEST_WAIT_MS,
    REMEMBERED_MS,
    SOUND,
    Decision,
    JobState,
    Observation,
    decide,
)
from fleetpulse.io.home.desired_state import RUNNING, STOPPED, get_desired, set_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.ingest.segments import SegmentRow, rows_table, write_segment
from fleetpulse.io.system.process import NOT_RESTARTED, read_status, write_status
from fleetpulse.paths import ROOT
from fleetpulse.reports.operations.supervisor import check_job
from tests.support.homes.homes import commit_batch
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
NOW_MS = 1_800_000_000_000
MINUTE_MS = 60_000
WELL = Observation(True, "nobody yet", True, "running", 300, "", 4_000, 0, (), (), NOW_MS, 10 * MINUTE_MS)  # fmt: skip
BY_A_RUN = replace(WELL, wanted=False, by="airflow fleet_migrate manual", wanted_ago_ms=LONGEST_CHANGE_MS)
DEAD = replace(WELL, state="given up", given_up="it ended by itself (exit -9)")


@pytest.mark.parametrize(
    ("observation", "state", "reason"),
    [
        (WELL, JobState.RUNNING, "4s behind"),
        (replace(WELL, behind_ms=None), JobState.RUNNING, "it runs"),
        (replace(WELL, wanted=False, by="airflow"), JobState.STOPPED, "airflow"),
        (replace(DEAD, wanted=False, by="airflow"), JobState.STOPPED, "airflow"),
        (BY_A_RUN, JobState.STOPPED, "set by airflow fleet_migrate manual"),
        (
            replace(BY_A_RUN, wanted_ago_ms=LONGEST_CHANGE_MS + 1),
            JobState.LEFT,
            "airflow fleet_migrate manual stopped it 12h ago",
        ),
        (replace(BY_A_RUN, wanted_ago_ms=LONGEST_CHANGE_MS + 1), JobState.LEFT, "./fleet stream start"),
        (replace(BY_A_RUN, wanted_ago_ms=9 * LONGEST_CHANGE_MS, by="ann"), JobState.STOPPED, "set by ann"),
        (replace(BY_A_RUN, wanted_ago_ms=9 * LONGEST_CHANGE_MS, wanted=True), JobState.RUNNING, "behind"),
        (replace(WELL, has_run=False), JobState.DOWN, "./fleet up"),
        (replace(WELL, state="starting", status_age_ms=MINUTE_MS), JobState.STARTING, "starting"),
        (replace(WELL, state="", status_age_ms=0), JobState.STARTING, "no status yet"),
        (replace(WELL, state="starting", status_age_ms=6 * MINUTE_MS), JobState.STALE, "no status for 6m"),
        (replace(WELL, state="", starting_ms=10 * MINUTE_MS), JobState.STARTING, "no status yet"),
        (replace(WELL, state="waiting for a verb", starting_ms=11 * MINUTE_MS), JobState.STALE, "starting for 11m: waiting"),
        (replace(WELL, status_age_ms=6 * MINUTE_MS), JobState.STALE, "no status for 6m"),
        (replace(WELL, behind_ms=3_600_000, still_ms=MINUTE_MS), JobState.RUNNING, "1h behind"),  # it is catching up
        (replace(WELL, behind_ms=3_600_000, still_ms=11 * MINUTE_MS), JobState.STALE, "judged nothing for 11m"),
        (replace(WELL, behind_ms=0, unheard_ms=10 * MINUTE_MS), JobState.RUNNING, "0s behind"),
        (
            replace(WELL, behind_ms=0, unheard_ms=360 * MINUTE_MS),
            JobState.STALE,
            "nothing has been received for 6h, not even a bridge",
        ),
        (replace(WELL, wanted=False, unheard_ms=360 * MINUTE_MS), JobState.STOPPED, "desired state is stopped"),
        (replace(WELL, critical=("memory is critical",)), JobState.CRITICAL, "memory"),
    ],
)
def test_the_job_state_follows_from_the_desired_state_and_the_observation(
    observation: Observation, state: JobState, reason: str
) -> None:
    decision = decide(observation)
    assert (decision.state, decision.start) == (state, False)
    assert reason in decision.why


def test_the_runbook_names_each_job_state_that_fails_its_dag() -> None:
    text = (ROOT / "dags" / "fleet_supervise.py").read_text()
    red = text[text.index("**If it is red**") : text.index("**How to undo it**")]
    assert {one for one in JobState if f"*{one.value}*" in red} == set(JobState) - SOUND


def test_each_failed_start_doubles_the_next_wait_until_it_is_forgotten() -> None:
    assert decide(DEAD) == Decision(JobState.STARTED, "it was dead: it ended by itself (exit -9)", start=True)
    for count in range(1, 10):
        wait_ms = min(FIRST_WAIT_MS * 2 ** (count - 1), LONGEST_WAIT_MS)
        early, due = (
            decide(replace(DEAD, starts_ms=tuple([NOW_MS - past_ms] * count))).state for past_ms in (wait_ms - 1, wait_ms)
        )
        assert (early, due) == (JobState.BACKING_OFF, JobState.STARTED)
    assert decide(replace(DEAD, starts_ms=(NOW_MS - REMEMBERED_MS,) * 9)).start


def test_a_dead_job_is_started_once_unless_its_desired_state_is_stopped(home: Home) -> None:
    now_ms = int(time.time() * 1000)
    with home.locked("fleet up"):
        write_status(home.run("lifecycle"), {"state": NOT_RESTARTED, "why": "exit -9", "at_ms": now_ms})
        set_desired(home, STOPPED, "a migration")
        assert check_job(home, "me", MINUTE_MS).state == "stopped"
        set_desired(home, RUNNING, "a migration")
        write_status(home.run("lifecycle"), {"state": NOT_RESTARTED, "why": "exit -9", "at_ms": get_desired(home).at_ms + 1})
        check = check_job(home, "me", MINUTE_MS)
        assert (check.state, check.sound, check.starts) == ("started", True, 1)
        assert (get_desired(home).state, get_desired(home).by) == (RUNNING, "me")
    assert check_job(home, "me", MINUTE_MS).state == "down"


def test_a_job_that_an_airflow_run_left_stopped_is_not_sound(home: Home) -> None:
    desired = set_desired(home, STOPPED, "airflow fleet_migrate manual")
    assert desired is not None
    late, early = (check_job(home, "me", MINUTE_MS, desired.at_ms + LONGEST_CHANGE_MS + more_ms) for more_ms in (1, 0))
    assert (late.state, late.sound, early.state, early.sound) == ("left stopped", False, "stopped", True)
    assert (get_desired(home).state, get_desired(home).by) == (STOPPED, "airflow fleet_migrate manual"), (
        "the state is reported and not changed"
    )


def test_a_job_that_is_always_starting_becomes_stale(home: Home) -> None:
    started_ms = int(time.time() * 1000)

    def state_after(minutes: int, state: str = "starting") -> str:
        write_status(home.run("lifecycle"), {"state": state})
        return check_job(home, "me", 2 * MINUTE_MS, started_ms + minutes * MINUTE_MS).state

    with home.locked("fleet up"):
        assert [state_after(minutes) for minutes in range(4)] == ["starting", "starting", "starting", "stale"]
        assert state_after(1, "running") == "running"
        assert state_after(4) == "starting", "it was running in between"


def _received(home: Home, at_ms: int, recording: str | None = None, number: int = 1) -> None:
    """Write a segment of one tick, as a bridge does that listens, or one that plays a recording."""
    row = SegmentRow(at_ms, "fleet/_/b/tick", b"{}", "bridge" if recording is None else "recording", recording)
    write_segment(home.segments, number, rows_table([row]), bridge="bridge-1", last_canary_ms=at_ms)


def test_a_job_that_judged_all_rows_is_stale_when_no_bridge_writes(home: Home) -> None:
    now_ms = int(time.time() * 1000)
    commit_batch(home.checkpoint, 1, now_ms)
    with home.locked("fleet up"):
        write_status(home.run("lifecycle"), {"state": "running"})
        _received(home, now_ms)
        early, late = (check_job(home, "me", MINUTE_MS, now_ms + ago_ms) for ago_ms in (MINUTE_MS, 2 * MINUTE_MS))
        assert (early.state, early.behind_ms, early.unheard_ms) == ("running", 0, MINUTE_MS)
        assert (late.state, late.sound) == ("stale", False)
        assert late.why.startswith("nothing has been received for 2m")
        _received(home, now_ms, "r", 2)
        played = check_job(home, "me", MINUTE_MS, now_ms + 2 * MINUTE_MS)
    assert (played.state, played.unheard_ms) == ("running", None), "a recording has a time of its own"


def dead_job(home: Home, *, supervised: bool) -> Job:
    """Return a job that has ended by itself, before the next check of its process."""
    job = Job(home, "lifecycle", ["--no-such-option"])
    job.supervised = supervised
    job.start()
    assert job._process is not None
    job._process.wait(60)
    return job


def test_a_supervised_job_that_dies_too_often_waits_for_a_new_desired_state(home: Home) -> None:
    job = dead_job(home, supervised=True)
    job.watch()
    status = read_status(home.run("lifecycle"))
    assert status["state"] == NOT_RESTARTED and "exit 2" in status["why"]
    dead_pid = job.pid
    job.apply_desired_state(runs=True, desired_at_ms=int(status["at_ms"]))
    job.watch()
    assert job.pid == dead_pid
    job.apply_desired_state(runs=True, desired_at_ms=int(status["at_ms"]) + 1)
    assert job.pid != dead_pid
    job.stop()


def test_an_unsupervised_job_that_dies_too_often_ends_the_run(home: Home) -> None:
    job = dead_job(home, supervised=False)
    with refused("job-ended"):
        job.watch()


def test_a_dead_job_ends_the_run_when_its_supervision_ends(home: Home) -> None:
    job = dead_job(home, supervised=True)
    job.watch()
    job.supervised = False
    with refused("job-ended"):
        job.watch()


def test_airflow_supervises_from_its_first_run_until_it_is_not_restarted(home: Home) -> None:
    sidecar = AirflowSidecar(Run(home), 0)
    supervises: list[bool] = []
    for state in (None, "installing", "starting", "running", "preparing", NOT_RESTARTED, "installing"):
        if state:
            write_status(home.run("airflow"), {"state": state})
        supervises.append(sidecar.supervises())
    assert supervises == [False, False, False, True, True, False, False]


def test_airflow_listens_on_loopback_and_keeps_its_secrets_in_private_files(home: Home) -> None:
    created, fresh = passwords(home)
    assert fresh and set(created) == set(USERS) and len(set(created.values())) == len(USERS)
    assert passwords(home) == (created, False)
    settings = environment(home, 8080)
    assert environment(home, 8080) == settings
    assert settings["AIRFLOW__API__HOST"] == "127.0.0.1"
    assert settings["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"].startswith("http://127.0.0.1:8080/")
    files = [path for path in airflow_home(home).iterdir() if path.is_file()]
    assert {path.name for path in files} == {"passwords.json", "fernet.secret", "session.secret", "jwt.secret"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert json.loads((airflow_home(home) / "passwords.json").read_text()) == created


def test_an_airflow_port_in_use_is_refused() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with refused("port-in-use"):
            airflow_port(taken.getsockname()[1])
    assert airflow_port(0) > 0
