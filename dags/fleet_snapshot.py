"""# Copy the state

**When**: every hour, by itself, but for the time of a run that changes the state; by hand before anything risky.

**What it changes**: adds a version to the table `device_snapshots`, if its rows pass the checks. The stream goes on.
A bootstrap begins from one of these versions.

**Red** means: a check failed, and nothing was published; the first line says which, and names rows. The task is linked with the
*Data Docs*, which say more. The state itself is then suspect: look at `./fleet state inspect` before changing anything.

**To undo**: nothing has to be undone; maintenance thins old versions out.
"""

from datetime import timedelta

from airflow.sdk import DAG

from fleetpulse.orchestration.assets import DEVICE_SNAPSHOTS
from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators import TakeSnapshot


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag(
        "fleet_snapshot", __doc__, schedule="7 * * * *", within=timedelta(minutes=50), tags=["state"], alarmed=alarmed
    ) as made:
        TakeSnapshot(task_id="snapshot", outlets=[DEVICE_SNAPSHOTS])
    return made


dag = build()
