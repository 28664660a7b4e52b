"""# What would another policy have said?

**When**: before a policy is changed. The form takes the policy as TOML, and a range (empty: all that is kept).

**What it does**: judges what was received under both policies and compares. Nothing is changed. The figures are the result of the
task `backtest`; the page with charts lies in the home, below `airflow/fleet/backtests`, under the name of the run.

**Red** means: the policy has faults, or the range is not kept; the first line says which.

**To undo**: nothing.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.orchestration.backtests import Backtest
from fleetpulse.orchestration.factory import fleet_dag

FORM = {
    "policy": Param(
        '[rules]\ntimeout = "10m"\n', type="string", format="multiline", title="Policy", description="TOML, see docs/policy.md"
    ),
    "from": Param(None, type=["null", "string"], format="date-time", title="From", description="empty: all that is kept"),
    "to": Param(None, type=["null", "string"], format="date-time", title="To", description="empty: all that can be judged"),
}


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag(
        "fleet_backtest", __doc__, within=timedelta(hours=3), tags=["judgements"], params=FORM, alarmed=alarmed
    ) as made:
        Backtest(task_id="backtest", execution_timeout=timedelta(hours=2))
    return made


dag = build()
