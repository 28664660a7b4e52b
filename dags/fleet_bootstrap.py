"""# Begin the state anew from a snapshot

**When**: to go back to what a snapshot says, or to go on with some of the devices only. The form asks for a snapshot's version or
an instant (neither: the newest), and for a condition such as `site = 'north'`. With the variable `FLEET_BOOTSTRAP_SCHEDULE` (a
cron line) it runs by itself as well, from the newest snapshot: a rehearsal of the real thing, with the real thing's checks.

**What it changes**: plans, stops the stream, makes a new generation, checks it (the gate), gives it the work, starts the
stream and watches it commit. What comes in meanwhile waits and is judged afterwards.

**Red** means: it did not come to that. The first line of `outcome` gives the reason, its last says what was undone: the new
generation was discarded, or rolled back from, and the stream started again.

**To undo** a run that went well: `./fleet state rollback` while the stream is stopped, or this form with an older version. With a
condition only the former undoes it: the devices left out come back as they were then, and are judged on, silently, to the
present; what was said of them meanwhile stays said.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.orchestration.config import PLACE
from fleetpulse.orchestration.dag_factory import change_state, fleet_dag

FORM = {
    "version": Param(
        None, type=["null", "integer"], minimum=0, title="Version", description="of the snapshot; `./fleet state snapshots`"
    ),
    "at": Param(None, type=["null", "string"], format="date-time", title="At", description="the newest snapshot of this instant"),
    "only": Param(None, type=["null", "string"], title="Only", description="a condition on a device, such as site = 'north'"),
}


def build(*, alarmed: bool = True) -> DAG:
    """Return the DAG."""
    with fleet_dag(
        "fleet_bootstrap",
        __doc__,
        schedule=PLACE.bootstrap_schedule,
        within=timedelta(hours=3),
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
            question=None,
        )
    return made


dag = build()
