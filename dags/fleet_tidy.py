"""# Keep Airflow's own small

**When**: every night, by itself.

**What it changes**: removes rows of Airflow's database (runs, results, its log of events) and logs of tasks that are older than
the setting `keep_logs`. The fleet's data stays: that is `fleet_maintain`.

**Red** means: Airflow's own command failed; the first line says why. Given again, it goes on where it stopped.

**To undo**: what was removed is gone. To keep more, change the setting before.
"""

from datetime import timedelta

from airflow.sdk import DAG

from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.db_cleanup import TidyAirflow
from fleetpulse.orchestration.pools import HEAVY_POOL


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag(
        "fleet_tidy", __doc__, schedule="50 2 * * *", within=timedelta(hours=3), tags=["airflow"], alarmed=alarmed
    ) as made:
        TidyAirflow(task_id="tidy", pool=HEAVY_POOL)
    return made


dag = build()
