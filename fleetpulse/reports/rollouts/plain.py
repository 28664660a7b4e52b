"""Rollouts as JSON values, with the same names in the command, the API and the page."""

from dataclasses import asdict
from typing import Any

from fleetpulse.core.rollouts.rollout import Rollout
from fleetpulse.core.rollouts.verdict import Observation, Verdict


def listed(found: Rollout) -> dict[str, Any]:
    """Return a rollout as a row of a list."""
    return {
        "rollout": found.plan.name,
        "version": found.plan.version,
        "status": found.status.value,
        "cohort": len(found.cohorts),
        "cohorts": len(found.plan.cohorts),
        "devices": found.devices,
        "owner": found.owner,
        "started_ms": found.cohorts[0].started_ms if found.cohorts else None,
        "ended_ms": found.ended_ms,
        "end_requester": found.end_requester,
        "reason": found.reason,
    }


def described(found: Rollout) -> dict[str, Any]:
    """Return a rollout with its plan and its started cohorts."""
    return {**listed(found), "plan": found.plan.content(), "steps": [asdict(one) for one in found.cohorts]}


def judged(found: Rollout, verdict: Verdict | None = None, seen: Observation | None = None) -> dict[str, Any]:
    """Return a rollout with a verdict about its newest cohort.

    Args:
        found: the rollout.
        verdict: present verdict; None for the recorded one.
        seen: facts of the present verdict; None without one.
    """
    recorded = found.current.verdict if found.cohorts else None
    return {
        **described(found),
        "verdict": recorded if verdict is None else verdict.plain(),
        "observed": None if seen is None else asdict(seen),
    }
