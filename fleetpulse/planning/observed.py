"""Measured load and resource use of a home, as input and comparison for a plan."""

import json
from pathlib import Path
from typing import Any

from fleetpulse.core.errors import FleetError
from fleetpulse.core.tables import (
    DEVICE_CURRENT,
    DEVICE_SNAPSHOTS,
    JUDGEMENTS,
    MESSAGES,
    MODE_HOURLY_SITE,
    QUARANTINE,
    STREAM_HEALTH,
)
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.checkpoints.checkpoint import committed_batches, position_after
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import query
from fleetpulse.planning.model import Fleet
from fleetpulse.planning.partition_skew import busiest
from fleetpulse.reports.present.kept import COUNT

_PLANNED = (MESSAGES, JUDGEMENTS, QUARANTINE, DEVICE_SNAPSHOTS, DEVICE_CURRENT, MODE_HOURLY_SITE, STREAM_HEALTH)


def fleet_of(home: Home, keep_ms: int | None) -> Fleet:
    """Measure the load of a home's fleet from its tables.

    Args:
        home: home to measure.
        keep_ms: retention of messages, milliseconds; None: no limit.

    Raises:
        FleetError: the home has too few messages.
    """
    figures = query(
        home,
        """SELECT count(DISTINCT device_id) AS devices, count(*) AS messages, count(*) FILTER (kind = 'error') AS errors,
           max(epoch_ms(received_at)) - min(epoch_ms(received_at)) AS span_ms, avg(length(device_id)) AS id_bytes,
           sum(coalesce(length(metrics), 0)) / count(*) AS metrics_bytes
           FROM messages WHERE origin IN ('mqtt', 'replay') AND kind IN ('heartbeat', 'telemetry', 'error', 'birth')""",
        tables=[MESSAGES.name],
    )[0]
    if figures["messages"] < 100 or not figures["span_ms"]:
        raise FleetError(
            f'"{home.path}" has too few messages for a plan; got {figures["messages"]}; let it run longer, or omit --home',
            code="messages-too-few",
        )
    kinds = {row["kind"]: row["n"] for row in query(home, f"SELECT kind, {COUNT} AS n FROM judgements GROUP BY kind")}
    refused = query(home, "SELECT count(*) AS n FROM quarantine", tables=[QUARANTINE.name])[0]["n"]
    devices, messages, span_ms = figures["devices"], figures["messages"], figures["span_ms"]
    copies = kinds.get("duplicate", 0)
    return Fleet(
        devices=devices,
        interval_ms=max(1, round(devices * span_ms / max(1, messages - copies))),
        lateness_ms=home.deployment().allowed_lateness_ms,
        error_share=figures["errors"] / messages,
        late_share=kinds.get("late", 0) / messages,
        copy_share=copies / messages,
        refused_share=refused / (messages + refused),
        changes_a_day=kinds.get("transition", 0) / devices / (span_ms / DAY_MS),
        metrics_bytes=float(figures["metrics_bytes"]),
        id_bytes=float(figures["id_bytes"]),
        keep_days=None if keep_ms is None else keep_ms / DAY_MS,
    )


def measured_use(home: Home) -> dict[str, Any]:
    """Return the present resource use of a home, by fields of `CapacityPlan`.

    Values that are not known yet are missing.
    """
    found: dict[str, Any] = {
        "storage_bytes": {
            **{table.name: _size(home.table(table.name)) for table in _PLANNED},
            "checkpoints": _size(home.lifecycle),
        },
        "checkpoint_bytes": _size(home.checkpoint / "state"),
        "key_groups": home.key_groups(),
    }
    health = query(
        home,
        """SELECT count(*) AS n, median(batch_ms) / 1000 AS batch_s, median(checkpoint_ms) / 1000 AS checkpoint_s,
           max_by(state_bytes, began_at) AS state_bytes, max_by(devices, began_at) AS devices FROM stream_health""",
        tables=[STREAM_HEALTH.name],
    )[0]
    if health["n"]:
        found |= {name: health[name] for name in ("batch_s", "checkpoint_s", "state_bytes")}
        found["devices"] = sum(json.loads(health["devices"] or "{}").values()) or None
        found["devices_a_group"] = found["devices"] / found["key_groups"] if found["devices"] else None
    if committed_batches(home.checkpoint):
        found["partitions"] = position_after(home.checkpoint).partitions
        found["skew"] = busiest(found["key_groups"], found["partitions"])
    return found


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
