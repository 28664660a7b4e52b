"""# Change the number of state partitions

**When to run it**: the machine has a different number of cores than before, or
`./fleet state inspect` reports a skew. The number of partitions limits how many cores the job can
use.

**What it changes**: plans, and waits until another person than you approves the plan. It then stops
the stream, creates a new generation with that many partitions, and checks it (the gate). It
switches to that generation, starts the stream, and waits until it commits.

**If it is red**: the change failed. The first line of `outcome` gives the reason, and its last line
reports the recovery.

**How to undo it**: run this form with the former number, or stop the stream and run
`./fleet state rollback`.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.orchestration.dag_factory import change_state, fleet_dag

FORM = {"partitions": Param(2, type="integer", minimum=1, maximum=10_000, title="Partitions", description="number of partitions")}


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
    with fleet_dag(
        "fleet_repartition", __doc__, within=timedelta(hours=24), tags=["state"], params=FORM, alarmed=alarmed
    ) as made:
        change_state(["state", "repartition", "{{ params.partitions }}"], question="Repartition the state?")
    return made


dag = build()
