"""# Supervise the stream and restart it after a failure

**When to run it**: it runs every minute; there is no need to run it by hand.

**What it changes**: checks that the lifecycle job runs, commits batches and stays within its
thresholds. If the job has died, it is restarted from its checkpoint, with increasing pauses between
attempts. A job that was stopped on purpose stays stopped.

**If it is red**: the first line of the failure names one of these states and its reason.
`./fleet status` and the home's `logs` give the details.

- *critical*: a figure is beyond its threshold.
- *stale*: the job judges none of the pending messages, or no bridge writes anything.
- *backing off*: the job died again, and the pause before the next attempt is not over.
- *down*: no supervisor runs that could start the job.
- *left stopped*: a run stopped the job more than twelve hours ago and has not started it again.

**How to undo it**: `./fleet stream stop` keeps the stream stopped, and this DAG respects it.
`./fleet stream start` allows the stream to run again.
"""

from datetime import timedelta

from airflow.sdk import DAG

from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators.verbs import FleetOperator


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
    with fleet_dag(
        "fleet_supervise", __doc__, schedule="* * * * *", within=timedelta(minutes=10), tags=["stream"], alarmed=alarmed
    ) as made:
        FleetOperator(
            task_id="supervise",
            words=["stream", "supervise", "--json"],
            gives="json",
            retries=1,
            retry_delay=timedelta(seconds=5),  # the next run follows in a minute anyway
            execution_timeout=timedelta(minutes=5),
        )
    return made


dag = build()
