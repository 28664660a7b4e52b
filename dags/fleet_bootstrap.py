"""# Bootstrap the state from a snapshot

**When to run it**: to return to the state of a snapshot, or to continue with a subset of the
devices. The form takes a snapshot's version or an instant (neither: the newest snapshot), and a
filter such as `site = 'north'`. If the variable `FLEET_BOOTSTRAP_SCHEDULE` (a cron line) is set,
the DAG also runs on that schedule from the newest snapshot. Such a run is a rehearsal with all
checks.

**What it changes**: plans. If the plan drops devices, another person than you must approve it; the
question has their number. It then stops the stream, creates a new generation, checks it (the gate),
switches to it, starts the stream, and waits until it commits. Messages received meanwhile are
judged afterwards.

**If it is red**: the change failed. The first line of `outcome` gives the reason. Its last line
reports the recovery: the new generation was discarded or rolled back, and the stream was started
again.

**How to undo it**: stop the stream and run `./fleet state rollback`, or run this form with an older
version. After a run with a filter, only the rollback works. It restores the excluded devices as
they were, and replays their messages up to the present without emitting judgements. Judgements
emitted about them in between remain.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.core.operations.device_filter import MAX_FILTER
from fleetpulse.orchestration.config import CONFIG
from fleetpulse.orchestration.dag_factory import change_state, fleet_dag

FORM = {
    "version": Param(
        None, type=["null", "integer"], minimum=0, title="Version", description="as listed by `./fleet state snapshots`"
    ),
    "at": Param(None, type=["null", "string"], format="date-time", title="At", description="the newest snapshot at this instant"),
    "only": Param(
        None,
        type=["null", "string"],
        maxLength=MAX_FILTER,
        title="Only",
        description="filter that selects devices by columns of the snapshot: site = 'north' AND mode IN ('online', 'degraded')",
    ),
}


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
    with fleet_dag(
        "fleet_bootstrap",
        __doc__,
        schedule=CONFIG.bootstrap_schedule,
        within=timedelta(hours=24),
        tags=["state"],
        params=FORM,
        alarmed=alarmed,
    ) as made:
        change_state(
            [
                "state",
                "bootstrap",
                "--version={{ '' if params.version is none else params.version }}",
                "--at={{ params.at or '' }}",
                "--only={{ params.only or '' }}",
            ],
            question="Bootstrap the state?",
            bootstraps=True,
        )
    return made


dag = build()
