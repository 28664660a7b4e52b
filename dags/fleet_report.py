"""# How available was the fleet yesterday?

**When**: every night, by itself, for the day before (UTC); by hand for any day that is kept.

**What it does**: waits until all of that day has been judged, then reports for each site and class in what share of the covered
time the devices were in each mode. Nothing is changed; the rows are the task's result.

**Red** means: the day is not judged within six hours (a gap may be open: `./fleet status`), or the command refused.

**To undo**: nothing.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param, chain

from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators import FleetOperator
from fleetpulse.orchestration.pools import HEAVY_POOL
from fleetpulse.orchestration.sensors import WaitForFrontier

FORM = {"day": Param(None, type=["null", "string"], format="date", title="Day", description="empty: the day before (UTC)")}
DAY = "{{ params.day or macros.ds_add(dag_run.run_after | ds, -1) }}"
ENDS = "{{ macros.ds_add(params.day or macros.ds_add(dag_run.run_after | ds, -1), 1) }}T00:00:00Z"


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag(
        "fleet_report",
        __doc__,
        schedule="15 0 * * *",
        within=timedelta(hours=7),
        tags=["reports"],
        params=FORM,
        alarmed=alarmed,
    ) as made:
        judged = WaitForFrontier(task_id="judged", instant=ENDS, patience=timedelta(hours=6))
        report = FleetOperator(task_id="report", words=["availability", "--day", DAY, "--json"], gives="rows", pool=HEAVY_POOL)
        chain(judged, report)
    return made


dag = build()
