"""Optional processes of a run: the publisher of verdicts runs only if a setting asks for it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from cli.commands.inspect.status import status_facts
from cli.supervisor.sidecars import PublisherSidecar
from fleetpulse.core.replay import Deployment
from fleetpulse.io.home.home import PUBLISHER, Home
from fleetpulse.io.home.services import Service, runs, served
from fleetpulse.io.system.process import write_status
from fleetpulse.settings import load_settings

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
