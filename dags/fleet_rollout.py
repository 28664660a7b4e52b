"""# Roll out firmware by cohort

**When to run it**: to give a firmware version to devices, first to a few of them. Enter the plan as
TOML. It must have three cohorts, such as 10 %, 50 % and all.

**What it changes**: plans, and waits until another person than you approves the plan. It then sends
the firmware to the first cohort, and compares its rates of offline devices and of errors with those
of the other devices for the soak of the plan. Before each further cohort it shows the verdict, and
asks again. The stream keeps running.

**If it is red**: the first line of `outcome` gives the reason. If a cohort exceeded a bound, that is
the arithmetic of its rates. The rollout is stopped: no further device gets the command.

**How to undo it**: devices that have the firmware keep it. Roll out the version before to them, with
a new name and `scope = "firmware = '...'"`.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param, chain

from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators.rollouts import (
    COHORTS,
    PLAN_FILE,
    ROLLOUT,
    PlanCohort,
    StartCohort,
    StopRollout,
    WaitForCohort,
    WriteRolloutPlan,
)
from fleetpulse.orchestration.operators.verbs import RunResultOperator
from fleetpulse.orchestration.pools import HEAVY_POOL
from fleetpulse.orchestration.sensors import Approval

PLAN = """\
name = "pumps-2.4.1"
version = "2.4.1"
scope = "device_class = 'pump'"
cohorts = [10, 50, 100]
soak = "2h"

[bounds]
offline = 5
errors = 5
"""
FORM = {
    "plan": Param(
        PLAN, type="string", format="multiline", title="Plan", description="TOML, see docs/how-to/roll-out-firmware.md"
    ),
}
_NOTE = "The devices of the cohort get the firmware at once, and keep it."
_PATIENCE = timedelta(hours=72)  # a cohort may pass before a weekend


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
    with fleet_dag("fleet_rollout", __doc__, within=timedelta(hours=336), tags=["devices"], params=FORM, alarmed=alarmed) as made:
        write_plan = WriteRolloutPlan(task_id="write_plan")
        tasks = [write_plan]
        for number in range(1, COHORTS + 1):
            step = f"cohort {number}"
            verb = ["rollout", "start", PLAN_FILE] if number == 1 else ["rollout", "advance", ROLLOUT, f"--to={number}"]
            tasks += [
                PlanCohort(task_id=f"plan_{number}", words=[*verb, "--dry-run"], step=step, pool=HEAVY_POOL),
                Approval(
                    task_id=f"approve_{number}",
                    question=f"Send the firmware to cohort {number} of {COHORTS}?",
                    step=step,
                    note=_NOTE,
                    response_timeout=_PATIENCE,
                ),
                StartCohort(task_id=f"start_{number}", words=[*verb, "--json"], step=step, first=number == 1),
                WaitForCohort(task_id=f"check_{number}"),
            ]
        stop = StopRollout(task_id="stop")
        steps = [task.task_id for task in (*tasks, stop)]
        asked = [name for name in steps if name.startswith("approve")]
        outcome = RunResultOperator(
            task_id="outcome",
            of=steps,
            undone_by="stop",
            asked_by=asked,
            steps=[f"cohort {number}" for number in range(1, COHORTS + 1)],
        )
        chain(*tasks, stop, outcome)
        stop.as_teardown(setups=write_plan)
    return made


dag = build()
