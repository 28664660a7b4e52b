"""``fleet serve`` as a process: the one-time address that it prints, its status, and SIGTERM."""

import http.client
from urllib.parse import urlsplit

import psutil
import pytest

from cli.commands.run.serve import LOOPBACK, NICENESS, PORT
from fleetpulse.io.home.home import PAGE, Home
from fleetpulse.io.system.process import read_status
from fleetpulse.web import server
from tests.support.fleet_command import await_none_left, begin, fleet
from tests.support.wait import await_that

pytestmark = pytest.mark.unit


def test_a_served_home_prints_a_one_time_address_and_ends_at_sigterm(home: Home) -> None:
    running = begin("serve", "--home", str(home.path), "--port", "0")
    assert running.stdout is not None
    lines = [running.stdout.readline(), running.stdout.readline()]
    assert lines[0].startswith("page: http://127.0.0.1:"), lines
    assert f"./fleet access login --home {home.path}" in lines[1]
    status = read_status(home.run(PAGE))
    assert (status["pid"], status["state"]) == (running.pid, "running")
    address = urlsplit(lines[0].split()[1])
    assert lines[0].split()[1].startswith(status["url"])
    assert psutil.Process(running.pid).nice() >= NICENESS
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    connection.request("GET", f"{address.path}?{address.query}")
    assert connection.getresponse().status == 303
    connection.close()
    refused = fleet("serve", "--home", str(home.path), "--port", "0")
    assert refused.returncode == 1
    assert f"(process {running.pid})" in refused.stderr
    running.terminate()
    output, _ = running.communicate(timeout=60)
    assert (running.returncode, output) == (0, "")
    await_that(lambda: not home.run(PAGE).exists(), limit_s=10, what="the end of the status file")
    await_none_left(home.path)


def test_a_home_that_does_not_exist_is_refused_and_not_made(home: Home) -> None:
    refused = fleet("serve", "--home", str(home.path / "none"))
    assert refused.returncode == 1
    assert "there is no fleet" in refused.stderr
    assert not (home.path / "none").exists()


def test_defaults_are_those_of_the_server() -> None:
    """The command has copies: help must not import the server."""
    assert (PORT, LOOPBACK) == (server.PORT, server.LOOPBACK)
