"""Runs of the other DAGs: forms and dates become arguments of the command."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from fleetpulse.paths import ROOT
from tests.support.airflow import COMMAND, OF_AIRFLOW, StubCommand, built

pytestmark = OF_AIRFLOW
RunDag = Callable[..., dict[str, str]]


def test_a_failed_check_fails_the_run_although_its_pages_are_built(
    stub: StubCommand, run_dag: RunDag, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.fail(quality_run='suite "messages": 1 row fails "conservation"')
    dag = built("fleet_quality")
    ended = run_dag(dag)
    assert {each.name for each in dag.get_task("docs").outlets} == {"quality_results", "quality_failures"}, (
        "a failed check updates its assets as well"
    )
    assert stub.calls() == ["quality run --json", "quality docs"]
    assert ended == {"": "failed", "check": "failed", "docs": "success", "outcome": "failed"}
    output = capsys.readouterr()
    assert 'AirflowFailException: check: suite "messages": 1 row fails "conservation"' in output.out + output.err


def test_filled_form_fields_become_options_and_empty_ones_are_omitted(stub: StubCommand, run_dag: RunDag) -> None:
    assert run_dag(built("fleet_amend"))[""] == "success"
    assert run_dag(built("fleet_amend"), device="pump-1")[""] == "success"
    assert stub.calls() == ["amend --again-within=10m", "amend --again-within=10m --device=pump-1"]


def test_a_value_that_ends_with_an_equals_sign_is_not_an_empty_option(stub: StubCommand, run_dag: RunDag) -> None:
    assert run_dag(built("fleet_amend"), device="YWJj=")[""] == "success"
    assert stub.calls() == ["amend --again-within=10m --device=YWJj="]


def test_a_report_waits_until_the_previous_day_is_judged(stub: StubCommand, run_dag: RunDag) -> None:
    dag = built("fleet_report")
    dag.get_task("judged").patience = timedelta(0)
    assert run_dag(dag) == {"": "failed", "judged": "failed", "report": "upstream_failed"}
    assert stub.calls() == []
    began = datetime.now(UTC)
    ended = run_dag(built("fleet_report"), mark="judged")
    days = {(at - timedelta(days=1)).date() for at in (began, datetime.now(UTC))}
    [call] = stub.calls()
    assert ended[""] == "success" and call in {f"availability --day {day} --json" for day in days}


def test_a_backtest_uses_the_policy_of_its_form(stub: StubCommand, run_dag: RunDag) -> None:
    policy = '[rules]\ntimeout = "2m"\n'
    ended = run_dag(built("fleet_backtest"), policy=policy, to="2026-01-31T12:00:00Z")
    assert ended["backtest"] == "success" and ended["backtest_on_spark"] == "skipped" and ended[""] == "success"
    (call,) = stub.calls()
    *arguments, given, page = call.split(" ")
    assert arguments == ["backtest", "--to=2026-01-31T12:00:00Z", "--json"]
    with open(given.removeprefix("--policy="), encoding="utf-8") as file:  # noqa: PTH123 - as the command does
        assert file.read() == policy
    assert page.endswith("/report.html")


def test_a_bootstrap_uses_the_values_of_its_form(stub: StubCommand, run_dag: RunDag) -> None:
    stub.fail(
        **{"state_bootstrap_--version=0_--only=site_=_'north'_--dry-run_--once-stopped": "there is no snapshot of version 0"}
    )
    ended = run_dag(built("fleet_bootstrap"), version=0, only="site = 'north'")
    assert stub.calls() == ["state bootstrap --version=0 --only=site = 'north' --dry-run --once-stopped"]
    assert ended["plan"] == "failed" and ended["stop"] == "upstream_failed" and ended[""] == "failed"


def test_a_task_that_writes_a_table_reports_its_version_and_rows(stub: StubCommand, run_dag: RunDag) -> None:
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session
    from sqlalchemy import select

    write_deltalake(str(stub.home / "tables" / "device_snapshots"), pa.table({"device_id": ["a", "b"]}))
    assert run_dag(built("fleet_snapshot"))[""] == "success"
    with create_session() as session:
        (event,) = session.scalars(select(AssetEvent).where(AssetEvent.source_dag_id == "fleet_snapshot")).all()
        assert (event.asset.name, event.extra) == ("device_snapshots", {"version": 0, "rows": 2})
    assert stub.calls() == ["state snapshot --gate --json"]


def test_a_verb_that_exceeds_its_timeout_fails_without_a_retry(stub: StubCommand, run_dag: RunDag) -> None:
    COMMAND.write_text(f"#!/bin/sh\necho called >> {stub.place}/slow\nsleep 300\n")
    dag = built("fleet_maintain")
    dag.get_task("maintain").execution_timeout = timedelta(seconds=1)
    assert run_dag(dag) == {"": "failed", "maintain": "failed"}
    assert (stub.place / "slow").read_text() == "called\n", "it is not retried"


def test_only_one_of_several_simultaneous_stops_succeeds(tmp_path: Path) -> None:
    """The desired state guards the sequence; these tasks share no pool."""
    from threading import Thread

    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.io.home.desired_state import get_desired
    from fleetpulse.io.home.home import Home
    from fleetpulse.orchestration.config import OrchestrationConfig
    from fleetpulse.orchestration.operators.verbs import StopStream

    class Context(dict[str, Any]):
        def xcom_push(self, key: str, value: Any) -> None:
            refused.append(value)

    home = Home(tmp_path / "home")
    home.prepare(None)
    refused: list[str] = []
    stopped: list[str] = []

    def stop(run: str) -> None:
        task = StopStream(task_id="stop", place=OrchestrationConfig(str(ROOT / "fleet"), home.path))
        task.words = ["stream", "stop", "--by", run, "--own"]
        context = Context()
        context["ti"] = context
        try:
            task.execute(context)
            stopped.append(run)
        except AirflowFailException:
            pass

    threads = [Thread(target=stop, args=(f"airflow fleet_migrate run {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stopped) == 1 and len(refused) == 3
    assert (get_desired(home).state, get_desired(home).by) == ("stopped", stopped[0])
    assert all(reason.startswith(f"the stream was stopped by {stopped[0]}, and --own") for reason in refused)
