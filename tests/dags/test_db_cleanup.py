"""Cleanup of Airflow's database and logs: old rows and files go, and those in use stay."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cli.supervisor.airflow_env import environment
from fleetpulse.io.home.home import Home
from tests.support.airflow import OF_AIRFLOW, PLACE
from tests.support.airflow_tasks import Context, place

pytestmark = OF_AIRFLOW
CONN = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"


def aged(path: Path, days: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("text")
    at_s = time.time() - days * 86_400
    for one in (path, path.parent):
        os.utime(one, (at_s, at_s))
    return path


def test_rows_and_logs_older_than_keep_logs_are_deleted_and_others_stay(
    airflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.models.log import Log
    from airflow.sdk import timezone
    from airflow.utils.session import create_session
    from sqlalchemy import select

    from fleetpulse.orchestration.db_cleanup import TidyAirflow

    logs = tmp_path / "logs"
    old, young = (
        aged(logs / "dag_id=a" / "run_id=1" / "attempt=1.log", 31),
        aged(logs / "dag_id=a" / "run_id=2" / "attempt=1.log", 29),
    )
    gone, fresh = logs / "dag_id=b" / "run_id=1", logs / "dag_id=b" / "run_id=2"
    for folder, days in ((fresh, 0.5), (gone, 40)):
        aged(folder / "attempt=1.log", days).unlink()
        at_s = time.time() - days * 86_400
        os.utime(folder, (at_s, at_s))
    with create_session() as session:
        for event, days in (("old", 31), ("young", 29)):
            row = Log(event=event)
            row.dttm = timezone.utcnow() - timedelta(days=days)  # the constructor sets the present time
            session.add(row)
    monkeypatch.setenv("AIRFLOW__LOGGING__BASE_LOG_FOLDER", str(logs))
    monkeypatch.setenv(f"{CONN}_CMD", f"printf %s sqlite:///{PLACE}/airflow.db")
    monkeypatch.setenv(CONN, "airflow-db-not-allowed:///")  # as in a task
    monkeypatch.setenv("FLEET_KEEP_LOGS", "30d")
    result = TidyAirflow(task_id="tidy", place=place(tmp_path)).execute(Context())
    assert result.endswith(", and 1 logs of 4 bytes")
    assert (old.exists(), young.exists(), gone.exists(), fresh.exists()) == (False, True, False, True)
    with create_session() as session:
        assert set(session.scalars(select(Log.event).where(Log.event.in_(("old", "young"))))) == {"young"}


def test_logs_stay_if_keep_logs_is_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetpulse.orchestration.db_cleanup import TidyAirflow

    monkeypatch.setenv("FLEET_KEEP_LOGS", "forever")
    assert TidyAirflow(task_id="tidy", place=place(tmp_path)).execute(Context()) == "nothing was deleted: logs are kept forever"


def test_a_database_that_a_task_cannot_find_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from fleetpulse.orchestration.db_cleanup import TidyAirflow

    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path))
    with pytest.raises(AirflowFailException, match=f"^cannot find Airflow's database: {CONN} is hidden from tasks; set "):
        TidyAirflow(task_id="tidy", place=place(tmp_path)).execute(Context())


def test_the_database_of_a_home_is_the_default_one_of_airflow(tmp_path: Path) -> None:
    from fleetpulse.orchestration.db_cleanup import TABLES, _is_found

    settings = environment(Home(tmp_path), 8080)
    assert settings[CONN] == f"sqlite:///{settings['AIRFLOW_HOME']}/airflow.db"
    assert not _is_found(settings)
    Path(settings["AIRFLOW_HOME"], "airflow.db").touch()
    assert _is_found(settings)
    assert _is_found({"AIRFLOW_HOME": "/nowhere", f"{CONN}_CMD": "cat a file"})
    assert not {"trigger", "dag", "dag_version"} & set(TABLES)


def test_cleaned_tables_are_known_to_airflow_and_exclude_triggers_and_dags() -> None:
    from airflow.utils.db_cleanup import _effective_table_names

    from fleetpulse.orchestration.db_cleanup import TABLES

    found: Any = _effective_table_names(table_names=list(TABLES))[0]
    assert set(TABLES) <= set(found) and not {"trigger", "dag", "dag_version"} & set(found)


def test_maintenance_finds_the_pages_of_backtests_and_the_logs_of_airflow(tmp_path: Path) -> None:
    from fleetpulse.io.maintenance.disk_cleanup import airflow_logs, old_backtests
    from fleetpulse.orchestration.config import backtest_folder

    folder = backtest_folder(place(tmp_path).data_folder, "manual__1")
    aged(folder / "report.html", 31)
    assert old_backtests(Home(tmp_path), 30 * 86_400_000, time.time()) == [folder]
    assert str(airflow_logs(Home(tmp_path))) == environment(Home(tmp_path), 1)["AIRFLOW__LOGGING__BASE_LOG_FOLDER"]
