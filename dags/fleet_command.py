"""# Give a command to devices

**When to run it**: to announce maintenance or an update, to release devices, or to take them out of
service. The operations page starts it for one device, or for all devices that match the filter of its
list.

**What it changes**: every device that matches gets the command, as by `./fleet device bulk`. The run
counts the devices again. If their number differs from the expected one by more than 1 % or 10 devices,
no device gets it. The stream keeps running.

**If it is red**: the command refused, and no device got it. The first line of the failure gives the
reason, such as another number of devices.

**How to undo it**: the command release ends an update. Maintenance ends at its announced instant. A
release cannot be undone. `./fleet device add` puts a decommissioned device into service again.
"""

from datetime import timedelta

from airflow.sdk import DAG, Param

from fleetpulse.orchestration.dag_factory import fleet_dag
from fleetpulse.orchestration.operators.verbs import FleetOperator
from fleetpulse.orchestration.pools import HEAVY_POOL

TEXT = ["null", "string"]
FILTERS = {  # option -> title; an empty field is no condition
    "device": "Device",
    "q": "Text within the id",
    "mode": "Modes, comma-separated",
    "site": "Site",
    "class": "Class",
    "gateway": "Gateway",
    "trigger": "Triggers, comma-separated",
    "clock": "Classes of the clock, comma-separated",
    "never_seen": "true: only devices that were never heard",
}
FORM = {
    "action": Param("release", type="string", enum=["maintain", "update", "release", "decommission"], title="Command"),
    "expect": Param(None, type=TEXT, title="Expected number of devices", description="the run refuses another number"),
    "for": Param(None, type=TEXT, title="Duration", description="of maintenance or an update, such as 2h"),
    **{name: Param(None, type=TEXT, title=title, description="empty: any") for name, title in FILTERS.items()},
}


def build(*, alarmed: bool = True) -> DAG:
    """Build the DAG."""
    with fleet_dag(
        "fleet_command", __doc__, schedule=None, within=timedelta(hours=3), tags=["devices"], params=FORM, alarmed=alarmed
    ) as made:
        options = [f"--{name.replace('_', '-')}={{{{ params['{name}'] or '' }}}}" for name in ("expect", "for", *FILTERS)]
        FleetOperator(
            task_id="command",
            words=["device", "bulk", "{{ params.action }}", *options],
            pool=HEAVY_POOL,
            execution_timeout=timedelta(minutes=30),
        )
    return made


dag = build()
