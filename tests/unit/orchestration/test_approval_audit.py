"""Audit records of approvals: the responder, a missing answer, and a table that cannot be written."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from fleetpulse.core.errors import FleetError
from fleetpulse.io.home.home import Home
from fleetpulse.orchestration.approval_audit import record_answer
from fleetpulse.reports.operations.audit import audited_actions

pytestmark = pytest.mark.unit
RUN = SimpleNamespace(dag_id="fleet_migrate", run_id="manual__1", triggering_user_name="ada")
ANSWER: dict[str, Any] = {"chosen_options": ["Approve"], "responded_by_user": {"id": "7", "name": "bob"}}


def test_the_record_of_an_approval_names_the_responder_and_the_run(home: Home) -> None:
    record_answer(home.path, RUN, ANSWER, "approve")
    record_answer(home.path, RUN, {"error": "late", "error_type": "timeout"}, "approve")
    answered, late = audited_actions(home)
    assert (answered["action"], answered["asked_by"], answered["result"]) == ("approval", "bob, fleet_migrate manual__1", "ok")
    assert json.loads(answered["arguments"]) == {"task": "approve", "answer": "Approve", "triggered_by": "ada"}
    assert (late["asked_by"], late["result"]) == ("fleet_migrate manual__1", "approval-timeout")
    assert audited_actions(home, actor="bob") == [answered]


def test_the_record_of_an_approval_that_is_not_accepted_has_the_reason(home: Home) -> None:
    record_answer(home.path, RUN, ANSWER, "approve", FleetError("no", code="approval-own-run"))
    assert [one["result"] for one in audited_actions(home)] == ["approval-own-run"]


def test_an_approval_does_not_fail_without_its_record(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    (home.path / "tables").rmdir()
    with caplog.at_level(logging.WARNING):
        record_answer(home.path, RUN, ANSWER, "approve")
    assert "cannot be written" in caplog.text
