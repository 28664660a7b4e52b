"""How Airflow is set up beside a home: by its environment alone, so that no file of ours can be out of step with another.

Rule 1: everything is bound to the loopback, and what is secret lies in files of the home that its owner alone can read.
Rule 2: what stands here holds for each of Airflow's processes; they share nothing else but the home's folder ``airflow``.
"""

import json
import os
import secrets
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Final

from fleetpulse.io.home.home import Home
from fleetpulse.io.mqtt.address import write_secret
from fleetpulse.paths import ROOT

HOST: Final = "127.0.0.1"
USERS: Final = {"admin": "admin", "operator": "op", "viewer": "viewer"}  # name -> Airflow's role
_TASKS: Final = 4  # at a time, one more than the pools have slots: each is a process, and the verbs have a JVM of their own


def folder(home: Home) -> Path:
    """Return where Airflow keeps its own: database, logs, passwords."""
    return home.path.absolute() / "airflow"


def passwords(home: Home) -> tuple[dict[str, str], bool]:
    """Return the passwords by user, and whether they were made just now: then they are to be shown, once."""
    path = folder(home) / "passwords.json"
    if path.exists():
        return json.loads(path.read_text()), False
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {user: secrets.token_urlsafe(12) for user in USERS}
    write_secret(path, json.dumps(made))
    return made, True


def _secret(home: Home, name: str) -> str:
    """Return a secret of the home, made when it is first asked for."""
    path = folder(home) / f"{name}.secret"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_secret(path, urlsafe_b64encode(secrets.token_bytes(32)).decode())
    return path.read_text()


def environment(home: Home, port: int) -> dict[str, str]:
    """Return the variables that Airflow's processes have beside ours.

    Args:
        home: the home, whose passwords have been made.
        port: of the UI and the API.
    """
    url = f"http://{HOST}:{port}"
    at = folder(home)
    return {
        "AIRFLOW_HOME": str(at),
        "FLEET_HOME": str(home.path.absolute()),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "fleetpulse" / "orchestration" / "plugins"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__PARALLELISM": str(_TASKS),
        "AIRFLOW__CORE__AUTH_MANAGER": "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": ",".join(f"{user}:{role}" for user, role in USERS.items()),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(at / "passwords.json"),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
        "AIRFLOW__CORE__FERNET_KEY": _secret(home, "fernet"),
        "AIRFLOW__API__SECRET_KEY": _secret(home, "session"),
        "AIRFLOW__API_AUTH__JWT_SECRET": _secret(home, "jwt"),
        "AIRFLOW__API__HOST": HOST,
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__BASE_URL": url,
        "AIRFLOW__API__INSTANCE_NAME": "fleetpulse",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{at / 'airflow.db'}",
        "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(at / "logs"),
        "AIRFLOW__LOGGING__DAG_PROCESSOR_CHILD_PROCESS_LOG_DIRECTORY": str(at / "logs" / "dag_processor"),
        "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "120",
        "AIRFLOW__DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "120",  # a file is read in under a second, on an idle machine
        "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "90",
        "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",  # 5 s fail tasks on a busy machine before they start
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",  # how soon it is noticed that a task has ended
        "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "120",
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "120",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        "GX_ANALYTICS_ENABLED": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *_inherited_path()]),
    }


def _inherited_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(ROOT)]
