"""Status, screen and followed transitions of a running fleet: current figures, each verdict once."""

import io
import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import duckdb
import pytest
from rich.console import Console

from cli.commands.inspect.status import status, transitions
from cli.supervisor.screen import Screen
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS, QUARANTINE, STREAM_HEALTH
from fleetpulse.io.mqtt.address import BrokerAddress
from fleetpulse.io.system.process import write_status
from fleetpulse.io.tables import tables
from tests.support.homes.homes import empty

if TYPE_CHECKING:
    from cli.supervisor.processes import Run

pytestmark = pytest.mark.unit
TRANSITION: Final[dict[str, Any]] = {
    "kind": "transition",
    "event_time_ms": 5,
    "life_ms": 1,
    "transition_no": 1,
    "trigger": "signal",
}


def test_the_screen_marks_its_figures_as_stale_while_tables_are_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = empty(tmp_path / "home", Deployment())
    run = SimpleNamespace(home=home, status=lambda name: {})
    monkeypatch.setattr("cli.supervisor.screen._REFRESH_S", 0)
    monkeypatch.setattr("cli.supervisor.screen._REFRESH_RUNNING_S", 0)
    screen = Screen(cast("Run", run), BrokerAddress("127.0.0.1", 1))
    monkeypatch.setattr("cli.supervisor.screen.judged_ms", lambda home: None)
    monkeypatch.setattr("cli.supervisor.screen.frontiers.frontier_ms", lambda home, judged: None)
    tables.append(
        home, QUARANTINE, tables.to_table(QUARANTINE, [{"received_at_ms": 1, "topic": "t", "reason": "json"}]), "test", 1
    )
    assert "1 quarantined" in _text_of(screen)
    with monkeypatch.context() as broken:
        broken.setattr("cli.supervisor.screen.devices.counts_of", lambda *_: _run_out_of_memory())
        assert "1 quarantined" in _text_of(screen)
        assert "the figures are stale: no room" in _text_of(screen)
    assert "figures are stale" not in _text_of(screen)


def test_status_reports_an_open_gap_and_the_problem_of_a_bridge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = empty(tmp_path / "home", Deployment())
    with home.locked("a test"):
        write_status(home.run("bridge"), {"state": "live", "problem": "Kafka is away", "gap_open": True})
        write_status(home.run("landing"), {"state": "running", "problem": None})
        status(home.path)
        assert (
            "running: bridge (live, Kafka is away, a coverage gap is open: silence at its sites does not count), "
            "landing (running)\n" in capsys.readouterr().out
        )
        status(home.path, json_lines=True)
        assert json.loads(capsys.readouterr().out)["troubles"] == {
            "bridge": ["Kafka is away", "a coverage gap is open: silence at its sites does not count"]
        }


def test_status_rates_the_newest_batch_and_splits_its_duration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    home = empty(tmp_path / "home", Deployment())
    numbers = {column.name: 1 for column in STREAM_HEALTH.columns if column.required and column.name != "began_at"}
    query = {"query_id": "q", "run_id": "r", "input_rows": 500, "input_rows_per_s": 250.4, "state_update_us": 9_000}
    parts = {"batch_ms": 2_000, "latest_offset_ms": 20, "query_planning_ms": 600, "add_batch_ms": 1_300}
    good = {**numbers, **query, **parts, "began_at_ms": 1_700_000_000_000}
    bad = {**good, "began_at_ms": 1_700_000_001_000, "batch_id": 2}
    bad |= {"state_bytes": 2_000_000_000, "checkpoint_ms": 31_000, "state_memory_bytes": 5_000_000_000, "state_update_us": 51_000}
    for number, row in enumerate((good, bad), 1):
        tables.append(home, STREAM_HEALTH, tables.to_table(STREAM_HEALTH, [row]), "test", number)
        status(home.path)
        shown = capsys.readouterr().out
        assert ": 2,000 ms (finding new rows 20, planning 600, judging and writing 1,300) for 500 rows" in shown
        assert " for 500 rows, input 250 rows per second" in shown
        status(home.path, json_lines=True)
        rated = {metric["metric"]: metric["rating"] for metric in json.loads(capsys.readouterr().out)["health"]["rated"]}
        expected = {"state size": "warning", "checkpoint": "critical", "memory": "critical", "state update": "critical"}
        assert rated == {metric: expected.get(metric, "good") if number == 2 else "good" for metric in rated}
        assert {*expected} < {*rated}
        assert all(rating in shown for rating in rated.values())


def _run_out_of_memory() -> None:
    raise duckdb.OutOfMemoryException("no room\nmore")


def _text_of(screen: Screen) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(screen.render())
    return console.export_text()


def test_followed_transitions_print_each_verdict_once_even_if_judged_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = empty(tmp_path / "home", Deployment())
    commits = iter([[("b", 60)], [("c", 30), ("b2", 61)], [], [("e", 200)], [("d", 190)]])
    numbers = count(1)

    def commit(*verdicts: tuple[str, int]) -> None:
        rows = [{**TRANSITION, "device_id": device_id, "judged_at_ms": judged_s * 1_000} for device_id, judged_s in verdicts]
        tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "test", next(numbers))

    def sleep(_: float) -> None:
        verdicts = next(commits, None)
        if verdicts is None:
            raise KeyboardInterrupt
        if verdicts:
            commit(*verdicts)

    commit(("a", 50), ("old", 1))
    monkeypatch.setattr("cli.commands.inspect.status.time.sleep", sleep)
    transitions(home=home.path, follow=True, json_lines=True)
    assert [json.loads(line)["device_id"] for line in capsys.readouterr().out.splitlines()] == [
        "a",
        "old",
        "b",
        "c",
        "b2",
        "e",
        "d",
    ]
