"""Who looks after the lifecycle job starts what is to run, and nothing else."""

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
from fleetpulse.reports.supervisor import check_job
from tests.support.homes.homes import commit_batch
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
NOW_MS = 1_800_000_000_000
MINUTE_MS = 60_000
WELL = Observation(True, "nobody yet", True, "running", 300, "", 4_000, 0, (), (), NOW_MS, 10 * MINUTE_MS)  # fmt: skip
BY_A_RUN = replace(WELL, wanted=False, by="airflow fleet_migrate manual", wanted_ago_ms=LONGEST_CHANGE_MS)
DEAD = replace(WELL, state="given up", given_up="it ended by itself (exit -9)")


@pytest.mark.parametrize(
    ("seen", "standing", "word"),
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
        (replace(WELL, state="starting", said_ago_ms=MINUTE_MS), JobState.STARTING, "starting"),
        (replace(WELL, state="", said_ago_ms=0), JobState.STARTING, "no status yet"),
        (replace(WELL, state="starting", said_ago_ms=6 * MINUTE_MS), JobState.STALE, "no status for 6m"),
        (replace(WELL, state="", starting_ms=10 * MINUTE_MS), JobState.STARTING, "no status yet"),
        (replace(WELL, state="waiting for a verb", starting_ms=11 * MINUTE_MS), JobState.STALE, "starting for 11m: waiting"),
        (replace(WELL, said_ago_ms=6 * MINUTE_MS), JobState.STALE, "no status for 6m"),
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
def test_a_job_is_judged_by_what_is_wanted_and_what_can_be_seen(seen: Observation, standing: JobState, word: str) -> None:
    found = decide(seen)
    assert (found.state, found.start) == (standing, False)
    assert word in found.why


def test_the_runbook_names_each_standing_for_which_its_dag_is_red() -> None:
    text = (ROOT / "dags" / "fleet_supervise.py").read_text()
    red = text[text.index("**If it is red**") : text.index("**How to undo it**")]
    assert {one for one in JobState if f"*{one.value}*" in red} == set(JobState) - SOUND


def test_each_start_in_vain_makes_the_next_wait_twice_as_long_and_is_forgotten_in_the_end() -> None:
    assert decide(DEAD) == Decision(JobState.STARTED, "it was dead: it ended by itself (exit -9)", start=True)
    for count in range(1, 10):
        wait_ms = min(FIRST_WAIT_MS * 2 ** (count - 1), LONGEST_WAIT_MS)
        early, due = (
            decide(replace(DEAD, starts_ms=tuple([NOW_MS - past_ms] * count))).state for past_ms in (wait_ms - 1, wait_ms)
        )
        assert (early, due) == (JobState.BACKING_OFF, JobState.STARTED)
    assert decide(replace(DEAD, starts_ms=(NOW_MS - REMEMBERED_MS,) * 9)).start


def test_a_job_that_was_given_up_is_started_once_and_one_that_is_to_be_stopped_is_not(home: Home) -> None:
    now_ms = int(time.time() * 1000)
    with home.locked("fleet up"):
        write_status(home.run("lifecycle"), {"state": NOT_RESTARTED, "why": "exit -9", "at_ms": now_ms})
        set_desired(home, STOPPED, "a migration")
        assert check_job(home, "me", MINUTE_MS).state == "stopped"
        set_desired(home, RUNNING, "a migration")
        write_status(home.run("lifecycle"), {"state": NOT_RESTARTED, "why": "exit -9", "at_ms": get_desired(home).at_ms + 1})
        look = check_job(home, "me", MINUTE_MS)
        assert (look.state, look.sound, look.starts) == ("started", True, 1)
        assert (get_desired(home).what, get_desired(home).by) == (RUNNING, "me")
    assert check_job(home, "me", MINUTE_MS).state == "down"


def test_a_stream_that_a_run_left_stopped_is_not_sound(home: Home) -> None:
    said = set_desired(home, STOPPED, "airflow fleet_migrate manual")
    assert said is not None
    late, early = (check_job(home, "me", MINUTE_MS, said.at_ms + LONGEST_CHANGE_MS + more_ms) for more_ms in (1, 0))
    assert (late.state, late.sound, early.state, early.sound) == ("left stopped", False, "stopped", True)
    assert (get_desired(home).what, get_desired(home).by) == (STOPPED, "airflow fleet_migrate manual"), (
        "it is told, and nothing is done"
    )


def test_a_job_whose_every_process_is_a_young_one_is_not_starting_for_ever(home: Home) -> None:
    begun_ms = int(time.time() * 1000)

    def look(minutes: int, state: str = "starting") -> str:
        write_status(home.run("lifecycle"), {"state": state})
        return check_job(home, "me", 2 * MINUTE_MS, begun_ms + minutes * MINUTE_MS).state

    with home.locked("fleet up"):
        assert [look(minutes) for minutes in range(4)] == ["starting", "starting", "starting", "stale"]
        assert look(1, "running") == "running"
        assert look(4) == "starting", "it ran in between"


def _received(home: Home, at_ms: int, recording: str | None = None, number: int = 1) -> None:
    """Write a segment of one tick, as a bridge that listens does, or as one that plays a recording."""
    row = SegmentRow(at_ms, "fleet/_/b/tick", b"{}", "bridge" if recording is None else "recording", recording)
    write_segment(home.segments, number, rows_table([row]), bridge="bridge-1", last_canary_ms=at_ms)


def test_a_job_that_has_judged_all_there_is_is_not_well_where_no_bridge_says_a_word(home: Home) -> None:
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


def died(home: Home, *, supervised: bool) -> Job:
    """Return a job that was started, and has ended by itself; nobody has looked since."""
    job = Job(home, "lifecycle", ["--no-such-option"])
    job.supervised = supervised
    job.start()
    assert job._process is not None
    job._process.wait(60)
    return job


def test_a_supervised_job_that_dies_too_often_is_left_until_somebody_says_anew_that_it_is_to_run(home: Home) -> None:
    job = died(home, supervised=True)
    job.watch()
    said = read_status(home.run("lifecycle"))
    assert said["state"] == NOT_RESTARTED and "exit 2" in said["why"]
    former = job.pid
    job.apply_desired_state(runs=True, said_ms=int(said["at_ms"]))
    job.watch()
    assert job.pid == former
    job.apply_desired_state(runs=True, said_ms=int(said["at_ms"]) + 1)
    assert job.pid != former
    job.stop()


def test_a_job_that_nobody_supervises_ends_the_run_where_it_dies_too_often(home: Home) -> None:
    job = died(home, supervised=False)
    with refused("job-ended"):
        job.watch()


def test_a_job_that_was_given_up_ends_the_run_when_nobody_supervises_it_any_more(home: Home) -> None:
    job = died(home, supervised=True)
    job.watch()
    job.supervised = False
    with refused("job-ended"):
        job.watch()


def test_airflow_supervises_from_when_it_runs_until_it_is_given_up(home: Home) -> None:
    beside = AirflowSidecar(Run(home), 0)
    found: list[bool] = []
    for state in (None, "installing", "starting", "running", "preparing", NOT_RESTARTED, "installing"):
        if state:
            write_status(home.run("airflow"), {"state": state})
        found.append(beside.supervises())
    assert found == [False, False, False, True, True, False, False]


def test_airflow_is_bound_to_the_loopback_and_its_secrets_lie_in_files_of_their_owner(home: Home) -> None:
    known, fresh = passwords(home)
    assert fresh and set(known) == set(USERS) and len(set(known.values())) == len(USERS)
    assert passwords(home) == (known, False)
    settings = environment(home, 8080)
    assert environment(home, 8080) == settings
    assert settings["AIRFLOW__API__HOST"] == "127.0.0.1"
    assert settings["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"].startswith("http://127.0.0.1:8080/")
    files = [path for path in airflow_home(home).iterdir() if path.is_file()]
    assert {path.name for path in files} == {"passwords.json", "fernet.secret", "session.secret", "jwt.secret"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert json.loads((airflow_home(home) / "passwords.json").read_text()) == known


def test_a_port_in_use_is_refused_before_anything_is_started() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with refused("port-in-use"):
            airflow_port(taken.getsockname()[1])
    assert airflow_port(0) > 0
