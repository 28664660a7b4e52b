"""# Is the stream alive?

**When**: every minute, by itself. Nobody has to run it.

**What it does**: looks whether the lifecycle job runs, commits batches and keeps within its thresholds. Where it has died it is
started again from its checkpoint, with growing pauses between tries. One that was stopped on purpose stays so;
where a run stopped it twelve hours ago and has not started it again, that is red.

**Red** means one of these; the first line of the task's failure says which, and why: *critical* (a figure is beyond its
threshold), *stale* (it judges nothing of what waits, or no bridge says a word), *backing off* (it died again, and is not to be
started yet), *down* (nobody runs it who could start it), *left stopped* (by a run, twelve hours ago). `./fleet status` and the
home's `logs` say more.

**To undo**: `./fleet stream stop` keeps the stream stopped, and this DAG obeys it; `./fleet stream start` lets it run again.
"""

from datetime import timedelta

from airflow.sdk import DAG

from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators import FleetOperator


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag(
        "fleet_supervise", __doc__, schedule="* * * * *", within=timedelta(minutes=10), tags=["stream"], alarmed=alarmed
    ) as made:
        FleetOperator(
            task_id="supervise",
            words=["stream", "supervise", "--json"],
            gives="json",
            retries=1,
            retry_delay=timedelta(seconds=5),  # the next look comes in a minute anyway
            execution_timeout=timedelta(minutes=5),
        )
    return made


dag = build()
