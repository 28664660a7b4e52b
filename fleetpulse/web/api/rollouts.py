"""Routes of the API about firmware rollouts."""

from typing import Any, Final

from starlette.requests import Request

from fleetpulse.core.errors import FleetError
from fleetpulse.core.rollouts.rollout import Rollout, Status
from fleetpulse.core.rollouts.verdict import Result
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.rollouts import StoredRollout, rollout_names
from fleetpulse.reports.rollouts.plain import described, listed
from fleetpulse.web.api.answers import tables
from fleetpulse.web.api.openapi import Operation, Parameter, any_object, array, obj, optional, text, whole
from fleetpulse.web.api.parameters import TEXT
from fleetpulse.web.live import LiveFleet


def rollouts(live: LiveFleet, _request: Request) -> dict[str, Any]:
    """List the rollouts, newest first."""
    return {"rollouts": [listed(one) for one in all_rollouts(live.home)]}


def rollout(live: LiveFleet, request: Request) -> dict[str, Any]:
    """Show a rollout: its plan, and its cohorts with their verdicts."""
    return described(rollout_of(live.home, request.path_params["name"]))


def all_rollouts(home: Home) -> list[Rollout]:
    """Return the rollouts of a home, newest first.

    Raises:
        FleetError: a record is damaged.
    """
    found = [one for name in rollout_names(home) if (one := StoredRollout(home, name).find())]
    return sorted(found, key=lambda one: (one.cohorts[0].started_ms if one.cohorts else 0, one.plan.name), reverse=True)


def rollout_of(home: Home, name: str) -> Rollout:
    """Return a rollout.

    Raises:
        FleetError: there is no such rollout, or its record is damaged.
    """
    if name not in rollout_names(home):  # a name of a request is never a part of a path
        raise FleetError(f'there is no rollout "{name[:100]}"; find it in the list of rollouts', code="rollout-unknown")
    return StoredRollout(home, name).read()


_LISTED: Final = {
    "rollout": text("name"),
    "version": text("firmware version that the devices get"),
    "status": text("status", [one.value for one in Status]),
    "cohort": whole("number of started cohorts"),
    "cohorts": whole("number of cohorts"),
    "devices": whole("number of devices"),
    "owner": text("owner, by default the requester of the start"),
    "started_ms": optional(whole("start, epoch milliseconds")),
    "ended_ms": optional(whole("end, epoch milliseconds; null while it runs")),
    "end_requester": optional(text("requester of its end")),
    "reason": optional(text("reason of its end")),
}
_VERDICT: Final = obj(
    {
        "result": text("result", [one.value for one in Result]),
        "reason": text("arithmetic of the rates, or what is missing"),
        "baseline": optional(text("`rest`, or `before`: the cohort itself before its start")),
        "until_ms": optional(whole("event time at which the soak ends, epoch milliseconds")),
    }
)
_STEP: Final = obj(
    {
        "number": whole("number of the cohort, from 1"),
        "devices": whole("number of its devices"),
        "requester": text("requester of its start"),
        "started_ms": whole("start, epoch milliseconds"),
        "sent_ms": optional(whole("time at which its commands were sent, epoch milliseconds")),
        "verdict": optional(_VERDICT),
        "judged_ms": optional(whole("time of its verdict, epoch milliseconds")),
    }
)

OPERATIONS: Final = (
    Operation(
        "/rollouts",
        "rollouts",
        "List the firmware rollouts of the home, newest first.",
        tables(rollouts),
        obj({"rollouts": array(obj(_LISTED), "rollouts")}),
    ),
    Operation(
        "/rollouts/{name}",
        "rollout",
        "Show a firmware rollout: its plan, and its started cohorts with their verdicts.",
        tables(rollout),
        obj(
            {
                **_LISTED,
                "plan": any_object("plan, as the content of its file"),
                "steps": array(_STEP, "started cohorts, in order"),
            }
        ),
        parameters=(Parameter("name", "name of the rollout", TEXT, "path"),),
        notes="A verdict is that of the record: `./fleet rollout check NAME` judges the newest cohort and records it.",
        errors=(404,),
    ),
)
