"""Notifications about failed and delayed runs, by webhook and by MQTT.

Rule 1: nothing here raises or blocks for long. If the notification of a failure cannot be sent,
Airflow still shows the failure.
Rule 2: the same reason of the same task is sent at most once an hour, ignoring figures in it. A
supervisor that runs each minute must not notify each minute. This holds per channel: a channel that
failed is tried again at the next failure.
Rule 3: a figure that is part of a name distinguishes reasons. Each run that a person triggered is
notified separately.
"""

import asyncio
import hashlib
import json
import logging
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from airflow.sdk.definitions.callback import AsyncCallback
from airflow.sdk.definitions.deadline import DeadlineAlert, DeadlineReference

from fleetpulse.core.errors import FleetError
from fleetpulse.core.rows import FAILURES
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.orchestration.config import CONFIG, OrchestrationConfig

_LOG: Final = logging.getLogger(__name__)
AGAIN_S: Final = 3_600.0
_POST_S: Final = 5.0
_ENDED: Final = ("success", "failed")  # Airflow's states of a finished run
# matches 3, 1,200, 0.5, 4m, 1h30m; but no part of a name
# (pump-2, gen-0002, "7", 2026-01-31T12:00:00Z, 10.0.0.1:1883)
_FIGURES: Final = re.compile(r"""(?<![\w./:'"-])(?:\d+(?:[.,]\d+)*(?:ms|[smhd])?)+(?![\w/'"-]|[.,:]\d)""")
_AUTOMATIC_RUNS: Final = ("scheduled__", "asset_triggered__", "backfill__")  # prefixes of runs without a person


def notify_failure(context: Mapping[str, Any]) -> None:
    """Notify about a failed task; a callback for Airflow."""
    try:
        ti = context["ti"]
        error = context.get("exception")
        reason = "no reason given; see the log of the task" if error is None else str(error).strip() or repr(error)
        notify(CONFIG, {"dag": ti.dag_id, "run": ti.run_id, "task": ti.task_id, "reason": reason})
    except Exception as error:  # noqa: BLE001 - rule 1
        _LOG.warning("cannot notify about a failed task: %r", error)


async def notify_missed_deadline(dag_id: str, within: str, context: Any = None) -> None:
    """Notify about a run that missed its deadline; the callback of a deadline.

    Airflow drops the deadline of a run that succeeds, but not of one that failed. A finished run is
    ignored here, because its failure has been reported.
    """
    run_of = context.get("dag_run") if isinstance(context, dict) else None
    seen = run_of if isinstance(run_of, dict) else {name: getattr(run_of, name, "") for name in ("run_id", "state")}
    if str(seen.get("state", "")) in _ENDED:
        return
    run = str(seen.get("dag_run_id") or seen.get("run_id") or "")
    failure = {"dag": dag_id, "run": run, "task": "", "reason": f"the run did not end within its deadline of {within}"}
    await asyncio.to_thread(notify, CONFIG, failure)


def deadline(dag_id: str, within: timedelta) -> DeadlineAlert:
    """Return the deadline of a DAG's runs, counted from when a run is queued."""
    return DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=within,
        callback=AsyncCallback(notify_missed_deadline, kwargs={"dag_id": dag_id, "within": str(within)}),
    )


def notify(place: OrchestrationConfig, failure: dict[str, str]) -> list[str]:
    """Send a failure to each channel that has not sent it within the last hour.

    Args:
        place: configuration of the installation.
        failure: ``dag``, ``run``, ``task`` and ``reason``; only the first line of the reason is
            sent.

    Returns:
        Names of the channels that worked.
    """
    worked: list[str] = []
    try:
        note, mark = place.data_folder / "failures-notified.json", _mark(failure)
        before = _recent_notifications(note)
        payload = json.dumps({**failure, "reason": failure["reason"].splitlines()[0][:2_000], "at_ms": wall_clock_ms()})
        for name, way in (("webhook", _post), ("topic", _publish)):
            if f"{name} {mark}" in before:
                continue
            try:
                if way(place, failure["dag"], payload.encode()):
                    worked.append(name)
            except Exception as error:  # noqa: BLE001 - rule 1: the other channel may work
                why = str(error) if isinstance(error, FleetError) else type(error).__name__  # a text may have the secret URL
                _LOG.warning("cannot notify about a failure of %s by %s: %s", failure["dag"], name, why)
        if worked:
            _remember(note, [f"{name} {mark}" for name in worked])
    except Exception as error:  # noqa: BLE001 - rule 1
        _LOG.warning("cannot notify about a failure: %r", error)
    return worked


def _post(place: OrchestrationConfig, _: str, payload: bytes) -> bool:
    if place.webhook is None:
        return False
    if not place.webhook.startswith(("http://", "https://")):
        raise FleetError("FLEET_WEBHOOK must start with http:// or https://; correct it", code="webhook-invalid")
    request = urllib.request.Request(place.webhook, payload, {"Content-Type": "application/json"}, method="POST")  # noqa: S310 - checked above
    with urllib.request.urlopen(request, timeout=_POST_S):  # noqa: S310 - as above
        return True


def _publish(place: OrchestrationConfig, dag_id: str, payload: bytes) -> bool:
    from fleetpulse.io.home.home import Home
    from fleetpulse.io.mqtt.address import load_address
    from fleetpulse.io.mqtt.alerts import send

    status = Home(place.home).run("broker")
    if not status.exists():
        return False
    name = f"fleet-failure-{time.time_ns() % 10**9}"  # unique: two processes may notify at once
    send(load_address(status), name, f"{FAILURES}/{dag_id}", payload)
    return True


def _mark(failure: dict[str, str]) -> str:
    """Return a key that identifies a failure, without durations, counts and shares.

    These figures change from one check to the next.
    """
    text = _FIGURES.sub("", failure["reason"].splitlines()[0])
    run = "" if failure["run"].startswith(_AUTOMATIC_RUNS) else failure["run"]
    return hashlib.sha256("\n".join((failure["dag"], failure["task"], run, text)).encode()).hexdigest()[:16]


def _recent_notifications(note: Path) -> dict[str, float]:
    """Return the last hour's notifications: ``<channel> <mark>`` to epoch seconds."""
    try:
        known = {one: float(at_s) for one, at_s in json.loads(note.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}
    return {one: at_s for one, at_s in known.items() if time.time() - at_s < AGAIN_S}


def _remember(note: Path, marks: Sequence[str]) -> None:
    """Record notifications as sent now, in the format that `_recent_notifications` returns."""
    note.parent.mkdir(parents=True, exist_ok=True)
    fresh = note.with_name(f".{note.name}.{time.time_ns()}")
    fresh.write_text(json.dumps({**_recent_notifications(note), **dict.fromkeys(marks, time.time())}))
    fresh.replace(note)
