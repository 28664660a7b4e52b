"""Facts about the newest cohort of a rollout, for the command, the page and Airflow."""

from dataclasses import replace

from fleetpulse.core.rollouts.cohorts import cohort_of, command_id
from fleetpulse.core.rollouts.rollout import Rollout
from fleetpulse.core.rollouts.verdict import Observation
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.rollouts import StoredRollout
from fleetpulse.reports.rollouts.observation import answers, observe


def observe_newest(home: Home, found: Rollout, *, expects_answers: bool) -> Observation:
    """Return the facts about the newest cohort of a rollout.

    Args:
        home: home of the rollout.
        found: its record.
        expects_answers: whether the stream of commands runs, so that a missing row is a missing answer.

    Raises:
        FleetError: the record of its devices is damaged.
    """
    plan, cohort = found.plan, found.current
    if cohort.sent_ms is None:
        return Observation(cohort.number, None, None)
    of = {device_id: cohort_of(plan.name, device_id, plan.cohorts) for device_id, _ in StoredRollout(home, plan.name).devices()}
    treated = [device_id for device_id, number in of.items() if number == cohort.number]
    rest = [device_id for device_id, number in of.items() if number > cohort.number]
    seen = observe(home, cohort.number, cohort.sent_ms, treated, rest)
    ids = [command_id(plan.name, cohort.number, device_id) for device_id in treated]
    return replace(seen, answers=answers(home, ids, expected=expects_answers))
