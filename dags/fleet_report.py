"""# Report the availability of the fleet for one day

**When to run it**: it runs every night for the previous day (UTC). Run it by hand for any day that
is retained.

**What it changes**: nothing. It waits until the whole day has been judged. It then reports, by site
and class, the share of the covered time that the devices spent in each mode. The rows are the
result of the task `report`.

**If it is red**: the day was not judged within six hours (perhaps a coverage gap is open:
`./fleet status`), or the command refused.

**How to undo it**: there is nothing to undo.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param, chain

from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators.verbs import FleetOperator
from fleetpulse.orchestration.pools import HEAVY_POOL
from fleetpulse.orchestration.sensors import WaitForFrontier

FORM = {"day": Param(None, type=["null", "string"], format="date", title="Day", description="empty: the previous day (UTC)")}
DAY = "{{ params.day or macros.ds_add(dag_run.run_after | ds, -1) }}"
ENDS = "{{ macros.ds_add(params.day or macros.ds_add(dag_run.run_after | ds, -1), 1) }}T00:00:00Z"


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
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
