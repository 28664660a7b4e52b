"""# Check the data quality of the tables

**When to run it**: it runs every hour, after each published snapshot, and after a message on
`fleetpulse/alert/...` (at most once in five minutes). Run it by hand for a single suite.

**What it changes**: adds rows to `quality_results` and `quality_failures`, and builds the Data Docs
in the home's `quality/docs`. The checked tables are only read.

**If it is red**: a critical expectation failed. The first line of `outcome` names the suite, the
expectation and the first failing row. `./fleet quality results` lists the results over time.

**How to undo it**: there is nothing to undo.
"""

from datetime import timedelta

from airflow.sdk import DAG, AssetOrTimeSchedule, CronTriggerTimetable, Param, chain

from fleetpulse.orchestration.assets import ALERTS, DEVICE_SNAPSHOTS, QUALITY_FAILURES, QUALITY_RESULTS
from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators.verbs import BuildDocs, QualityOperator, RunResultOperator
from fleetpulse.orchestration.pools import HEAVY_POOL

FORM = {"suite": Param(None, type=["null", "string"], title="Suite", description="empty: all suites")}


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
    schedule = AssetOrTimeSchedule(timetable=CronTriggerTimetable("23 * * * *", timezone="UTC"), assets=DEVICE_SNAPSHOTS | ALERTS)
    with fleet_dag(
        "fleet_quality",
        __doc__,
        schedule=schedule,
        within=timedelta(hours=3),
        tags=["quality"],
        params=FORM,
        alarmed=alarmed,
    ) as made:
        check = QualityOperator(
            task_id="check",
            words=["quality", "run", "--suite={{ params.suite or '' }}", "--json"],
            gives="json",
            pool=HEAVY_POOL,
            execution_timeout=timedelta(hours=2),  # all of bronze is checked
        )
        docs = BuildDocs(  # runs even if `check` failed, to emit the events of its tables
            task_id="docs", pool=HEAVY_POOL, trigger_rule="all_done", outlets=[QUALITY_RESULTS, QUALITY_FAILURES]
        )
        chain(check, docs, RunResultOperator(task_id="outcome", of=["check", "docs"]))
    return made


dag = build()
