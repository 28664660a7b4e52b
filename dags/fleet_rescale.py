"""# Change the number of key groups

**When to run it**: the fleet has outgrown its key groups, or the job has more cores than before. Aim
at 4,000 to 32,000 devices per key group, and at two to five key groups per core
(`./fleet state inspect`, `./fleet plan`).

**What it changes**: plans, and waits until another person than you approves the plan. It then stops
the stream, creates a new generation with that many key groups, and checks it (the gate). It
switches to that generation, starts the stream, and waits until it commits.

**If it is red**: the change failed. The first line of `outcome` gives the reason, and its last line
reports the recovery.

**How to undo it**: run this form with the former number, or stop the stream and run
`./fleet state rollback`.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.orchestration.dag_factory import change_state, fleet_dag

FORM = {"key_groups": Param(8, type="integer", minimum=1, maximum=65_536, title="Key groups", description="number of key groups")}


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
    with fleet_dag("fleet_rescale", __doc__, within=timedelta(hours=24), tags=["state"], params=FORM, alarmed=alarmed) as made:
        change_state(["state", "rescale", "--key-groups={{ params.key_groups }}"], question="Rescale the state?")
    return made


dag = build()
