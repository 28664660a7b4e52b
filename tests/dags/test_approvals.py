"""Attacks on approvals: the user who triggers a run also approves it, or goes around the approval."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleetpulse.core.operations.dropped_devices import describe_dropped
from fleetpulse.io.home.home import Home
from fleetpulse.orchestration.approvals import RunApproval
from fleetpulse.reports.operations.audit import audited_actions
from tests.support.airflow import OF_AIRFLOW, StubCommand, built
from tests.support.airflow_tasks import Context, place

pytestmark = OF_AIRFLOW
ANOTHER_MANAGER = "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a home with an audit table."""
    found = Home(tmp_path / "home")
    found.prepare(None)
    return found


def context_of(user: str, **params: Any) -> Context:
    """Return the context of a task in a run that a user triggered."""
    context = Context()
    run = SimpleNamespace(
        dag_id="fleet_migrate",
        run_id="manual__1",
        run_type="manual",
        triggering_user_name=user,
        clear_number=0,
        start_date=datetime(2026, 11, 27, tzinfo=UTC),
    )
    context.update(dag_run=run, params=params)
    return context


def answer_of(user: str, *options: str) -> dict[str, Any]:
    """Return the event of an answer."""
    event = {"chosen_options": list(options), "params_input": {}, "responded_at": datetime.now(UTC)}
    return {**event, "responded_by_user": {"id": user, "name": user}}


def approval_in(home: Home, *, if_dropping: bool = False, **settings: Any) -> Any:
    from fleetpulse.orchestration.sensors import Approval

    here = place(home.path, **settings)
    return Approval(
        task_id="approve", question="Migrate?", if_dropping=if_dropping, response_timeout=timedelta(hours=12), place=here
    )


@pytest.mark.parametrize("manager", ["", ANOTHER_MANAGER])
def test_the_user_who_triggered_a_run_cannot_approve_it(home: Home, monkeypatch: pytest.MonkeyPatch, manager: str) -> None:
    """The setting for self-approval has no effect with an auth manager of personal accounts."""
    from airflow.sdk.exceptions import AirflowFailException

    if manager:
        monkeypatch.setenv("AIRFLOW__CORE__AUTH_MANAGER", manager)
    task, context = approval_in(home, self_approval=bool(manager)), context_of("ada")
    approval = RunApproval(task.place, context)
    approval.save_plan("the plan")
    with pytest.raises(AirflowFailException, match=r'^"ada" triggered this run and cannot approve it'):
        task.execute_complete(context, answer_of("ada", "Approve"))
    assert str(context.left["refused"]).startswith('"ada" triggered this run')
    with pytest.raises(Exception, match="has no approval"):
        approval.require()
    task.execute_complete(context, answer_of("bob", "Approve"))
    approval.require()
    assert [one["result"] for one in audited_actions(home)] == ["approval-own-run", "ok"]


@pytest.mark.parametrize("repeated", ["run", "plan", "approve"])
def test_a_run_that_a_user_clears_is_no_request_of_the_user_who_triggered_it(home: Home, repeated: str) -> None:
    """A clear that leaves the state of the run as it is only raises the tries of the cleared tasks."""
    from airflow.sdk.exceptions import AirflowFailException

    task, context = approval_in(home), context_of("ada")
    context["dag_run"].clear_number = int(repeated == "run")
    context.max_tries = int(repeated == "plan")
    RunApproval(task.place, context).save_plan("the plan")
    context.max_tries = int(repeated == "approve")
    for attempt in (lambda: task.execute(context), lambda: task.execute_complete(context, answer_of("bob", "Approve"))):
        with pytest.raises(AirflowFailException, match=r"was cleared, .* trigger a new run$"):
            attempt()
    assert [one["result"] for one in audited_actions(home)] == ["approval-run-cleared"]
    with pytest.raises(Exception, match="has no approval"):
        RunApproval(task.place, context).require()


def test_one_person_can_approve_on_an_installation_for_one_person(home: Home) -> None:
    task, context = approval_in(home, self_approval=True), context_of("admin")
    RunApproval(task.place, context).save_plan("the plan")
    task.execute_complete(context, answer_of("admin", "Approve"))
    RunApproval(task.place, context).require()


@pytest.mark.parametrize(
    ("plan", "parameters", "asked"),
    [
        (describe_dropped(0), {"only": None}, None),
        (describe_dropped(12), {"only": "site = 'a'"}, "Migrate? 12 devices are dropped."),
        ("it tells nothing", {"only": None}, "Migrate? An unknown number of devices are dropped."),
    ],
)
def test_a_plan_that_drops_devices_asks_the_approvers_with_their_number(
    home: Home, monkeypatch: pytest.MonkeyPatch, plan: str, parameters: dict[str, Any], asked: str | None
) -> None:
    from airflow.providers.standard.operators import hitl
    from airflow.sdk.exceptions import TaskAwaitingInput

    requests: list[dict[str, Any]] = []
    monkeypatch.setattr(hitl, "upsert_hitl_detail", lambda **request: requests.append(request))
    context = context_of("ada", **parameters)
    context.update(task_instance=SimpleNamespace(id="1"))
    task = approval_in(home, if_dropping=True, approvers=("ada", "bob"))
    RunApproval(task.place, context).save_plan(plan)
    if asked is None:
        assert task.execute(context) is None
        RunApproval(task.place, context).require()
        assert requests == []
        return
    with pytest.raises(TaskAwaitingInput):
        task.execute(context)
    [request] = requests
    assert (request["subject"], request["assigned_users"]) == (asked, [{"id": "bob", "name": "bob"}])
    assert "Triggered by: ada" in request["body"] and plan in request["body"] and '"only":' in request["body"]


def test_an_approval_that_is_marked_as_successful_starts_nothing(
    stub: StubCommand, run_dag: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run_dag(built("fleet_migrate"), mark="approve")
    assert stub.calls() == ["state migrate --dry-run --once-stopped"]
    assert (ended["approve"], ended["stop"], ended[""]) == ("success", "failed", "failed")
    output = capsys.readouterr()
    assert "has no approval: nobody answered" in output.out + output.err
    assert list((stub.home / "airflow" / "fleet" / "approvals").iterdir()) == [], "an approval ends with its run"


def test_each_step_that_changes_the_state_needs_the_approval() -> None:
    tasks = built("fleet_bootstrap").tasks
    assert [task.task_id for task in tasks if getattr(task, "approved", False)] == ["stop", "act", "switch"]
