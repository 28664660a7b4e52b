"""Airflow assets for the Delta tables, and the metadata of their events.

Rule: an asset has the name of its table. The metadata (version, rows, progress of the job) is read
from the table's log and the checkpoint, without Spark.
"""

import logging
from pathlib import Path
from typing import Any, Final

from airflow.sdk import Asset, AssetWatcher

from fleetpulse.core.rows import ALERTS as ALERTS_BELOW
from fleetpulse.io.delta.log import holds_table
from fleetpulse.orchestration.config import CONFIG
from fleetpulse.orchestration.triggers import AlertWatch, DeltaLogWatch, judged_of

_LOG: Final = logging.getLogger(__name__)
GROUP: Final = "fleet"
LATE_EVERY_S: Final = 900.0  # between two amends of late messages: the frontier advances in between
ALERTS_EVERY_S: Final = 300.0
ALERT_TOPIC: Final = f"{ALERTS_BELOW}/#"


def _table(name: str, watchers: list[AssetWatcher] | None = None) -> Asset:
    return Asset(name, uri=(CONFIG.home / "tables" / name).as_uri(), group=GROUP, watchers=watchers or [])


MESSAGES: Final = _table("messages")
JUDGEMENTS: Final = _table("judgements")
DEVICE_SNAPSHOTS: Final = _table("device_snapshots")
DEVICE_CURRENT: Final = _table("device_current")
MODE_HOURLY_SITE: Final = _table("mode_hourly_site")
QUARANTINE: Final = _table("quarantine")
COVERAGE: Final = _table("coverage")
GATEWAYS: Final = _table("gateways")
DEVICES: Final = _table("devices")
QUALITY_RESULTS: Final = _table("quality_results")
QUALITY_FAILURES: Final = _table("quality_failures")
STREAM_HEALTH: Final = _table("stream_health")
AUDIT: Final = _table("audit")
VITALS: Final = _table("vitals")
SESSIONS: Final = _table("sessions")
COMMANDS: Final = _table("commands")
VITAL_ALARMS: Final = _table("vital_alarms")
LATE: Final = Asset(
    "late_events",
    uri=(CONFIG.home / "tables" / "judgements" / "kind=late").as_uri(),
    group=GROUP,
    watchers=[
        AssetWatcher(
            name="late_events_log",
            trigger=DeltaLogWatch(
                table=str(CONFIG.home / "tables" / "judgements"),
                notes=str(CONFIG.data_folder),
                name="late_events",
                home=str(CONFIG.home),
                part="kind=late",
                least_s=LATE_EVERY_S,
            ),
        )
    ],
)
ALERTS: Final = Asset(
    "alerts",
    uri=f"x-mqtt:{ALERTS_BELOW}",
    group=GROUP,
    watchers=[
        AssetWatcher(name="alerts_topic", trigger=AlertWatch(home=str(CONFIG.home), topic=ALERT_TOPIC, least_s=ALERTS_EVERY_S))
    ],
)


def facts_of(home: Path, name: str) -> dict[str, Any]:
    """Return the event metadata of a table, without parts that cannot be read.

    Returns:
        ``version`` and ``rows`` of the table, and ``batch`` and ``received_at_ms`` of the lifecycle
        job. The job has judged up to ``received_at_ms`` (epoch milliseconds).
    """
    found: dict[str, Any] = {}
    path = home / "tables" / name
    try:
        if holds_table(path):
            from deltalake import DeltaTable

            table = DeltaTable(str(path))
            found |= {"version": table.version(), "rows": sum(table.get_add_actions()["num_records"].to_pylist())}
        found |= judged_of(home)
    except Exception as error:  # noqa: BLE001 - the verb has succeeded: missing metadata must not fail the task
        _LOG.warning("cannot read the event metadata of table %s: %s", name, error)
    return found
