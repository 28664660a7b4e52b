"""# Backtest a policy on recorded history

**When to run it**: before you change a policy. Enter the policy as TOML and a time range in the
form; without a range, all retained history is used. Tick `spark` for a history of many millions of
rows: it then runs on the master that the connection `spark_default` names.

**What it changes**: nothing. It judges the received messages under the current and the new policy,
and compares the verdicts. The figures are the result of the task `backtest`, which links to a page
of charts (*Report*). With `spark`, the page alone is the result.

**If it is red**: the policy has faults, or the range is not retained. The first line of the failure
shows which.

**How to undo it**: there is nothing to undo.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param, chain, task

from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators.backtests import Backtest, BacktestOnSpark, WritePolicy
from fleetpulse.orchestration.pools import HEAVY_POOL

FORM = {
    "policy": Param(
        '[rules]\ntimeout = "10m"\n',
        type="string",
        format="multiline",
        title="Policy",
        description="TOML, see docs/reference/policy.md",
    ),
    "from": Param(None, type=["null", "string"], format="date-time", title="From", description="empty: from the retention floor"),
    "to": Param(None, type=["null", "string"], format="date-time", title="To", description="empty: the frontier of landed rows"),
    "spark": Param(False, type="boolean", title="Spark", description="run it on Spark; otherwise in a process on this machine"),
}


@task.branch
def choose(params: dict[str, object] | None = None) -> str:
    """Return the id of the task that runs the backtest."""
    return "backtest_on_spark" if params and params["spark"] else "backtest"


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
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
