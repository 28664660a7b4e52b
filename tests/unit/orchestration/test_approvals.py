"""Approvals: permitted approvers, and an approval that is valid for one plan and its parameters only."""

from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.orchestration.approvals import RunApproval, find_objection, forget_approvals, permitted_approvers
from fleetpulse.orchestration.config import OrchestrationConfig
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
PLACE = OrchestrationConfig("fleet", Path("/home"))
STARTED = datetime(2026, 11, 27, tzinfo=UTC)
FIRST_TRY = SimpleNamespace(max_tries=2, task=SimpleNamespace(retries=2))
LISTED = replace(PLACE, approvers=("bob", "8"))


def run(user: str | None = "ada", kind: str = "manual") -> Any:
    return SimpleNamespace(
        dag_id="fleet_rescale", run_id="r", run_type=kind, triggering_user_name=user, clear_number=0, start_date=STARTED
    )


@pytest.mark.parametrize(
    ("place", "of", "name", "self_approval", "code"),
    [
        (PLACE, run(), "ada", False, "approval-own-run"),
        (PLACE, run(), "Ada ", False, "approval-own-run"),
        (PLACE, run(), "\uff21da\u00a0", False, "approval-own-run"),
        (PLACE, run("7"), "ada", False, "approval-own-run"),
        (PLACE, run(), "ada", True, None),
        (PLACE, run(), "bob", False, None),
        (PLACE, run(), "", False, "approver-unknown"),
        (PLACE, run(), "", True, "approver-unknown"),
        (PLACE, run(None), "bob", False, "approval-requester-unknown"),
        (PLACE, run(None), "bob", True, None),
        (PLACE, run(None, "scheduled"), "bob", False, None),
        (LISTED, run(), "bob", False, None),
        (LISTED, run(), "eve", False, "approver-not-listed"),
        (LISTED, run(), "\uff42ob", False, "approver-not-listed"),
        (LISTED, run(), "ada", True, "approver-not-listed"),
        (LISTED, run("bob"), "bob", False, "approval-own-run"),
        (replace(PLACE, approvers=("7",)), run("bob"), "ada", False, None),
    ],
)
def test_only_another_user_who_is_an_approver_can_approve(
    place: OrchestrationConfig, of: Any, name: str, self_approval: bool, code: str | None
) -> None:
    found = find_objection(place, of, {"id": "7", "name": name} if name else None, self_approval=self_approval, cleared=False)
    assert (None if found is None else found.code) == code


def test_the_approvers_of_a_run_are_those_who_did_not_trigger_it() -> None:
    assert permitted_approvers(PLACE, run(), self_approval=False, cleared=False) == []
    assert permitted_approvers(LISTED, run("bob"), self_approval=False, cleared=False) == ["8"]
    assert permitted_approvers(LISTED, run("bob"), self_approval=True, cleared=True) == ["bob", "8"]
    with refused("approver-none", match='"bob" triggered it'):
        permitted_approvers(replace(PLACE, approvers=("Bob",)), run("bob"), self_approval=False, cleared=False)


def test_an_approval_is_that_of_one_plan_with_its_parameters(tmp_path: Path) -> None:
    place, context = replace(PLACE, home=tmp_path), {"dag_run": run(), "ti": FIRST_TRY, "params": {"only": "site = 'a`'"}}
    approval, of_others = RunApproval(place, context), RunApproval(place, {**context, "params": {"only": None}})
    with refused("approval-plan-missing"):
        approval.require()
    approval.save_plan("3 devices")
    with refused("approval-missing"):
        approval.require()
    approval.approve("bob")
    approval.require()
    assert (approval.plan(), "`" in approval.parameters) == ("3 devices", False)
    with refused("approval-parameters-differ"):
        of_others.require()
    approval.save_plan("300 devices")
    with refused("approval-missing"):
        approval.require()
    approval.approve("bob")
    forget_approvals(place, run())
    with refused("approval-plan-missing"):
        approval.require()


def approved(tmp_path: Path, of: Any) -> RunApproval:
    """Return an approval of a run."""
    found = RunApproval(replace(PLACE, home=tmp_path), {"dag_run": of, "ti": FIRST_TRY})
    found.save_plan("3 devices")
    found.approve("bob")
    return found


@pytest.mark.parametrize(
    ("change", "undone"), [({"start_date": STARTED + timedelta(seconds=1)}, False), ({"start_date": None}, False),
                           ({"clear_number": 1}, True)],
)  # fmt: skip
def test_an_approval_is_that_of_one_execution_of_a_run(tmp_path: Path, change: dict[str, Any], undone: bool) -> None:
    """A run with the same id is another one, or was cleared; only a clear permits to undo the change."""
    of = run()
    first = approved(tmp_path, of)
    first.begin()
    first.made(7)
    vars(of).update(change)
    repeated = RunApproval(replace(PLACE, home=tmp_path), {"dag_run": of, "ti": FIRST_TRY})
    for attempt in (repeated.plan, repeated.require, repeated.begin, lambda: repeated.approve("bob"), lambda: repeated.made(8)):
        with refused("approval-run-repeated"):
            attempt()
    with nullcontext() if undone else refused("approval-run-repeated"):
        assert repeated.progress() == (True, 7)


def test_an_approval_is_valid_for_one_generation_and_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    approval = approved(tmp_path, run())
    approval.begin()
    approval.begin()  # a retry of a task that died
    with refused("approval-generation-missing"):
        approval.generation()
    approval.made(7)
    approval.require()
    with refused("approval-used"):
        approval.begin()
    later_ms = wall_clock_ms() + 24 * 3_600_000 + 60_000
    monkeypatch.setattr("fleetpulse.orchestration.approvals.wall_clock_ms", lambda: later_ms)
    with refused("approval-expired"):
        approval.require()
    assert approval.generation() == 7, "a late failure of the run is undone"


def test_the_configuration_names_approvers_and_allows_self_approval_only_in_so_many_words() -> None:
    assert (OrchestrationConfig.of({}).approvers, OrchestrationConfig.of({}).self_approval) == ((), False)
    found = OrchestrationConfig.of({"FLEET_APPROVERS": " ada, bob,", "FLEET_SELF_APPROVAL": "yes"})
    assert (found.approvers, found.self_approval) == (("ada", "bob"), True)
    assert not OrchestrationConfig.of({"FLEET_SELF_APPROVAL": "no"}).self_approval
