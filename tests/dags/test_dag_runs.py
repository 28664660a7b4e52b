"""The other DAGs, run to their end: what their forms and dates become on the command line."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from fleetpulse.paths import ROOT
from tests.support.airflow import COMMAND, OF_AIRFLOW, Stand, built

pytestmark = OF_AIRFLOW
Trial = Callable[..., dict[str, str]]


def test_a_failed_check_is_red_though_its_pages_are_built(stand: Stand, trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    stand.fail(quality_run='suite "messages": 1 row fails "conservation"')
    dag = built("fleet_quality")
    ended = trial(dag)
    assert {each.name for each in dag.get_task("docs").outlets} == {"quality_results", "quality_failures"}, (
        "told of red looks too"
    )
    assert stand.calls() == ["quality run --json", "quality docs"]
    assert ended == {"": "failed", "check": "failed", "docs": "success", "outcome": "failed"}
    said = capsys.readouterr()
    assert 'AirflowFailException: check: suite "messages": 1 row fails "conservation"' in said.out + said.err


def test_a_form_that_is_filled_in_becomes_options_and_one_that_is_empty_none(stand: Stand, trial: Trial) -> None:
    assert trial(built("fleet_amend"))[""] == "success"
    assert trial(built("fleet_amend"), device="pump-1")[""] == "success"
    assert stand.calls() == ["amend --again-within=10m", "amend --again-within=10m --device=pump-1"]


def test_a_value_that_ends_as_base64_does_is_no_option_that_was_left_empty(stand: Stand, trial: Trial) -> None:
    assert trial(built("fleet_amend"), device="YWJj=")[""] == "success"
    assert stand.calls() == ["amend --again-within=10m --device=YWJj="]


def test_a_report_waits_until_the_day_is_judged_and_is_of_the_day_before(stand: Stand, trial: Trial) -> None:
    dag = built("fleet_report")
    dag.get_task("judged").patience = timedelta(0)
    assert trial(dag) == {"": "failed", "judged": "failed", "report": "upstream_failed"}
    assert stand.calls() == []
    began = datetime.now(UTC)
    ended = trial(built("fleet_report"), mark="judged")
    days = {(at - timedelta(days=1)).date() for at in (began, datetime.now(UTC))}
    [call] = stand.calls()
    assert ended[""] == "success" and call in {f"availability --day {day} --json" for day in days}


def test_a_backtest_has_the_policy_of_its_form(stand: Stand, trial: Trial) -> None:
    policy = '[rules]\ntimeout = "2m"\n'
    ended = trial(built("fleet_backtest"), policy=policy, to="2026-01-31T12:00:00Z")
    assert ended["backtest"] == "success" and ended["backtest_on_spark"] == "skipped" and ended[""] == "success"
    (call,) = stand.calls()
    *words, given, page = call.split(" ")
    assert words == ["backtest", "--to=2026-01-31T12:00:00Z", "--json"]
    with open(given.removeprefix("--policy="), encoding="utf-8") as file:  # noqa: PTH123 - as the command does
        assert file.read() == policy
    assert page.endswith("/report.html")


def test_a_bootstrap_has_what_its_form_says(stand: Stand, trial: Trial) -> None:
    stand.fail(
        **{"state_bootstrap_--version=0_--only=site_=_'north'_--dry-run_--once-stopped": "there is no snapshot of version 0"}
    )
    ended = trial(built("fleet_bootstrap"), version=0, only="site = 'north'")
    assert stand.calls() == ["state bootstrap --version=0 --only=site = 'north' --dry-run --once-stopped"]
    assert ended["plan"] == "failed" and ended["stop"] == "upstream_failed" and ended[""] == "failed"


def test_who_writes_a_table_says_what_it_is_now(stand: Stand, trial: Trial) -> None:
    from airflow.models.asset import AssetEvent
    from airflow.utils.session import create_session
    from sqlalchemy import select

    write_deltalake(str(stand.home / "tables" / "device_snapshots"), pa.table({"device_id": ["a", "b"]}))
    assert trial(built("fleet_snapshot"))[""] == "success"
    with create_session() as session:
        (event,) = session.scalars(select(AssetEvent).where(AssetEvent.source_dag_id == "fleet_snapshot")).all()
        assert (event.asset.name, event.extra) == ("device_snapshots", {"version": 0, "rows": 2})
    assert stand.calls() == ["state snapshot --gate --json"]


def test_a_verb_that_takes_too_long_is_broken_off_and_says_so(stand: Stand, trial: Trial) -> None:
    COMMAND.write_text(f"#!/bin/sh\necho called >> {stand.place}/slow\nsleep 300\n")
    dag = built("fleet_maintain")
    dag.get_task("maintain").execution_timeout = timedelta(seconds=1)
    assert trial(dag) == {"": "failed", "maintain": "failed"}
    assert (stand.place / "slow").read_text() == "called\n", "it is not tried again"


def test_the_stream_is_stopped_by_one_of_those_that_want_it_at_once(tmp_path: Path) -> None:
    """The desired state guards a sequence where no pool does: they share none here."""
    from threading import Thread

    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.io.home.desired_state import get_desired
    from fleetpulse.io.home.home import Home
    from fleetpulse.orchestration.config import OrchestrationConfig
    from fleetpulse.orchestration.operators import StopStream

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
    assert (get_desired(home).what, get_desired(home).by) == ("stopped", stopped[0])
    assert all(reason.startswith(f"the stream was stopped by {stopped[0]}, and --own") for reason in refused)
