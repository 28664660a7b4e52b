"""Decisions of the supervisor of the lifecycle job, from one observation.

Rule 1: the desired state takes precedence: a job whose desired state is stopped is not started. If
an Airflow run stopped it longer ago than any run takes, that run is stuck, which is reported.
Rule 2: a job that its run restarts by itself is left to the run. If the run has stopped restarting
it, the supervisor starts it. The wait before the next start doubles with each start.
Rule 3: nothing here reads a clock or a file.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fleetpulse.core.times import format_duration

FIRST_WAIT_MS: Final = 60_000
LONGEST_WAIT_MS: Final = 1_800_000
REMEMBERED_MS: Final = 21_600_000  # starts before this time do not delay the next start
STARTING_MS: Final = 300_000  # longer than a JVM and its first batch take on a busy machine
AIRFLOWS: Final = "airflow "  # prefix of ``by`` if an Airflow run set the desired state
LONGEST_CHANGE_MS: Final = 43_200_000  # above the sum of the time limits of a run's tasks, from its stop to its start
SILENT_MS: Final = 120_000  # a running job writes its status several times a second


class JobState(StrEnum):
    """State of the lifecycle job, as the supervisor reports it."""

    RUNNING = "running"
    STARTING = "starting"
    STOPPED = "stopped"  # as desired
    LEFT = "left stopped"  # by an Airflow run, for longer than its tasks may take
    STARTED = "started"  # by this check
    BACKING_OFF = "backing off"  # dead; the wait before the next start is not over
    STALE = "stale"  # it runs but judges no rows, or no rows are received: no bridge is listening
    CRITICAL = "critical"  # a metric is beyond its threshold
    DOWN = "down"  # no run or service is active that could start it


SOUND: Final = frozenset({JobState.RUNNING, JobState.STARTING, JobState.STOPPED, JobState.STARTED})


@dataclass(frozen=True, slots=True)
class Observation:
    """Observation of the job by one check of the supervisor; times in milliseconds.

    Attributes:
        wanted: whether the desired state is running.
        by: user or Airflow run that set the desired state.
        has_run: whether a run or service of the job is active, which restarts it.
        state: status that the job reported last; empty if none.
        status_age_ms: age of that status.
        given_up: reason why the run has stopped restarting the job; empty if it has not.
        behind_ms: distance of the judged position from the newest row received; None if no row was
            received or judged.
        still_ms: time since the judged position last moved.
        critical: messages about the metrics beyond their thresholds.
        starts_ms: instants of starts by the supervisor, newest last.
        now_ms: instant of the check.
        stale_after_ms: longest time that the job may judge nothing while rows are pending, and that
            it may be starting.
        starting_ms: time since which all checks have found it starting.
        wanted_ago_ms: age of the desired state.
        unheard_ms: age of the newest row by the clock, since a listening bridge writes ticks even
            if no device sends; None if no row was received, or while a recording is played.
    """

    wanted: bool
    by: str
    has_run: bool
    state: str
    status_age_ms: int
    given_up: str
    behind_ms: int | None
    still_ms: int
    critical: tuple[str, ...]
    starts_ms: tuple[int, ...]
    now_ms: int
    stale_after_ms: int
    starting_ms: int = 0
    wanted_ago_ms: int = 0
    unheard_ms: int | None = None

    @property
    def starting(self) -> bool:
        """Whether a run is bringing the job up, and the job does not report running."""
        reports_running = self.state == "running" and self.status_age_ms <= SILENT_MS
        return self.wanted and self.has_run and not self.given_up and not reports_running


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of a check.

    Attributes:
        state: state of the job.
        why: explanation for people.
        start: whether the supervisor must start the job.
    """

    state: JobState
    why: str
    start: bool = False


def decide(seen: Observation) -> Decision:
    """Return the state of the job, and whether to start it."""
    if not seen.wanted:
        return _stopped(seen)
    if not seen.has_run:
        return Decision(JobState.DOWN, "no run or service of it is active; start its service, or run ./fleet up")
    if seen.given_up:
        return _restart(seen)
    if not seen.starting:
        return _running(seen)
    if seen.status_age_ms <= STARTING_MS:
        return _starting(seen)
    return Decision(JobState.STALE, f"it has reported no status for {_minutes(seen.status_age_ms)}; see its log")


def _stopped(seen: Observation) -> Decision:
    if seen.by.startswith(AIRFLOWS) and seen.wanted_ago_ms > LONGEST_CHANGE_MS:
        why = f"{seen.by} stopped it {_minutes(seen.wanted_ago_ms)} ago, longer than its tasks may take"
        return Decision(
            JobState.LEFT, f"{why}; resume that run (is its DAG paused?), or run ./fleet stream start if it has ended"
        )
    return Decision(JobState.STOPPED, f"its desired state is stopped, set by {seen.by}")


def _starting(seen: Observation) -> Decision:
    status = seen.state or "its process has reported no status yet"
    if seen.starting_ms > seen.stale_after_ms:  # although each new process reports a status
        return Decision(JobState.STALE, f"it has been starting for {_minutes(seen.starting_ms)}: {status}; see its log")
    return Decision(JobState.STARTING, status)


def _restart(seen: Observation) -> Decision:
    recent = [at for at in seen.starts_ms if seen.now_ms - at < REMEMBERED_MS]
    if recent:
        wait_ms = min(FIRST_WAIT_MS * 2 ** (len(recent) - 1), LONGEST_WAIT_MS)
        rest_ms = recent[-1] + wait_ms - seen.now_ms
        if rest_ms > 0:
            times = f"it was started {len(recent)} times within {_minutes(REMEMBERED_MS)}"
            why = f"{times}; next start in {_minutes(rest_ms)}: {seen.given_up}"
            return Decision(JobState.BACKING_OFF, why)
    return Decision(JobState.STARTED, f"it was dead: {seen.given_up}", start=True)


def _running(seen: Observation) -> Decision:
    behind_ms = seen.behind_ms or 0
    if behind_ms > seen.stale_after_ms and seen.still_ms > seen.stale_after_ms:
        why = f"it has judged nothing for {_minutes(seen.still_ms)}, and is {_minutes(behind_ms)} behind the newest row received"
        return Decision(JobState.STALE, why)
    if seen.unheard_ms is not None and seen.unheard_ms > seen.stale_after_ms:
        why = f"nothing has been received for {_minutes(seen.unheard_ms)}, not even a bridge's tick: no bridge is listening"
        return Decision(JobState.STALE, f"{why}; see the logs of the bridge and the broker")
    if seen.critical:
        return Decision(JobState.CRITICAL, "; ".join(seen.critical))
    return Decision(
        JobState.RUNNING, f"{_minutes(behind_ms)} behind the newest row received" if seen.behind_ms is not None else "it runs"
    )


def _minutes(duration_ms: int) -> str:
    return format_duration(duration_ms // 1000 * 1000)
