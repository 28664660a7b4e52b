"""Audit records of approvals in Airflow.

This module does not depend on Airflow.

Rule: if the record cannot be written, the answer still counts, and a warning is logged.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fleetpulse.core.errors import FleetError
from fleetpulse.core.operations.audit import Phase, recorded_arguments
from fleetpulse.io.home.home import Home

_LOG: Final = logging.getLogger(__name__)


def record_answer(home: Path, run: Any, event: Mapping[str, Any], task_id: str, objection: FleetError | None = None) -> None:
    """Write the audit record of an answer, or of a request without an answer.

    Args:
        home: folder of the home.
        run: DAG run with ``dag_id``, ``run_id`` and ``triggering_user_name``; None if unknown.
        event: event of Airflow's approval operator.
        task_id: id of the approval task.
        objection: why the answer is not accepted; None if it is.
    """
    try:
        _write(Home(home), run, event, task_id, objection)
    except Exception as error:  # noqa: BLE001 - the approval must not fail because of its record
        _LOG.warning('the audit record of "%s" cannot be written to the home "%s": %s', task_id, home, error)


def _write(home: Home, run: Any, event: Mapping[str, Any], task_id: str, objection: FleetError | None) -> None:
    from fleetpulse.io.tables.audit import AuditedAction, AuditTable

    if not home.exists():
        return
    answer = " ".join(event.get("chosen_options") or ())
    user = event.get("responded_by_user") or {}
    name = user.get("name") or user.get("id")
    of_run = "" if run is None else f"{run.dag_id} {run.run_id}"
    triggered_by = None if run is None else run.triggering_user_name
    arguments = recorded_arguments({"task": task_id, "answer": answer, "triggered_by": triggered_by})
    result = "ok"
    if "error" in event:
        result = "approval-timeout" if event.get("error_type") == "timeout" else "approval-invalid"
    if objection is not None:
        result = objection.code
    asked_by = ", ".join(part for part in (name, of_run) if part) or None
    AuditTable(home).write(AuditedAction.of_this_process("approval", arguments, asked_by), Phase.FINISHED, result)
