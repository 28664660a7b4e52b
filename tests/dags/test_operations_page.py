"""Operations page inside Airflow: logins, rights, addresses below a mount, and actions that have a DAG."""

import html
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from fleetpulse.core.replay import Deployment
from fleetpulse.paths import ROOT
from fleetpulse.web.actions import ACTIONS, STATE_FORMS
from tests.support.airflow import OF_AIRFLOW, built
from tests.support.asgi import Client
from tests.support.homes.homes import empty

pytestmark = OF_AIRFLOW
BROWSER = {"accept": "text/html,application/xhtml+xml"}
STARTED = {one.dag for one in ACTIONS.values() if one.dag is not None}


class FakeLogin:
    """Users by the header ``x-user``; an operator may start all DAGs but one."""

    async def user(self, request: Request) -> str | None:
        return request.headers.get("x-user")

    def name(self, user: str) -> str:
        return user

    def may_start(self, user: str, dag: str) -> bool:
        return user == "operator" and dag != "fleet_report"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    from fleetpulse.orchestration.config import OrchestrationConfig
    from fleetpulse.orchestration.pages.operations_page import OperationsPage

    home = empty(tmp_path / "home", Deployment(1_000, 300_000))
    made = OperationsPage(OrchestrationConfig("fleet", home.path), "/fleet/ui", FakeLogin())
    yield made
    if made.app is not None:
        made.app.state.live.stop()


def mounted(page: Any, root_path: str = "") -> Client:
    """Return a client of an application that mounts the page as Airflow does."""
    return Client(Starlette(routes=[Mount("/fleet", routes=[Mount("/ui", app=page)])]), root_path=root_path)


def test_anonymous_readers_are_sent_to_the_login_and_load_nothing(page: Any) -> None:
    client = mounted(page, "/airflow")
    answer = client.get("/fleet/ui/devices?mode=offline&q=a%26b", BROWSER)
    assert answer.status == 303
    assert answer.headers["location"] == (
        "/airflow/api/v2/auth/login?next=%2Fairflow%2Ffleet%2Fui%2Fdevices%3Fmode%3Doffline%26q%3Da%2526b"
    )
    answer = client.get("/fleet/ui/devices/a%2Fwhy%3F%25", BROWSER)
    assert answer.headers["location"].endswith("?next=%2Fairflow%2Ffleet%2Fui%2Fdevices%2Fa%252Fwhy%253F%2525")
    for path in ("/", "/state", "/fragments/freshness", "/api/v1/fleet", "/healthz", "/login?key=x", "/static/x/fleet.css"):
        assert client.get(f"/fleet/ui{path}").status == 401, path
    assert client.get("/fleet/ui/", {**BROWSER, "hx-request": "true"}).status == 401
    assert page.app is None, "the facts are loaded for users only"


def test_a_viewer_reads_every_page_and_sees_commands_instead_of_buttons(page: Any) -> None:
    client, viewer = mounted(page), {"x-user": "viewer"}
    for path in ("/", "/devices", "/changes", "/stream", "/quality", "/backtest", "/help", "/api/v1/fleet"):
        assert client.get(f"/fleet/ui{path}", viewer).status == 200, path
    text = client.get("/fleet/ui/state", viewer).text
    assert "<form data-dag" not in text
    assert "You may not start <code>fleet_snapshot</code> in Airflow." in text
    assert "./fleet state snapshot --home" in re.sub("<[^>]*>", "", text), "each word of a command is an element"


def test_an_operator_gets_a_form_for_each_dag_that_airflow_lets_start(page: Any) -> None:
    text = mounted(page, "/airflow").get("/fleet/ui/state", {"x-user": "operator"}).text
    assert re.findall(r'<form data-dag="(\w+)" data-airflow="([^"]*)"', text) == [
        (dag, "/airflow") for dag in ("fleet_snapshot", "fleet_maintain", "fleet_amend")
    ]
    assert "You may not start <code>fleet_report</code>" in text
    assert all(f'href="/airflow/dags/{dag}"' in text for dag in STATE_FORMS)
    assert text.count("hidden>") >= 3, "without the script a form does nothing, so it is not shown"


def test_the_page_is_read_only_for_everybody(page: Any) -> None:
    for method in ("POST", "PUT", "DELETE"):
        answer = mounted(page).get("/fleet/ui/state", {"x-user": "operator", "sec-fetch-site": "cross-site"}, method)
        assert answer.status == 405


@pytest.mark.parametrize("root_path", ["", "/airflow"])
def test_every_address_is_below_the_mount_or_in_airflow(page: Any, root_path: str) -> None:
    client, operator = mounted(page, root_path), {"x-user": "operator"}
    for path in ("/", "/devices", "/changes", "/stream", "/state", "/quality", "/backtest", "/help"):
        text = client.get(f"/fleet/ui{path}", operator).text
        found = [html.unescape(one) for one in re.findall(r'\s(?:href|src|action|hx-get)="([^"#][^"]*)"', text)]
        assert found
        below, airflow = f"{root_path}/fleet/ui/", f"{root_path}/"
        of_airflow = [f"{airflow}dags/", f"{airflow}fleet/quality/"]
        for one in found:
            assert one.startswith(below) or one == airflow or any(one.startswith(other) for other in of_airflow), (path, one)
        assert f'<a class="help" href="{airflow}">Airflow</a>' in text
        for style in re.findall(r'(?:href|src)="([^"]*/static/[^"]*)"', text):
            assert client.get(style.removeprefix(root_path), operator).status == 200, style


def test_the_content_security_policy_holds_inside_airflow(page: Any) -> None:
    policy = mounted(page).get("/fleet/ui/state", {"x-user": "operator"}).headers["content-security-policy"]
    assert "script-src 'self'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy


def test_a_device_id_is_quoted_in_commands_and_escaped_in_forms(page: Any) -> None:
    from fleetpulse.web.actions import command, offers

    client = mounted(page)
    client.get("/fleet/ui/help", {"x-user": "operator"})  # builds the application
    request = Request({"type": "http", "app": page.app, "fleet_user": "operator", "root_path": "/fleet/ui", "headers": []})
    device = "a b'; rm -rf \"<x>"
    [again, hold, release] = offers(request, "judge-again", "hold", "release", device=device)
    assert again.may_start and [(one.name, one.value) for one in again.fields] == [("device", device)]
    assert {one.name: one.value for one in hold.fields} == {"action": "maintain", "device": device, "expect": "1", "for": "2h"}
    assert {one.name: one.value for one in release.fields} == {"action": "release", "device": device, "expect": "1"}
    assert hold.may_start and release.may_start
    assert shlex.split(hold.command)[:4] == ["./fleet", "device", "maintain", device]
    assert shlex.split(command(page.app.state.home, ("amend", "--device", "{device}"), device))[3] == device


@pytest.mark.parametrize("name", sorted(ACTIONS))
def test_an_action_has_the_parameters_of_its_dag(name: str) -> None:
    action = ACTIONS[name]
    if action.dag is None:
        assert not action.fields, "a command has no form"
        return
    assert {one.name for one in action.fields} <= set(built(action.dag).params)


def test_links_to_forms_name_existing_dags() -> None:
    assert {*STARTED, *STATE_FORMS} <= {path.stem for path in (ROOT / "dags").glob("fleet_*.py")}


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer forged"}, {"cookie": "_token=forged"}])
def test_the_plugin_mounts_the_page_behind_the_login_of_airflow(airflow: Path, headers: dict[str, str]) -> None:
    from fleetpulse.orchestration.config import CONFIG
    from fleetpulse.orchestration.pages.serving import PagesApp

    client = Client(Starlette(routes=[Mount("/fleet", app=PagesApp(CONFIG))]))
    answer = client.get("/fleet/ui/state", {**BROWSER, **headers})
    assert (answer.status, answer.headers["location"]) == (303, "/api/v2/auth/login?next=%2Ffleet%2Fui%2Fstate")


def test_airflow_itself_decides_who_starts_a_run_and_takes_only_json(tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-m", "tests.support.airflow_roles"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(words, env=environment, cwd=ROOT, check=True, timeout=240, stdout=subprocess.PIPE)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ann"] == {"page": 200, "has_form": True, "is_of_home": True, "starts": [200, 422, 422, 422]}
    assert found["eve"] == {"page": 200, "has_form": False, "is_of_home": True, "starts": [403, 403, 403, 403]}


def test_the_navigation_opens_the_page_without_a_frame() -> None:
    from fleetpulse.orchestration.plugins.fleet_pages import FleetPages

    [view] = [one for one in FleetPages.external_views if one["name"] == "Fleet"]
    assert view == {"name": "Fleet", "href": "/fleet/ui/", "destination": "nav"}, "any route would open it in a frame"
