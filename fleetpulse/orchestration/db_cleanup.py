"""Airflow's own kept small: rows of its database and logs of its tasks that are older than logs are kept.

Rule 1: rows go by Airflow's own command, and none that is in use: no run takes as long as the least that logs are kept for, a
day, and `TABLES` leaves out the triggers, since a watcher's is as old as its DAG.
Rule 2: a task has no way into Airflow's database; the command finds it as Airflow's other processes do, by the settings of the
installation.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from airflow.sdk.exceptions import AirflowFailException

from fleetpulse.orchestration.operators import FleetOperator, leave

TABLES: Final = (  # what grows with each run; what hangs on a run goes with it
    "asset_event",
    "callback",
    "dag_run",
    "deadline",
    "import_error",
    "job",
    "log",
    "task_instance",
    "task_instance_history",
    "xcom",
)
_BARRED: Final = ("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "AIRFLOW__CORE__SQL_ALCHEMY_CONN")  # with what a task has instead of it
_NAMED: Final = ("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_CMD", "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_SECRET")


class TidyAirflow(FleetOperator):
    """Run ``airflow db clean`` and delete old logs of tasks; both by the setting ``keep_logs``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=["db", "clean", "--skip-archive", "--yes", "--tables", ",".join(TABLES)], **kwargs)

    def execute(self, context: Mapping[str, Any]) -> str:
        """Tidy; return in words what was done.

        Raises:
            AirflowFailException: the database is none that the command would find; beside what `run_verb` raises.
        """
        from fleetpulse.settings import load_settings

        keep_ms = load_settings(self.place.home).keep_logs
        if keep_ms is None:
            return "logs are kept for ever"
        if not _is_found(os.environ):
            reason = f"Airflow's database is named in {_BARRED[0]}, which tasks do not see; name it in {_NAMED[0]}"
            leave(context, reason)
            raise AirflowFailException(reason)
        before = datetime.fromtimestamp(time.time() - keep_ms / 1000, UTC).isoformat(timespec="seconds")
        self.run_verb([*self.words, "--clean-before-timestamp", before], context)
        count, size = _remove_logs(keep_ms)
        return f"rows from before {before} were deleted, and {count:,} logs of {size:,} bytes"

    def line_of(self, words: Sequence[str]) -> list[str]:
        """Return the command line."""
        return [sys.executable, "-P", "-m", "airflow", *words]

    def environment(self) -> dict[str, str]:
        """Return the environment of Airflow's processes, without what marks a task's."""
        return {name: value for name, value in os.environ.items() if name not in _BARRED and not name.startswith("_AIRFLOW")}


def _is_found(environment: Mapping[str, str]) -> bool:
    """Whether the database is named by another setting, or is the file that ``./fleet up`` has, which is Airflow's default."""
    return any(environment.get(name) for name in _NAMED) or Path(environment.get("AIRFLOW_HOME", ""), "airflow.db").is_file()


def _remove_logs(keep_ms: int) -> tuple[int, int]:
    """Delete old logs of tasks, wherever they lie; return how many, and their bytes."""
    from airflow.configuration import conf

    from fleetpulse.io.maintenance.disk_cleanup import old_files, remove_empty
    from fleetpulse.io.maintenance.vacuum import remove_files

    logs, now_s = Path(conf.get_mandatory_value("logging", "base_log_folder")), time.time()
    removed = remove_files(old_files(logs, keep_ms, now_s))
    remove_empty(logs, now_s)
    return removed
