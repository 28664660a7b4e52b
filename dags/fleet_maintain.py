"""# Compact, prune and vacuum the home

**When to run it**: it runs every hour, except while another run changes the state. Run it by hand
when the disk fills up.

**What it changes**: compacts small files, deletes rows past their retention (the settings
`keep_...`), deletes files that no reader needs, and writes the facts of each device at present to the
table `device_current`, and the modes by hour and site to `mode_hourly_site`. The stream keeps running.
Airflow's own rows and logs are removed by `fleet_tidy`.

**If it is red**: the command refused or died. The first line of the failure gives the reason. The
next run resumes where this one stopped.

**How to undo it**: deleted rows cannot be restored. To keep more, raise the settings beforehand;
`./fleet maintain --dry-run` lists what would be deleted from the home.
"""

from datetime import timedelta

from airflow.sdk import DAG

from fleetpulse.orchestration.assets import (
    AUDIT,
    COMMANDS,
    COVERAGE,
    DEVICE_CURRENT,
    DEVICES,
    GATEWAYS,
    JUDGEMENTS,
    MESSAGES,
    MODE_HOURLY_SITE,
    QUARANTINE,
    SESSIONS,
    STREAM_HEALTH,
    VITAL_ALARMS,
    VITALS,
)
from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators.verbs import Recurring
from fleetpulse.orchestration.pools import STATE_POOL


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
    with fleet_dag(
        "fleet_maintain", __doc__, schedule="40 * * * *", within=timedelta(hours=3), tags=["tables"], alarmed=alarmed
    ) as made:
        Recurring(
            task_id="maintain",
            words=["maintain", "--json"],
            gives="rows",
            pool=STATE_POOL,
            execution_timeout=timedelta(hours=2),
            outlets=[
                MESSAGES,
                QUARANTINE,
                COVERAGE,
                DEVICES,
                GATEWAYS,
                JUDGEMENTS,
                DEVICE_CURRENT,
                MODE_HOURLY_SITE,
                STREAM_HEALTH,
                AUDIT,
                VITALS,
                SESSIONS,
                COMMANDS,
                VITAL_ALARMS,
            ],
        )
    return made


dag = build()
