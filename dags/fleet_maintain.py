"""# Keep the home small

**When**: every hour, by itself, unless a run changes the state then; by hand when the disk fills.

**What it changes**: joins small files, removes rows that are older than they are kept for (the settings `keep_...`), deletes
files that nobody needs. The stream goes on. Airflow's own is for `fleet_tidy`.

**Red** means: the command refused or died; the first line says why. Given again, it goes on where it stopped.

**To undo**: what retention has removed is gone. To keep more, change the settings before; `./fleet maintain --dry-run` shows what
would go of the home.
"""

from datetime import timedelta

from airflow.sdk import DAG

from fleetpulse.orchestration.assets import COVERAGE, DEVICES, GATEWAYS, JUDGEMENTS, MESSAGES, QUARANTINE, STREAM_HEALTH
from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators import Recurring
from fleetpulse.orchestration.pools import STATE_POOL


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag(
        "fleet_maintain", __doc__, schedule="40 * * * *", within=timedelta(hours=3), tags=["tables"], alarmed=alarmed
    ) as made:
        Recurring(
            task_id="maintain",
            words=["maintain", "--json"],
            gives="rows",
            pool=STATE_POOL,
            execution_timeout=timedelta(hours=2),
            outlets=[MESSAGES, QUARANTINE, COVERAGE, DEVICES, GATEWAYS, JUDGEMENTS, STREAM_HEALTH],
        )
    return made


dag = build()
