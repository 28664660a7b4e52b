"""# Another number of partitions

**When**: the machine has other cores than it had, or `./fleet state inspect` shows a skew. The number bounds how many cores work.

**What it changes**: plans, and waits until a person has read the plan and approves it. Then it stops the stream, makes a new
generation with that many partitions, checks it (the gate), gives it the work, starts the stream and watches it commit.

**Red** means: it did not come to that. The first line of `outcome` gives the reason, its last says what was undone.

**To undo** a run that went well: this form with the former number, or `./fleet state rollback` while the stream is stopped.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.orchestration.dag_factory import change_state, fleet_dag

FORM = {"partitions": Param(2, type="integer", minimum=1, maximum=10_000, title="Partitions", description="of the state")}


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag(
        "fleet_repartition", __doc__, within=timedelta(hours=24), tags=["state"], params=FORM, alarmed=alarmed
    ) as made:
        change_state(["state", "repartition", "{{ params.partitions }}"], question="Repartition the state?")
    return made


dag = build()
