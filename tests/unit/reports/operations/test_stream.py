"""Streams beside the lifecycle in the status of the lifecycle job."""

import os

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.streams.names import StreamName
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.services import Service, served
from fleetpulse.io.system.process import write_status
from fleetpulse.reports.operations.stream import StreamState, streams_beside

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(1_000, 300_000))]


def test_a_stream_that_the_status_does_not_have_is_off(home: Home) -> None:
    assert streams_beside(home) == [StreamState(name) for name in StreamName]
    assert not any(one.is_on for one in streams_beside(home))


def test_a_stream_stops_with_the_job_and_keeps_its_newest_batch(home: Home) -> None:
    commits = home.stream_checkpoint(StreamName.COMMANDS) / "commits"
    commits.mkdir(parents=True)
    (commits / "4").touch()
    os.utime(commits / "4", (1_700_000_000.25, 1_700_000_000.25))
    found = {"state": "failed", "batch": 4, "failures": 2, "error": "no"}
    write_status(home.run("lifecycle"), {"state": "running", "streams": {"commands": found}})

    def commands() -> StreamState:
        return next(one for one in streams_beside(home) if one.name is StreamName.COMMANDS)

    stopped = StreamState(StreamName.COMMANDS, "stopped", 4, 1_700_000_000_250, 2, "no")
    assert commands() == stopped and stopped.is_on
    with served(home, Service.LIFECYCLE):
        assert commands().state == "failed"
        (commits / "4").unlink()
        assert commands().batch_at_ms is None
