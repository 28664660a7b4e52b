"""Delete old rows of Airflow's database and old task logs.

Rule 1: rows are deleted by Airflow's own command, and no row in use is deleted. No run lasts as
long as one day, the minimum retention of logs. `TABLES` excludes the table of triggers: the trigger
of a watcher is as old as its DAG.
Rule 2: a task cannot access Airflow's database. The command finds the database through the settings
of the installation, like the other processes of Airflow.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from airflow.sdk.exceptions import AirflowFailException

from fleetpulse.orchestration.operators.verbs import FleetOperator, publish_reason

TABLES: Final = (  # tables that grow with each run; dependent rows are deleted with their run
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
_BARRED: Final = ("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", "AIRFLOW__CORE__SQL_ALCHEMY_CONN")  # hidden from tasks
_NAMED: Final = ("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_CMD", "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_SECRET")


class TidyAirflow(FleetOperator):
    """Run ``airflow db clean`` and delete task logs older than ``keep_logs``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(words=["db", "clean", "--skip-archive", "--yes", "--tables", ",".join(TABLES)], **kwargs)

    def execute(self, context: Mapping[str, Any]) -> str:
        """Delete old rows and logs; return a summary as text.

        Raises:
            AirflowFailException: the command would not find the database. Exceptions of `run_verb`
                are raised, too.
        """
        from fleetpulse.settings import load_settings

        keep_ms = load_settings(self.place.home).keep_logs
        if keep_ms is None:
            return "nothing was deleted: logs are kept forever"
        if not _is_found(os.environ):
            reason = f"cannot find Airflow's database: {_BARRED[0]} is hidden from tasks; set {_NAMED[0]} instead"
            publish_reason(context, reason)
            raise AirflowFailException(reason)
        before = datetime.fromtimestamp(time.time() - keep_ms / 1000, UTC).isoformat(timespec="seconds")
        self.run_verb([*self.words, "--clean-before-timestamp", before], context)
        count, size = _remove_logs(keep_ms)
        return f"deleted rows from before {before}, and {count:,} logs of {size:,} bytes"

    def line_of(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs Airflow with these arguments."""
        return [sys.executable, "-P", "-m", "airflow", *arguments]

    def environment(self) -> dict[str, str]:
        """Return the environment of Airflow's processes, without the variables of a task."""
        return {name: value for name, value in os.environ.items() if name not in _BARRED and not name.startswith("_AIRFLOW")}


def _is_found(environment: Mapping[str, str]) -> bool:
    """Whether the command can find the database.

    Either another setting names it, or it is the file ``airflow.db`` of ``./fleet up``, Airflow's
    default.
    """
    return any(environment.get(name) for name in _NAMED) or Path(environment.get("AIRFLOW_HOME", ""), "airflow.db").is_file()


def _remove_logs(keep_ms: int) -> tuple[int, int]:
    """Delete old task logs in Airflow's log folder; return their number and bytes."""
    from airflow.configuration import conf

    from fleetpulse.io.maintenance.disk_cleanup import old_files, remove_empty
    from fleetpulse.io.maintenance.vacuum import remove_files

    logs, now_s = Path(conf.get_mandatory_value("logging", "base_log_folder")), time.time()
    removed = remove_files(old_files(logs, keep_ms, now_s))
    remove_empty(logs, now_s)
    return removed
