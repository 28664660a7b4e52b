"""# Publish a snapshot of the state

**When to run it**: it runs every hour, except while another run changes the state. Run it by hand
before anything risky.

**What it changes**: adds a version to the table `device_snapshots`, if its rows pass the checks.
The stream keeps running. A bootstrap starts from one of these versions.

**If it is red**: a check failed, and nothing was published. The first line of the failure names the
check and some rows. The task links to the *Data Docs* with the details. The state itself is then
suspect: run `./fleet state inspect` before you change anything.

**How to undo it**: there is nothing to undo; maintenance thins out old versions.
"""

from datetime import timedelta

from airflow.sdk import DAG

from fleetpulse.orchestration.assets import DEVICE_SNAPSHOTS
from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators.verbs import TakeSnapshot


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
    with fleet_dag(
        "fleet_snapshot", __doc__, schedule="7 * * * *", within=timedelta(minutes=50), tags=["state"], alarmed=alarmed
    ) as made:
        TakeSnapshot(task_id="snapshot", outlets=[DEVICE_SNAPSHOTS])
    return made


dag = build()
