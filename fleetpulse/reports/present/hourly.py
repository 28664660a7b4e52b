"""Numbers of devices by hour, site, class and mode, as differences: the table `mode_hourly_site`.

Rule 1: the number of devices at the end of an hour is the sum of the differences up to that hour. It is that
of `time_travel.fleet` at that instant, with the present frontier: a device counts for the site and class of
its newest transition, or of its registration, also after it was forgotten.
Rule 2: the order of a device's transitions is that of their event times, then of their numbers. So an
amendment changes the hours that it touches, and no others.
Rule 3: the table is written together with `device_current`, and its footer names the same versions. New
transitions are added to the differences of the kept mode. For a device that is read anew (see `fold`), the
differences of its earlier rows are subtracted, and those of all its rows are added.
Rule 4: if the table does not include the versions of `device_current`, such as after a maintenance that was
killed between both, it is ignored, and written again from all rows.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from fleetpulse.core.catalog import transitions_in
from fleetpulse.core.judgements import CHANGES, JudgementKind
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.policy import DEFAULT_CLASS
from fleetpulse.core.tables import DEVICES, JUDGEMENTS, MODE_HOURLY_SITE, literals
from fleetpulse.core.times import HOUR_MS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.history.time_travel import only
from fleetpulse.reports.present import fold
from fleetpulse.reports.present.parts import Limits
from fleetpulse.reports.present.replaced import read_file, replace_file

if TYPE_CHECKING:
    from fleetpulse.reports.present.kept import Position, Present

FORM: Final = 1  # version of the footer's form; a table with another one is not read
_FOOTER: Final = "fleetpulse.hourly"
_KEY: Final = "hour_ms, site, device_class, mode"
_CHANGES: Final = literals(CHANGES)
_KEPT: Final = f"SELECT epoch_ms(hour) AS hour_ms, site, device_class, mode, devices_delta FROM {MODE_HOURLY_SITE.name}"
_EVERY: Final = ("every_judgement", "every_entry")  # views of all rows of judgements and of the registry
_ALL, _BEFORE = "hourly_all", "hourly_before"  # tables with all rows of the devices to read anew, and the earlier ones
_SAME_ROW: Final = " AND ".join(
    f"judged.{name} IS NOT DISTINCT FROM new_judgements.{name}"
    for name in ("kind", "life", "transition_no", "amendment_no", "event_time", "received_at")
)
_SAME_ENTRY: Final = " AND ".join(
    f"entry.{name} IS NOT DISTINCT FROM new_devices.{name}" for name in ("effective_from", "received_at", "op")
)


def differences_sql(limits: Limits, judgements: str = "judgements", devices: str = "devices", among: str = "") -> str:
    """Return SQL for the differences of all rows: the definition, with the columns `_KEY` and ``devices_delta``.

    Args:
        limits: frontier; an entry of the registry after it is not in force.
        judgements: table of judgements, or a query in parentheses.
        devices: table of registry entries, or a query in parentheses.
        among: table with the ids of the wanted devices; empty: all devices.
    """
    return _summed(_steps(_states(limits, judgements, devices, among)))


def _states(limits: Limits, judgements: str, devices: str, among: str) -> str:
    """Return SQL for the states of devices: ``device_id``, ``since``, ``place``, and site, class and mode from then on.

    A registration begins a state if the device has no transition, or was forgotten before.
    """
    place = "(is_transition, number, received_at)"  # among the rows of an instant
    window = f"(PARTITION BY device_id ORDER BY since, {place} ROWS UNBOUNDED PRECEDING)"
    since_newest = f"(PARTITION BY device_id, newest_no ORDER BY since, {place} ROWS UNBOUNDED PRECEDING)"
    return f"""
    WITH transitions AS (
        SELECT device_id, event_time AS since, true AS is_transition, coalesce(amendment_no, transition_no) AS number,
               NULL::TIMESTAMPTZ AS received_at, site, device_class, to_mode AS mode
        FROM ({transitions_in(judgements)}) {only(among)}),
    entries AS (
        SELECT device_id, effective_from AS since, false AS is_transition, 0 AS number, received_at, site,
               nullif(device_class, '') AS device_class, '{Mode.PROVISIONED}' AS mode
        FROM {devices} {only(among)} WHERE op = 'add' AND epoch_ms(effective_from) <= {limits.frontier_ms}
        AND (device_id, effective_from, received_at) NOT IN (
            SELECT (device_id, event_time, received_at) FROM {judgements} WHERE kind = '{JudgementKind.REFUSED}'
            AND message_kind = 'registry' AND event_time IS NOT NULL AND received_at IS NOT NULL)),
    numbered AS (
        SELECT *, count(*) FILTER (is_transition) OVER {window} AS newest_no,
               last_value(CASE WHEN is_transition THEN mode END IGNORE NULLS) OVER {window} AS newest_mode
        FROM (FROM transitions UNION ALL BY NAME FROM entries))
    SELECT device_id, since, {place} AS place, site, CASE WHEN is_transition THEN device_class ELSE coalesce(
               last_value(CASE WHEN NOT is_transition THEN device_class END IGNORE NULLS) OVER {since_newest},
               '{DEFAULT_CLASS}') END AS device_class, mode
    FROM numbered WHERE is_transition OR newest_mode IS NULL OR newest_mode = '{Mode.FORGOTTEN}'
    """


def _steps(states: str) -> str:
    """Return SQL for the differences of states: one more of each state, and one less of the state before it.

    Args:
        states: SQL with ``device_id``, ``since`` (null for the state before the others), ``place``, site, class and mode.
    """
    since_ms = "epoch_ms(since)"
    return f"""
    WITH stepped AS (
        SELECT *, {since_ms} - ({since_ms} % {HOUR_MS} + {HOUR_MS}) % {HOUR_MS} AS hour_ms,
               lag({{'site': site, 'device_class': device_class, 'mode': mode}}) OVER in_order AS before
        FROM ({states}) WINDOW in_order AS (PARTITION BY device_id ORDER BY since NULLS FIRST, place))
    SELECT {_KEY}, 1 AS devices_delta FROM stepped WHERE since IS NOT NULL
    UNION ALL
    SELECT hour_ms, before.site, before.device_class, before.mode, -1 FROM stepped WHERE since IS NOT NULL AND before IS NOT NULL
    """


def _summed(differences: str) -> str:
    total = "sum(devices_delta)::BIGINT"
    return f"SELECT {_KEY}, {total} AS devices_delta FROM ({differences}) GROUP BY {_KEY} HAVING {total} != 0"


def total_sql(home: Home, present: "Present") -> str:
    """Return SQL for the differences up to the present, in the columns `_KEY` and ``devices_delta``.

    Args:
        home: home to read.
        present: facts of the home's devices.
    """
    if present.position is None:
        return differences_sql(present.limits)
    if is_kept(home, present):
        return _summed(f"FROM ({_KEPT}) UNION ALL FROM ({_newer(home, present)})")
    _open_every(home, present)
    return differences_sql(present.limits, *_EVERY)


def _open_every(home: Home, present: "Present") -> None:
    """Open all rows of the versions that the facts include; newer ones would be counted again by the next maintenance."""
    for name, table in zip(_EVERY, (JUDGEMENTS, DEVICES), strict=True):
        version = present.versions[table.name]
        files = tables.files_of_version(home, table, version) if version >= 0 else ()
        tables.open_files(present.connection, name, table, files)


def _newer(home: Home, present: "Present") -> str:
    """Return SQL for the differences that the kept facts do not include."""
    assert present.position is not None, "there are kept facts"
    present.judged()  # creates the table of the devices to read anew
    connection, before = present.connection, present.position.limits
    new = f"""
    SELECT device_id, event_time AS since, transition_no AS place, site, device_class, to_mode AS mode
    FROM new_judgements ANTI JOIN {fold.REREAD} USING (device_id) WHERE kind IN ({_CHANGES})
    """
    states = f"""
    WITH new AS ({new})
    FROM new UNION ALL BY NAME
    SELECT device_id, NULL::TIMESTAMPTZ AS since, 0 AS place, site, device_class, mode
    FROM kept SEMI JOIN new USING (device_id) WHERE mode IS NOT NULL
    """
    parts = [_steps(states)]
    if connection.execute(f"SELECT 1 FROM {fold.REREAD} LIMIT 1").fetchone():
        _open_every(home, present)
        refused = f"kind = '{JudgementKind.REFUSED}' AND message_kind = 'registry'"
        connection.execute(f"""CREATE OR REPLACE TEMP TABLE {_ALL} AS
            SELECT * FROM {_EVERY[0]} {only(fold.REREAD)} WHERE kind IN ({_CHANGES}) OR ({refused})""")
        connection.execute(f"""CREATE OR REPLACE TEMP TABLE {_BEFORE} AS
            SELECT judged.* FROM {_ALL} AS judged
            ANTI JOIN new_judgements ON judged.device_id = new_judgements.device_id AND {_SAME_ROW}""")
        entries = f"(SELECT entry.* FROM {_EVERY[1]} AS entry ANTI JOIN new_devices ON entry.device_id = new_devices.device_id"
        earlier = differences_sql(before, _BEFORE, f"{entries} AND {_SAME_ENTRY})", fold.REREAD)
        parts.append(differences_sql(present.limits, _ALL, _EVERY[1], fold.REREAD))
        parts.append(f"SELECT {_KEY}, -devices_delta AS devices_delta FROM ({earlier})")
    return " UNION ALL ".join(f"FROM ({part})" for part in parts)


def _included(versions: Mapping[str, int], commits: Mapping[str, str | None], limits: Limits) -> str:
    """Return the footer: versions of the tables that are included, and the frontier."""
    names = (JUDGEMENTS.name, DEVICES.name)
    content: dict[str, Any] = {name: [versions[name], commits[name]] for name in names}
    return json.dumps({"form": FORM, **content, "frontier_ms": limits.frontier_ms})


def is_kept(home: Home, present: "Present") -> bool:
    """Return whether the table includes the rows that the kept facts include, and open it as a view if it does.

    Args:
        home: home to read.
        present: facts of the home's devices.
    """
    position = present.position
    found = read_file(home, present.connection, MODE_HOURLY_SITE, _FOOTER)
    if position is None or found is None or found[1] != _included(position.versions, position.commits, position.limits):
        return False
    tables.open_files(present.connection, MODE_HOURLY_SITE.name, MODE_HOURLY_SITE, [found[0]])
    return True


def keep_hourly(home: Home, present: "Present", position: "Position") -> int | None:
    """Write the table with all rows that the facts include.

    Args:
        home: home to write to.
        present: facts of the home's devices.
        position: position that the facts have.

    Returns:
        Number of rows; None if another process changed the table.

    Raises:
        OSError: the disk cannot be written.
    """
    columns = "site, device_class, mode, devices_delta"
    shown = f"SELECT to_timestamp(hour_ms / 1000) AS hour, {columns} FROM ({total_sql(home, present)})"
    footer = _included(position.versions, position.commits, position.limits)
    order = "site, device_class, mode, hour"
    return replace_file(home, present.connection, MODE_HOURLY_SITE, (shown, []), order, (_FOOTER, footer))
