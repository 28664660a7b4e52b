"""# Another number of key groups

**When**: the fleet has outgrown its key groups; aim at 4,000 to 32,000 devices each (`./fleet state inspect`, `./fleet plan`).

**What it changes**: plans, and waits until a person has read the plan and approves it. Then it stops the stream, makes a new
generation with that many key groups, checks it (the gate), gives it the work, starts the stream and watches it commit.

**Red** means: it did not come to that. The first line of `outcome` gives the reason, its last says what was undone.

**To undo** a run that went well: this form with the former number, or `./fleet state rollback` while the stream is stopped.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.orchestration.dag_factory import change_state, fleet_dag

FORM = {"key_groups": Param(8, type="integer", minimum=1, maximum=65_536, title="Key groups", description="of the state")}


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag("fleet_rescale", __doc__, within=timedelta(hours=24), tags=["state"], params=FORM, alarmed=alarmed) as made:
        change_state(["state", "rescale", "--key-groups={{ params.key_groups }}"], question="Rescale the state?")
    return made


dag = build()
