"""# Do the tables say what they may say?

**When**: every hour, by itself; when a snapshot was published; when somebody published on `fleetpulse/alert/...`, at most every
five minutes; by hand for one suite.

**What it changes**: adds rows to `quality_results` and `quality_failures`, and builds the Data Docs below the home's
`quality/docs`. The tables that it looks at are only read.

**Red** means: an expectation failed that is critical. The first line of `outcome` names the suite, the expectation and the first
row. `./fleet quality results` shows them over time.

**To undo**: nothing.
"""

from datetime import timedelta

from airflow.sdk import DAG, AssetOrTimeSchedule, CronTriggerTimetable, Param, chain

from fleetpulse.orchestration.assets import ALERTS, DEVICE_SNAPSHOTS, QUALITY_FAILURES, QUALITY_RESULTS
from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators import BuildDocs, QualityOperator, RunResultOperator
from fleetpulse.orchestration.pools import HEAVY_POOL

FORM = {"suite": Param(None, type=["null", "string"], title="Suite", description="empty: all of them")}


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
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
            execution_timeout=timedelta(hours=2),  # all of bronze is looked at
        )
        docs = BuildDocs(  # of what failed above all: so the tables' events are its, too, and not those of a look that may fail
            task_id="docs", pool=HEAVY_POOL, trigger_rule="all_done", outlets=[QUALITY_RESULTS, QUALITY_FAILURES]
        )
        chain(check, docs, RunResultOperator(task_id="outcome", of=["check", "docs"]))
    return made


dag = build()
