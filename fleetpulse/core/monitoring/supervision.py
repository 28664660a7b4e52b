"""What one who looks after the lifecycle job does about it, from what can be seen of it.

Rule 1: what is wanted comes first: a job that is to be stopped is started by nobody. One that a run of Airflow stopped for its
work, and that stays so for longer than any work takes, is told of: that run goes on no more.
Rule 2: a job that its run still starts again by itself is left to that; one that the run has given up is started anew, and after
each start the wait before the next one is twice as long.
Rule 3: nothing here reads a clock or a file.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fleetpulse.core.times import format_duration

FIRST_WAIT_MS: Final = 60_000
LONGEST_WAIT_MS: Final = 1_800_000
REMEMBERED_MS: Final = 21_600_000  # a start so long ago says nothing of the next one
STARTING_MS: Final = 300_000  # longer than a JVM and its first batch take on a busy machine
AIRFLOWS: Final = "airflow "  # with it begins who says so where a run of Airflow does
LONGEST_CHANGE_MS: Final = 43_200_000  # more than a run may take from its stop to its start: the limits of its tasks, one by one
SILENT_MS: Final = 120_000  # a job that runs writes how it is several times a second


class JobState(StrEnum):
    """How the job stands."""

    RUNNING = "running"
    STARTING = "starting"
    STOPPED = "stopped"  # since it is to be
    LEFT = "left stopped"  # by a run of Airflow, for longer than its work may take
    STARTED = "started"  # by this look
    BACKING_OFF = "backing off"  # dead, and not to be started yet
    STALE = "stale"  # it runs, and judges nothing of what there is, or there is nothing: no bridge says a word
    CRITICAL = "critical"  # a figure is beyond its threshold
    DOWN = "down"  # nobody runs it who could start it


SOUND: Final = frozenset({JobState.RUNNING, JobState.STARTING, JobState.STOPPED, JobState.STARTED})


@dataclass(frozen=True, slots=True)
class Seen:
    """What can be seen of the job; instants and durations in milliseconds.

    Attributes:
        wanted: whether it is to run.
        by: who said so.
        has_run: whether somebody runs it, and would start it again.
        state: what the job last said of itself; empty where nothing.
        said_ago_ms: how long ago that was.
        given_up: why its run no longer starts it; empty where it does.
        behind_ms: how far what is judged lies behind what was received; None where nothing was.
        still_ms: for how long nothing more has been judged.
        critical: the figures beyond their thresholds, in words.
        starts_ms: when it was started by a look, the newest last.
        now_ms: the instant of the look.
        stale_after_ms: for how long nothing may be judged while something waits, and for how long it may be starting.
        starting_ms: for how long looks have found it starting.
        wanted_ago_ms: how long ago was said whether it is to run.
        unheard_ms: how long ago, by the clock, the newest row was received: bridges that listen write ticks where no device
            speaks; None where nothing was, or a recording is played, which has a time of its own.
    """

    wanted: bool
    by: str
    has_run: bool
    state: str
    said_ago_ms: int
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
        """Whether it is to run, somebody sees to it, and it does not say that it does."""
        says = self.state == "running" and self.said_ago_ms <= SILENT_MS
        return self.wanted and self.has_run and not self.given_up and not says


@dataclass(frozen=True, slots=True)
class Decision:
    """What a look comes to.

    Attributes:
        standing: how the job stands.
        why: a sentence.
        start: whether it is to be started.
    """

    standing: JobState
    why: str
    start: bool = False


def decide(seen: Seen) -> Decision:
    """Decide what to do about the job."""
    if not seen.wanted:
        return _stopped(seen)
    if not seen.has_run:
        return Decision(JobState.DOWN, "nobody runs it who could start it: start its service, or ./fleet up")
    if seen.given_up:
        return _again(seen)
    if not seen.starting:
        return _running(seen)
    if seen.said_ago_ms <= STARTING_MS:
        return _starting(seen)
    return Decision(JobState.STALE, f"it has said nothing for {_minutes(seen.said_ago_ms)}; see its log")


def _stopped(seen: Seen) -> Decision:
    if seen.by.startswith(AIRFLOWS) and seen.wanted_ago_ms > LONGEST_CHANGE_MS:
        why = f"{seen.by} stopped it {_minutes(seen.wanted_ago_ms)} ago, longer than its work may take"
        return Decision(
            JobState.LEFT, f"{why}: let that run go on (is its DAG paused?), or, where it has ended: ./fleet stream start"
        )
    return Decision(JobState.STOPPED, f"it is to be stopped, says {seen.by}")


def _starting(seen: Seen) -> Decision:
    said = seen.state or "its process has said nothing yet"
    if seen.starting_ms > seen.stale_after_ms:  # each of its processes may be a young one
        return Decision(JobState.STALE, f"it has not run for {_minutes(seen.starting_ms)}: {said}; see its log")
    return Decision(JobState.STARTING, said)


def _again(seen: Seen) -> Decision:
    recent = [at for at in seen.starts_ms if seen.now_ms - at < REMEMBERED_MS]
    if recent:
        wait_ms = min(FIRST_WAIT_MS * 2 ** (len(recent) - 1), LONGEST_WAIT_MS)
        rest_ms = recent[-1] + wait_ms - seen.now_ms
        if rest_ms > 0:
            times = f"it was started {len(recent)} times within {_minutes(REMEMBERED_MS)}"
            why = f"{times}; again in {_minutes(rest_ms)}: {seen.given_up}"
            return Decision(JobState.BACKING_OFF, why)
    return Decision(JobState.STARTED, f"it was dead: {seen.given_up}", start=True)


def _running(seen: Seen) -> Decision:
    behind_ms = seen.behind_ms or 0
    if behind_ms > seen.stale_after_ms and seen.still_ms > seen.stale_after_ms:
        why = f"it has judged nothing for {_minutes(seen.still_ms)}, and is {_minutes(behind_ms)} behind what was received"
        return Decision(JobState.STALE, why)
    if seen.unheard_ms is not None and seen.unheard_ms > seen.stale_after_ms:
        why = f"nothing has been received for {_minutes(seen.unheard_ms)}, not even a bridge's tick: no bridge listens"
        return Decision(JobState.STALE, f"{why}; see the bridge's log, and the broker")
    if seen.critical:
        return Decision(JobState.CRITICAL, "; ".join(seen.critical))
    return Decision(
        JobState.RUNNING, f"{_minutes(behind_ms)} behind what was received" if seen.behind_ms is not None else "it runs"
    )


def _minutes(duration_ms: int) -> str:
    return format_duration(duration_ms // 1000 * 1000)
