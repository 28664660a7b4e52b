"""# Go on in another stored form

**When**: after an update that says so (CHANGELOG), or to go back to an older form before going back to an older fleetpulse.

**What it changes**: plans, and waits until a person has read the plan and approves it. Then it stops the stream, makes a new
generation in the other form, checks it (the gate), gives it the work, starts the stream and watches it commit.

**Red** means: it did not come to that. The first line of `outcome` gives the reason, its last says what was undone: the new
generation was discarded, or rolled back from, and the stream started again. Nothing is lost: what came in meanwhile waited.

**To undo** a run that went well: `./fleet state rollback` while the stream is stopped.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.orchestration.dag_factory import change_state, fleet_dag

FORM = {
    "form": Param(
        None, type=["null", "integer"], minimum=1, title="Stored form", description="empty: the one that this version writes"
    ),
}


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag("fleet_migrate", __doc__, within=timedelta(hours=24), tags=["state"], params=FORM, alarmed=alarmed) as made:
        change_state(["state", "migrate", "--form={{ params.form or '' }}"], question="Migrate the state?")
    return made


dag = build()
