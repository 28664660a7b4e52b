"""Configuration of a home's Airflow through environment variables only.

Rule 1: all listeners bind to the loopback. Secrets are files of the home that only its owner can
read.
Rule 2: all of Airflow's processes get the same variables. They share nothing else except the home's
folder ``airflow``.
"""

import json
import os
import secrets
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Final

from fleetpulse.io.home.home import Home
from fleetpulse.io.system.secret_files import create_secret, write_secret
from fleetpulse.paths import ROOT

HOST: Final = "127.0.0.1"
USERS: Final = {"admin": "admin", "operator": "op", "viewer": "viewer"}  # name -> Airflow's role
_TASKS: Final = 4  # concurrent tasks, one more than the slots of all pools: each is a process, and each verb has its own JVM


def airflow_home(home: Home) -> Path:
    """Return the folder of Airflow's database, logs and passwords."""
    return home.path.absolute() / "airflow"


def passwords(home: Home) -> tuple[dict[str, str], bool]:
    """Return the passwords by user, creating them if absent, and whether they are new.

    The caller shows new passwords once.
    """
    path = airflow_home(home) / "passwords.json"
    if path.exists():
        return json.loads(path.read_text()), False
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    created = {user: secrets.token_urlsafe(12) for user in USERS}
    write_secret(path, json.dumps(created))
    return created, True


def _secret(home: Home, name: str) -> str:
    """Return a secret of the home; the first call creates it."""
    path = airflow_home(home) / f"{name}.secret"
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    return create_secret(path, urlsafe_b64encode(secrets.token_bytes(32)).decode())


def environment(home: Home, port: int) -> dict[str, str]:
    """Return Airflow's environment variables, to add to those of this process.

    Args:
        home: the home, with existing passwords.
        port: port of the UI and the API.
    """
    url = f"http://{HOST}:{port}"
    at = airflow_home(home)
    return {
        "AIRFLOW_HOME": str(at),
        "FLEET_HOME": str(home.path.absolute()),
        "FLEET_SELF_APPROVAL": os.environ.get("FLEET_SELF_APPROVAL", "yes"),  # one person may use all accounts
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
        "AIRFLOW__DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "120",  # on an idle machine, parsing a file takes less than 1 s
        "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "90",
        "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",  # with the default of 5 s, a busy machine fails tasks before they start
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",  # seconds until the end of a task is noticed
        "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "120",
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "120",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps({"conn_type": "spark", "host": "local[2]"}),
        "GX_ANALYTICS_ENABLED": "false",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *_inherited_path()]),
    }


def _inherited_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(ROOT)]
