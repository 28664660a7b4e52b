"""# What would another policy have said?

**When**: before a policy is changed. The form takes the policy as TOML, and a range (empty: all that is kept). Tick `spark` for a
history of many millions of rows: it is judged where the connection `spark_default` says.

**What it does**: judges what was received under both policies and compares. Nothing is changed. The figures are the result of the
task `backtest`, which is linked with a page of charts (*Report*); with `spark` that page is the result.

**Red** means: the policy has faults, or the range is not kept; the first line says which.

**To undo**: nothing.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param, chain, task

from fleetpulse.orchestration.backtest_operators import Backtest, BacktestOnSpark, WritePolicy
from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.pools import HEAVY_POOL

FORM = {
    "policy": Param(
        '[rules]\ntimeout = "10m"\n', type="string", format="multiline", title="Policy", description="TOML, see docs/policy.md"
    ),
    "from": Param(None, type=["null", "string"], format="date-time", title="From", description="empty: all that is kept"),
    "to": Param(None, type=["null", "string"], format="date-time", title="To", description="empty: all that can be judged"),
    "spark": Param(False, type="boolean", title="Spark", description="judge it there; else in a process of this machine"),
}


@task.branch
def choose(params: dict[str, object] | None = None) -> str:
    """Return the task that judges."""
    return "backtest_on_spark" if params and params["spark"] else "backtest"


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag(
        "fleet_backtest", __doc__, within=timedelta(hours=3), tags=["judgements"], params=FORM, alarmed=alarmed
    ) as made:
        chain(
            WritePolicy(task_id="write_policy"),
            choose(),
            [
                Backtest(task_id="backtest", pool=HEAVY_POOL, execution_timeout=timedelta(hours=2)),
                BacktestOnSpark(task_id="backtest_on_spark", pool=HEAVY_POOL, execution_timeout=timedelta(hours=2)),
            ],
        )
    return made


dag = build()
