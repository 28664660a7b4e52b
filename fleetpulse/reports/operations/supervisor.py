"""Check of the lifecycle job by a supervisor, each minute; starts it if needed.

Rule: each check writes one file in the home, which the next check reads. Without this file, a check
counts as the first.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Final, cast

from fleetpulse.core.monitoring.health import Rating
from fleetpulse.core.monitoring.supervision import SOUND, Decision, Observation, decide
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.desired_state import RUNNING, DesiredState, get_desired, set_desired
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import runs
from fleetpulse.io.ingest.segments import bridge_position
from fleetpulse.io.system.process import NOT_RESTARTED, read_status, status_age_s, write_status
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.reports.judgements import health

_MEMORY: Final = "supervised"
_STARTS: Final = 20  # maximum number of remembered starts


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check.

    Attributes:
        state: state of the job, a value of `core.monitoring.supervision.JobState`.
        why: explanation for people.
        sound: whether the state needs no attention.
        wanted: desired state: running or stopped.
        by: user or Airflow run that set the desired state.
        batch: number of the newest judged batch; None before the first.
        judged_ms: ``received_at`` up to which the job has judged, epoch milliseconds; None before
            the first batch.
        behind_ms: distance of ``judged_ms`` from the newest row received; None if no row was
            received or judged.
        unheard_ms: age of the newest row received; None if there is none, or while a recording is
            played.
        starts: number of remembered starts by checks.
    """

    state: str
    why: str
    sound: bool
    wanted: str
    by: str
    batch: int | None
    judged_ms: int | None
    behind_ms: int | None
    unheard_ms: int | None
    starts: int


def check_job(home: Home, by: str, stale_after_ms: int, now_ms: int | None = None) -> CheckResult:
    """Check the lifecycle job of a home once, and start it if needed.

    Args:
        home: home of the job.
        by: name of the caller, recorded with the desired state if the job is started.
        stale_after_ms: longest time that the job may judge nothing while rows are pending, that
            nothing may be received, and that the job may be starting.
        now_ms: instant of the check; None reads the clock.
    """
    now_ms = now_ms or wall_clock_ms()
    before = read_status(home.run(_MEMORY))
    reached = judged_up_to(home.checkpoint)
    judged_ms = reached[1] if reached and reached[1] > 1 else None
    since_ms = cast("int", before["since_ms"]) if before.get("judged_ms") == judged_ms and "since_ms" in before else now_ms
    starts = tuple(cast("list[int]", before.get("starts_ms", [])))
    desired = get_desired(home)
    seen = _seen(home, desired, judged_ms, now_ms - since_ms, starts, now_ms, stale_after_ms)
    starting_since_ms = cast("int", before.get("starting_since_ms") or now_ms) if seen.starting else None
    seen = replace(seen, starting_ms=now_ms - starting_since_ms if starting_since_ms else 0)
    found = decide(seen)
    if found.start:
        if set_desired(home, RUNNING, by, only_if=desired) is None:
            return check_job(home, by, stale_after_ms)  # the desired state was changed meanwhile
        starts = (*starts, now_ms)[-_STARTS:]
    memory = {"judged_ms": judged_ms, "since_ms": since_ms, "starts_ms": starts, "starting_since_ms": starting_since_ms}
    write_status(home.run(_MEMORY), memory)
    return _result(home, found, seen, reached, starts)


def _seen(
    home: Home,
    desired: DesiredState,
    judged_ms: int | None,
    still_ms: int,
    starts: tuple[int, ...],
    now_ms: int,
    stale_after_ms: int,
) -> Observation:
    path = home.run("lifecycle")
    status = read_status(path)
    found = [one for name in home.bridges() if (one := bridge_position(home.segments_of(name))) is not None]
    positions_ms = [one.received_at_ms for one in found]
    heard = [one.received_at_ms for one in found if one.recording is None]
    return Observation(
        wanted=desired.state == RUNNING,
        by=desired.by,
        has_run=runs(home, "lifecycle"),
        state=str(status.get("state", "")),
        status_age_ms=round((status_age_s(path, now_ms / 1000) or 0) * 1000) if status else 0,
        given_up=str(status.get("why", ""))
        if status.get("state") == NOT_RESTARTED and status.get("at_ms", 0) >= desired.at_ms
        else "",
        behind_ms=max(0, max(positions_ms) - judged_ms) if positions_ms and judged_ms is not None else None,
        still_ms=still_ms,
        critical=tuple(_critical(home)),
        starts_ms=starts,
        now_ms=now_ms,
        stale_after_ms=stale_after_ms,
        wanted_ago_ms=max(0, now_ms - desired.at_ms),
        unheard_ms=max(0, now_ms - max(heard)) if heard else None,
    )


def _critical(home: Home) -> list[str]:
    found: dict[str, Any] = health(home) or {"rated": []}
    return [
        f"{one['metric']} is critical: {one['column']} {one['value']:,}, above {one['critical_above']:,}"
        for one in found["rated"]
        if one["rating"] == Rating.CRITICAL
    ]


def _result(
    home: Home, found: Decision, seen: Observation, reached: tuple[int, int] | None, starts: tuple[int, ...]
) -> CheckResult:
    return CheckResult(
        found.state.value,
        found.why,
        found.state in SOUND,
        get_desired(home).state,
        get_desired(home).by,
        reached[0] if reached else None,
        reached[1] if reached and reached[1] > 1 else None,
        seen.behind_ms,
        seen.unheard_ms,
        len(starts),
    )


def as_facts(result: CheckResult) -> dict[str, Any]:
    """Return the result of a check as JSON values."""
    return asdict(result)
