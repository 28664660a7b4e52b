"""Results of the streams beside the lifecycle in a home, and rollouts, written without a JVM."""

import json
from collections.abc import Mapping
from typing import Any, Final

from fleetpulse.core.rollouts.plan import parse_rollout_plan
from fleetpulse.core.rollouts.rollout import CohortRecord, Rollout, Status
from fleetpulse.core.streams.tables import COMMANDS, SESSIONS, VITAL_ALARMS, VITALS
from fleetpulse.core.tables import Table
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.rollouts import StoredRollout
from fleetpulse.io.tables import tables

MINUTE_MS: Final = 60_000
RUN: Final = "airflow fleet_rollout manual__2026-11-28T16:47:38.236931+00:00"  # owner of a rollout, as long as a name gets
STOPPED: Final = (
    "cohort 1, observed for 2m: 4 of 4 (100.0 %) devices went offline, of the rest 0 of 36 (0.0 %): 100.0 points more, above the "
    "bound of 5.0"
)


def append(home: Home, table: Table, *rows: Mapping[str, Any]) -> None:
    """Append rows to a table of a home, as one file."""
    number = tables.landed(home, table, "test") + 1
    tables.append(home, table, tables.to_table(table, rows), "test", number)


def add_commands(home: Home, device_id: str, end_ms: int, *, markup: bool = True) -> None:
    """Add a command of each status to a device, the newest at ``end_ms``, and one command of the day before yesterday.

    Args:
        home: home to write.
        device_id: device.
        end_ms: instant of the newest one, epoch milliseconds.
        markup: whether texts have markup, which a page must escape.
    """
    led, busy = ("<script>", "busy <b>now</b>") if markup else ("on", "busy")
    steps: list[tuple[str, dict[str, Any]]] = [
        ("acknowledged", {"name": "set", "payload": {"interval": 30, "led": led}, "reported": {"interval": 60}}),
        ("rejected", {"name": "reboot", "reason": busy}),
        ("timed_out", {"name": "firmware", "payload": {"version": "2.0"}}),
        ("pending", {"name": "locate"}),
    ]
    rows = list[dict[str, Any]]()
    for number, (status, more) in enumerate(steps):
        sent_ms = end_ms - (len(steps) - 1 - number) * MINUTE_MS
        base = {"device_id": device_id, "site": "north", "command_id": f"c-{number}", "sent_at_ms": sent_ms, "name": more["name"]}
        base["payload"] = json.dumps(more["payload"]) if "payload" in more else None
        rows.append({**base, "status": "pending"})
        if status == "timed_out":
            rows.append({**base, "status": status})
        elif status != "pending":
            answer = {"answered_at_ms": sent_ms + 1_500, "latency_ms": 1_500, "reason": more.get("reason"), "answer_position": 1}
            answer["reported"] = json.dumps(more["reported"]) if "reported" in more else None
            rows.append({**base, **answer, "status": status})
    unmatched = {"device_id": device_id, "site": "north", "command_id": "c-none", "status": "unmatched", "answer_position": 2}
    rows.append({**unmatched, "answered_at_ms": end_ms - 10 * MINUTE_MS})
    append(home, COMMANDS, {**rows[0], "command_id": "c-old", "sent_at_ms": end_ms - 48 * 60 * MINUTE_MS, "payload": None})
    append(home, COMMANDS, *rows)


def add_sessions(home: Home, device_id: str, end_ms: int) -> None:
    """Add an ended session for each reason, and an open one, to a device."""
    rows = list[dict[str, Any]]()
    for number, reason in enumerate(("will", "disconnect", "birth", "silence", None)):
        started_ms = end_ms - (50 - 10 * number) * MINUTE_MS
        began = {
            "device_id": device_id, "site": "north", "gateway": "gw-1", "session": f"s-{number}", "boot": "b<1>",
            "firmware": "1.9", "started_at_ms": started_ms, "position": number, "started_by": "birth",
            "last_seen_ms": started_ms, "messages": 1,
        }  # fmt: skip
        rows.append(began)
        if reason is not None:
            ended_ms = started_ms + 9 * MINUTE_MS
            end = {
                "ended_at_ms": ended_ms,
                "ended_by": reason,
                "duration_ms": 9 * MINUTE_MS,
                "last_seen_ms": ended_ms,
                "messages": 7,
            }
            rows.append({**began, **end})
    append(home, SESSIONS, *rows)


def add_vitals(home: Home, device_id: str, end_ms: int, windows: int = 6, *, markup: bool = True) -> None:
    """Add windows of ten minutes of two metrics to a device, one with late values, and an alarm."""
    rows = [
        {
            "device_id": device_id, "metric": metric, "site": "north", "late": late, "count": 5,
            "window_start_ms": end_ms - (windows - number) * 10 * MINUTE_MS,
            "window_end_ms": end_ms - (windows - 1 - number) * 10 * MINUTE_MS,
            "closed_at_ms": end_ms, "min": low + number / 10, "max": low + 1 + number / 10, "mean": low + 0.5 + number / 10,
            "last": low + 0.7 + number / 10, "last_at_ms": end_ms - (windows - number) * 10 * MINUTE_MS + 5,
        }
        for metric, low in (("battery", 3.0), ("<i>load</i>" if markup else "load", 40.0))
        for number in range(windows)
        for late in ((False, True) if number == 2 else (False,))
    ]  # fmt: skip
    append(home, VITALS, *rows)
    alarm = {"device_id": device_id, "site": "north", "metric": "battery", "below": 3.2, "for_ms": 20 * MINUTE_MS, "last": 3.1}
    append(home, VITAL_ALARMS, {**alarm, "broken_from_ms": end_ms - 40 * MINUTE_MS, "raised_at_ms": end_ms - 20 * MINUTE_MS})


def add_rollouts(home: Home, end_ms: int, *, markup: bool = True) -> None:
    """Add a rollout that waits in its first cohort, and one that is stopped."""
    version, owner = ("2.0<b>", "ann <i>") if markup else ("2.0", "operations")
    for name, started_ms in (("pumps-2", end_ms - 20 * MINUTE_MS), ("bad-3", end_ms - 90 * MINUTE_MS)):
        plan = parse_rollout_plan({"name": name, "version": version, "scope": "device_class = 'pump'", "soak": "10m"})
        cohort = CohortRecord(1, 4, owner, started_ms, started_ms + 500)
        found = Rollout(plan, 40, owner, (cohort,))
        if name == "bad-3":
            verdict = {"result": "stopped", "reason": STOPPED, "baseline": "rest", "until_ms": started_ms + 600_000}
            stopped = CohortRecord(1, 4, f"{owner}, {RUN}", started_ms, started_ms + 500, verdict, started_ms + 120_000)
            found = Rollout(plan, 40, RUN, (stopped,), Status.STOPPED, started_ms + 120_000, owner, STOPPED)
        stored = StoredRollout(home, name)
        stored.create([(f"pump-{number}", "north") for number in range(40)])
        stored.write(found)


def add_streams(home: Home, device_id: str, end_ms: int, *, markup: bool = True) -> None:
    """Add results of all streams to a device, the newest at ``end_ms``, and rollouts."""
    add_commands(home, device_id, end_ms, markup=markup)
    add_sessions(home, device_id, end_ms)
    add_vitals(home, device_id, end_ms, markup=markup)
    add_rollouts(home, end_ms, markup=markup)
