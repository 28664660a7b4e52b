"""# Delete old runs and task logs of Airflow

**When to run it**: it runs every night.

**What it changes**: deletes rows of Airflow's database (runs, results, its event log) and task logs
that are older than the setting `keep_logs`. It does not touch the fleet's data, which
`fleet_maintain` handles.

**If it is red**: the command of Airflow failed. The first line of the failure gives the reason. The
next run resumes where this one stopped.

**How to undo it**: deleted rows and logs cannot be restored. To keep more, raise the setting
beforehand.
"""

from datetime import timedelta

from airflow.sdk import DAG

from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.db_cleanup import TidyAirflow
from fleetpulse.orchestration.pools import HEAVY_POOL


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
    with fleet_dag(
        "fleet_tidy", __doc__, schedule="50 2 * * *", within=timedelta(hours=3), tags=["airflow"], alarmed=alarmed
    ) as made:
        TidyAirflow(task_id="tidy", pool=HEAVY_POOL)
    return made


dag = build()
