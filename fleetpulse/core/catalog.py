"""Catalog: all Delta tables of a home, and the SQL views of its judgements."""

from dataclasses import dataclass
from typing import Final

from fleetpulse.core.streams.tables import COMMANDS, SESSIONS, VITAL_ALARMS, VITALS
from fleetpulse.core.tables import (
    AUDIT,
    COVERAGE,
    DEVICE_CURRENT,
    DEVICE_SNAPSHOTS,
    DEVICES,
    GATEWAYS,
    JUDGEMENTS,
    MESSAGES,
    MODE_HOURLY_SITE,
    QUALITY_FAILURES,
    QUALITY_RESULTS,
    QUARANTINE,
    STREAM_HEALTH,
)

TABLES: Final = (
    MESSAGES, QUARANTINE, COVERAGE, DEVICES, GATEWAYS, JUDGEMENTS, STREAM_HEALTH, DEVICE_SNAPSHOTS, DEVICE_CURRENT,
    MODE_HOURLY_SITE, QUALITY_RESULTS, QUALITY_FAILURES, AUDIT, COMMANDS, VITALS, VITAL_ALARMS, SESSIONS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class View:
    """SQL view of judgements.

    Attributes:
        name: name of the view.
        meaning: description of a row.
        sql: query of the view; it may read an earlier view.
    """

    name: str
    meaning: str
    sql: str


def _of_kind(name: str, kind: str) -> View:
    return View(name, f"kind {kind}", f"SELECT * FROM judgements WHERE kind = '{kind}'")


def transitions_in(judgements: str) -> str:
    """Return SQL that selects the effective transitions, after amendments.

    Column ``never_seen`` marks transitions to offline of devices that were never heard.

    Args:
        judgements: name of the table, or a query in parentheses that selects from it.
    """
    return f"""
        SELECT *, to_mode = 'offline' AND last_seen IS NULL AS never_seen FROM (
        SELECT * FROM (SELECT * FROM {judgements} WHERE kind = 'transition') AS judged
        ANTI JOIN (SELECT * FROM {judgements} WHERE kind = 'retract' AND takes_back IS NULL) AS retracted
        USING (device_id, life, transition_no)
        UNION ALL BY NAME
        SELECT * FROM (SELECT * FROM {judgements} WHERE kind = 'add') AS added
        ANTI JOIN (SELECT device_id, takes_back AS amendment_no FROM {judgements} WHERE kind = 'retract') AS retracted
        USING (device_id, amendment_no))
    """


VIEWS: Final = (
    View(
        "transitions",
        "effective transitions: kinds transition and add, without those that were retracted",
        transitions_in("judgements"),
    ),
    _of_kind("judged_transitions", "transition"),
    _of_kind("late_events", "late"),
    _of_kind("clock_faults", "clock"),
    _of_kind("identity_conflicts", "identity_conflict"),
    _of_kind("duplicates", "duplicate"),
    _of_kind("refusals", "refused"),
)
