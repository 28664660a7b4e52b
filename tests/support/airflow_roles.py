"""Airflow's API server in one process, asked by an administrator and a viewer about the operations page.

Run it as a program: it writes its findings as JSON. The environment of Airflow must be set before its first import.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import tests.support.airflow as place
from fleetpulse.core.replay import Deployment
from fleetpulse.io.home.home import Home
from fleetpulse.paths import ROOT
from tests.support.asgi import Client
from tests.support.homes.homes import empty

os.environ.update(
    {
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "fleetpulse" / "orchestration" / "plugins"),
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": "ann:admin,eve:viewer",
        "AIRFLOW__API_AUTH__JWT_SECRET": "j" * 64,
        "AIRFLOW__API__SECRET_KEY": "k" * 64,
    }
)
RUNS = "/api/v2/dags/fleet_snapshot/dagRuns"
BODY = json.dumps({"logical_date": None, "conf": {}}).encode()
KINDS = ("application/json", "text/plain", "application/x-www-form-urlencoded", "")


def main() -> None:
    """Write the findings by user."""
    from airflow.utils.db import initdb

    initdb()
    _register("fleet_snapshot")
    home: Home = empty(place.PLACE / "home", Deployment(1_000, 300_000))
    from airflow.api_fastapi.app import create_app, get_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    client, found = Client(create_app()), dict[str, Any]()
    for name, role in (("ann", "ADMIN"), ("eve", "VIEWER")):
        session = {"cookie": f"_token={get_auth_manager().generate_jwt(SimpleAuthManagerUser(username=name, role=role))}"}
        answer = client.get("/fleet/ui/state", {**session, "accept": "text/html"})
        found[name] = {
            "page": answer.status,
            "has_form": '<form data-dag="fleet_snapshot" data-airflow=""' in answer.text,
            "is_of_home": str(home.path) in answer.text,
            "starts": [_post(client, session, kind) for kind in KINDS],
        }
    sys.stdout.write(json.dumps(found) + "\n")


def _register(dag: str) -> None:
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from airflow.utils.session import create_session

    with create_session() as session:
        DagBundlesManager().sync_bundles_to_db(session=session)
    bag = DagBag(str(place.PLACE / "no-dags"))
    bag.bag_dag(place.built(dag))
    sync_bag_to_db(bag, "dags-folder", None)


def _post(client: Client, session: Mapping[str, str], kind: str) -> int:
    """Post the body that starts a run, with a type of content; return the status of the answer."""
    headers = {**session, "content-length": str(len(BODY)), **({"content-type": kind} if kind else {})}
    return client.get(RUNS, headers, "POST", BODY).status


if __name__ == "__main__":
    main()
