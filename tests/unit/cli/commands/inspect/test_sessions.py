"""Command `fleet sessions`: sessions with their durations, open ones included, and a summary by reason."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cli.commands.inspect.sessions import sessions
from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.tables import SESSIONS
from fleetpulse.core.times import format_instant
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.streams.sessions import by_reason
from tests.support.histories.histories import START, row, signal
from tests.support.histories.sessions import connections, table_of
from tests.support.histories.streams import DEPLOYMENT
from tests.support.homes.homes import commit_batch

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=DEPLOYMENT)]
ROWS = [
    signal(0, "pump", "birth", session="1"),
    signal(30, "pump"),
    row(60, "fleet/site/pump/death", session="1"),
    signal(70, "pump", "birth", session="2"),
    signal(10, "camera"),
    row(20, "fleet/site/camera/death", code="disconnect"),
]


@pytest.fixture
def read_home(home: Home) -> Path:
    """Return a home whose stream has read three sessions of two devices, up to 100 s after START."""
    tables.append(home, SESSIONS, table_of(ROWS, 3_600_000), "test", 1)
    commit_batch(home.stream_checkpoint(StreamName.SESSIONS), 0, START + 99_999)
    return home.path


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_each_session_is_listed_once_and_an_open_one_lasts_until_the_newest_message(
    read_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions(None, only_open=False, last=50, since=None, home=read_home, json_lines=True)
    found = listed(capsys)
    names = ("device_id", "session", "ended_by", "duration_ms", "messages")
    assert [tuple(one[name] for name in names) for one in found] == [
        ("pump", "2", None, 30_000, None),
        ("camera", None, "disconnect", 10_000, 1),
        ("pump", "1", "will", 60_000, 2),
    ]
    assert found[0]["started_at"] == format_instant(START + 70_000)


def test_sessions_are_selected_by_device_openness_and_time(read_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sessions("pump", only_open=False, last=50, since=None, home=read_home, json_lines=True)
    assert len(listed(capsys)) == 2
    sessions(None, only_open=True, last=50, since=None, home=read_home, json_lines=True)
    assert [one["session"] for one in listed(capsys)] == ["2"]
    since = format_instant(START + 60_000)
    sessions(None, only_open=False, last=50, since=since, home=read_home, json_lines=True)
    assert [one["session"] for one in listed(capsys)] == ["2", "1"]


def test_the_table_shows_reasons_and_a_summary(read_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sessions(None, only_open=False, last=2, since=None, home=read_home, json_lines=False)
    output = capsys.readouterr().out
    assert "(open)" in output and "disconnect" in output and "newest 2 sessions" in output
    assert "durations by the reason of the end" in output and format_instant(START + 100_000) in output
    assert [(one["ended_by"], one["sessions"], one["median_ms"]) for one in by_reason(Home(read_home))] == [
        ("disconnect", 1, 10_000),
        ("will", 1, 60_000),
        ("open", 1, 30_000),
    ]


def test_a_stream_that_is_off_is_reported(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    sessions(None, only_open=False, last=50, since=None, home=home.path, json_lines=False)
    assert 'the stream sessions is off; write streams = ["sessions"]' in capsys.readouterr().out


def test_each_session_of_a_random_history_is_counted_once(home: Home) -> None:
    rows = connections(Random(2))
    written = table_of(rows, 20_000)
    tables.append(home, SESSIONS, written, "test", 1)
    assert sum(one["sessions"] for one in by_reason(home)) == written["ended_at"].null_count
