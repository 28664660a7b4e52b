"""# Migrate the state to another format version

**When to run it**: after an update whose CHANGELOG asks for it, or before a downgrade to a
fleetpulse that reads only an older format version.

**What it changes**: plans, and waits until another person than you approves the plan. It then stops
the stream, creates a new generation in the other format version, and checks it (the gate). It
switches to that generation, starts the stream, and waits until it commits.

**If it is red**: the change failed. The first line of `outcome` gives the reason. Its last line
reports the recovery: the new generation was discarded or rolled back, and the stream was started
again. Nothing is lost; messages received meanwhile are judged afterwards.

**How to undo it**: stop the stream and run `./fleet state rollback`.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.orchestration.dag_factory import change_state, fleet_dag

FORM = {
    "form": Param(
        None, type=["null", "integer"], minimum=1, title="Stored form", description="empty: the format version of this release"
    ),
}


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
    with fleet_dag("fleet_migrate", __doc__, within=timedelta(hours=24), tags=["state"], params=FORM, alarmed=alarmed) as made:
        change_state(["state", "migrate", "--form={{ params.form or '' }}"], question="Migrate the state?")
    return made


dag = build()
