"""Services of a home, by the commands of docker-compose.yml: starts, health, refusals and ends."""

import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import yaml

from cli.commands.run.service import check_health
from cli.supervisor.progress import judged_to_the_end
from fleetpulse.core.errors import FleetError
from fleetpulse.core.rows import FLUSH, Kind
from fleetpulse.core.tables import STREAM_HEALTH
from fleetpulse.io.checkpoints.checkpoint import judged_up_to
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import Service, services
from fleetpulse.io.mqtt.address import load_address
from fleetpulse.io.mqtt.publisher import Publisher
from fleetpulse.io.tables.tables import query
from fleetpulse.paths import ROOT
from fleetpulse.reports import judgements, messages
from tests.support.fleet_command import await_none_left, begin, fleet
from tests.support.wait import PATIENCE_S, await_that

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(1800)]
Started = dict[Service, subprocess.Popen[str]]
_await = partial(await_that, limit_s=2 * PATIENCE_S)  # five services start at once
BATCH_EVERY_S = 4
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def _local(folder: Path, arguments: list[str]) -> list[str]:
    """Return a container's command for a home in a folder, with localhost in place of the names of containers."""
    paths = {"/var/lib/fleetpulse/home": str(folder / "home")}
    return [
        "localhost" if before == "--known-as" else paths.get(argument, argument)
        for before, argument in pairwise(["", *arguments])
    ]


def _health(home: Home, service: Service) -> str:
    try:
        return check_health(home, service)
    except FleetError as error:
        return f"unhealthy: {error}"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Start every service; the broker last, so that the others wait for it. Verdicts are delayed, and batches are few."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "settings.toml").write_text('verdict_jitter = "24h"\n')
    monkeypatch.setenv("FLEET_BATCH_EVERY", f"{BATCH_EVERY_S}s")
    running: Started = {}
    for service in reversed(Service):
        port = ["--port", "0"] if service in (Service.BROKER, Service.PAGE) else []
        running[service] = begin(*_local(tmp_path, COMPOSE[service]["command"]), *port)
    yield running
    for one in running.values():
        one.kill()
        one.communicate()
    await_none_left(tmp_path / "home")


def _began_s(home: Home) -> dict[str, list[float]]:
    """Return the times at which batches began, in order, by run of the lifecycle job."""
    sql = "SELECT run_id, epoch(began_at) AS began_s FROM stream_health ORDER BY began_s"
    runs: dict[str, list[float]] = {}
    for one in query(home, sql, tables=[STREAM_HEALTH.name]):
        runs.setdefault(one["run_id"], []).append(one["began_s"])
    return runs


def test_a_home_runs_as_services(tmp_path: Path, started: Started) -> None:
    home = Home(tmp_path / "home")
    _await(lambda: home.exists() and services(home) == tuple(Service), what="all services")
    _await(lambda: _health(home, Service.BRIDGE) == "the bridge: live", what="the bridge")
    _await(lambda: _health(home, Service.PAGE) == "the page: running", what="the page")
    address = load_address(home.run("broker"))
    assert address.host == "localhost"
    with Publisher(address, "pump-1", patience_s=20) as publisher:
        publisher.publish("fleet/oslo/pump-1/heartbeat", b"{}")
    _await(lambda: judged_up_to(home.checkpoint) is not None, what="the first batch")
    _await(lambda: judgements.is_known(home, "pump-1"), what="the message")
    checks = {name: fleet(*_local(tmp_path, COMPOSE[name]["healthcheck"]["test"][2:])) for name in Service}
    assert {name: done.stderr for name, done in checks.items() if done.returncode} == {}

    for output in (["up", "--port", "0"], ["service", "landing"], ["down"]):
        refused = fleet(*output, "--home", str(home.path))
        assert refused.returncode == 1, output
        assert "services" in refused.stderr or "already running" in refused.stderr

    assert fleet("stream", "stop", "--by", "ann", "--home", str(home.path)).returncode == 0
    assert home.state_holder() is None
    assert _health(home, Service.LIFECYCLE) == "the lifecycle job is stopped, as requested by ann"
    before = judged_up_to(home.checkpoint)
    assert '" starts' in fleet("stream", "start", "--home", str(home.path)).stdout
    _await(
        lambda: judged_up_to(home.checkpoint) != before, what="the lifecycle job's first batch"
    )  # a stop has a shorter timeout than a start
    _await(lambda: max(map(len, _began_s(home).values())) > 2, what="three batches of one run")

    os.kill(started[Service.BRIDGE].pid, signal.SIGTERM)
    output, _ = started[Service.BRIDGE].communicate(timeout=60)
    assert started[Service.BRIDGE].returncode == 0, output
    assert "not flushed" not in output
    assert judged_to_the_end(home), "a bridge that stops waits until delayed verdicts are written"
    ticks = [one.contents().get("op") for one in messages.rows(home) if one.kind is Kind.TICK]
    assert ticks.count(FLUSH) == 2, "one at the stop of the lifecycle job, one at that of the bridge"
    started[Service.BRIDGE] = begin(*_local(tmp_path, COMPOSE[Service.BRIDGE]["command"]))
    _await(lambda: _health(home, Service.BRIDGE) == "the bridge: live", what="the restarted bridge")

    [job] = psutil.Process(started[Service.BRIDGE].pid).children()
    job.kill()
    output, _ = started[Service.BRIDGE].communicate(timeout=PATIENCE_S)
    assert started[Service.BRIDGE].returncode == 1, "with this exit code, its supervisor restarts it"
    assert "fleet: the bridge ended unexpectedly (exit -9)" in output
    assert _health(home, Service.BRIDGE).startswith("unhealthy: the bridge of")

    for service in (Service.PAGE, Service.LANDING, Service.LIFECYCLE, Service.BROKER):
        os.kill(started[service].pid, signal.SIGTERM)
        assert started[service].wait(60) == 0, service
    await_none_left(home.path)
    with home.locked("a run of everything"):
        pass
    # Spark starts the first batch at once, the second at the next multiple, and may start one late.
    for at_s in _began_s(home).values():
        assert (len(at_s) - 2) * BATCH_EVERY_S <= at_s[-1] - at_s[0] + 1, "batches are few"
