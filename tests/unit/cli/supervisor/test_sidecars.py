"""Optional processes of a run: the HTTP server, and the publisher of verdicts if a setting asks for it."""

import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from cli.commands.inspect.status import status_facts
from cli.supervisor.sidecars import PageSidecar, PublisherSidecar, page_listener
from fleetpulse.core.replay import Deployment
from fleetpulse.io.home.home import PAGE, PUBLISHER, Home
from fleetpulse.io.home.services import Service, page_held, runs, served
from fleetpulse.io.system.process import write_status
from fleetpulse.settings import load_settings
from fleetpulse.web.access import Access
from tests.support.refusals import refused

if TYPE_CHECKING:
    from cli.supervisor.processes import Run

pytestmark = pytest.mark.unit


def test_a_publisher_is_started_once_and_only_if_the_setting_is_on(home: Home) -> None:
    started: list[tuple[str, int]] = []
    jobs: list[SimpleNamespace] = []

    def start(name: str, arguments: Sequence[str], restarts: int) -> SimpleNamespace:
        assert not arguments
        started.append((name, restarts))
        jobs.append(SimpleNamespace(optional=False))
        return jobs[-1]

    run = cast("Run", SimpleNamespace(start=start))
    PublisherSidecar(run, load_settings(home.path)).start()
    assert started == []
    (home.path / "settings.toml").write_text("publish_verdicts = true\nrestarts = 3\n")
    publisher = PublisherSidecar(run, load_settings(home.path))
    publisher.start()
    publisher.start()
    assert started == [(PUBLISHER, 3)]
    assert jobs[0].optional, "the run continues without it"


@pytest.mark.home(tables=Deployment())
def test_status_lists_the_publisher_of_a_run_and_of_the_service_bridge(home: Home) -> None:
    write_status(home.run(PUBLISHER), {"state": "live", "problem": "the broker is away"})
    assert status_facts(home)["processes"] == {}
    with served(home, Service.LANDING):
        assert not runs(home, PUBLISHER)
    with served(home, Service.BRIDGE):
        facts = status_facts(home)
    assert facts["processes"] == {PUBLISHER: "live"}
    assert facts["troubles"] == {PUBLISHER: ["the broker is away"]}


def test_the_page_of_a_run_invites_with_a_one_time_address_and_starts_once(home: Home) -> None:
    started: list[tuple[str, list[str]]] = []

    def start(name: str, arguments: list[str], _restarts: int) -> SimpleNamespace:
        started.append((name, arguments))
        return SimpleNamespace(optional=False)

    listener = page_listener(home, load_settings(home.path), 0)
    page = PageSidecar(cast("Run", SimpleNamespace(home=home, start=start)), listener)
    address, how = page.invitation()
    assert address.startswith(f"page:    http://127.0.0.1:{listener.port}/login?key=")
    assert f"./fleet access login --home {home.path}" in how
    assert Access(home).log_in(address.partition("=")[2]) is not None
    page.start()
    page.start()
    assert started == [(PAGE, ["--port", str(listener.port)])]


def test_a_port_in_use_ends_the_start_with_the_options_that_help(home: Home) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, refused("port-in-use", match="--page-port 0.*--no-page"):
        page_listener(home, load_settings(home.path), taken.getsockname()[1])


def test_a_second_server_or_an_unusable_certificate_ends_the_start(home: Home) -> None:
    with page_held(home, "fleet serve"), refused("page-runs-already", match="by fleet serve"):
        page_listener(home, load_settings(home.path), 0)
    (home.path / "settings.toml").write_text('serve_certificate = "none.pem"\n')
    with refused("serve-certificate-unreadable"):
        page_listener(home, load_settings(home.path), 0)


@pytest.mark.home(tables=Deployment())
def test_status_lists_the_http_server_whichever_command_started_it(home: Home) -> None:
    write_status(home.run(PAGE), {"state": "running", "url": "http://127.0.0.1:5"})
    assert status_facts(home)["processes"] == {}
    with page_held(home, "fleet serve"):
        assert status_facts(home)["processes"] == {PAGE: "running"}
