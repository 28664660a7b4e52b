"""# Amend judgements after late messages

**When to run it**: it runs on its own after the lifecycle job has listed late messages, at most
once in 15 minutes. Run it by hand for one device, or for all late messages since an instant.

**What it changes**: replays the devices concerned, and adds and retracts transitions. Each device
whose current mode is wrong gets a correcting command. Once that command is judged, the run amends
the device again, which completes it. The stream keeps running.

**If it is red**: the command refused. The first line of the failure gives the reason.

**How to undo it**: amendments cannot be undone; they are derived from the messages. The original
judgements stay visible in `./fleet transitions --all`.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.orchestration.assets import JUDGEMENTS, LATE
from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators.verbs import FleetOperator
from fleetpulse.orchestration.pools import HEAVY_POOL

FORM = {
    "device": Param(None, type=["null", "string"], title="Device", description="empty: all devices with late messages"),
    "since": Param(None, type=["null", "string"], format="date-time", title="Since", description="empty: since the last amend"),
}


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
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
            execution_timeout=timedelta(hours=2),  # finished devices stay finished after a timeout
        )
    return made


dag = build()
