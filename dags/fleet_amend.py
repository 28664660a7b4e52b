"""# Take back what late messages disprove

**When**: by itself when late messages were written down, at most every quarter of an hour; by hand for one device, or since an
instant.

**What it changes**: judges the devices concerned anew, retracts and adds transitions, and sends a command for each device that
stands wrong; when that is in effect it does so once more, and the device is done with. The stream goes on.

**Red** means: the command refused; the first line says why.

**To undo**: there is nothing to undo: what it says follows from the messages. What was judged at first stays in
`./fleet transitions --all`.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.orchestration.assets import JUDGEMENTS, LATE
from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators import FleetOperator
from fleetpulse.orchestration.pools import HEAVY_POOL

FORM = {
    "device": Param(None, type=["null", "string"], title="Device", description="empty: all that something came late for"),
    "since": Param(None, type=["null", "string"], format="date-time", title="Since", description="empty: since the last time"),
}


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag(
        "fleet_amend",
        __doc__,
        schedule=[LATE],
        within=timedelta(hours=3),
        tags=["judgements"],
        params=FORM,
        alarmed=alarmed,
    ) as made:
        FleetOperator(
            task_id="amend",
            words=["amend", "--again-within=10m", "--device={{ params.device or '' }}", "--since={{ params.since or '' }}"],
            pool=HEAVY_POOL,
            outlets=[JUDGEMENTS],
            execution_timeout=timedelta(hours=2),  # what is done with by then stays done with
        )
    return made


dag = build()
