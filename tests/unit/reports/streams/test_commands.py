"""Commands and twins: the state of each command follows from the rows of the stream."""

from pathlib import Path
from typing import Any

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.streams.commands import CommandStatus
from fleetpulse.core.streams.tables import COMMANDS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.reports.streams.commands import commands
from fleetpulse.reports.streams.twin import NEWEST, twin
from tests.support.histories.histories import START, row
from tests.support.homes.homes import empty, land

pytestmark = pytest.mark.unit


def entry(
    device: str, command: str, status: str, sent_s: float | None = None, answered_s: float | None = None, **more: Any
) -> Any:
    found = {"device_id": device, "command_id": command, "status": status, "site": "s", **more}
    for name, at_s in (("sent_at_ms", sent_s), ("answered_at_ms", answered_s)):
        found[name] = None if at_s is None else START + int(at_s * 1000)
    return found


def joined(path: Path, *entries: Any) -> Home:
    home = empty(path, Deployment())
    tables.append(home, COMMANDS, tables.to_table(COMMANDS, list(entries)), "test", 1)
    return home


def test_the_first_answer_to_a_command_counts(tmp_path: Path) -> None:
    home = joined(
        tmp_path / "home",
        entry("a", "c1", "acknowledged", 1, 5, name="set", payload='{"x":1}', latency_ms=4_000, answer_position=1),
        entry("a", "c1", "rejected", 1, 5, name="set", payload='{"x":1}', latency_ms=4_000, answer_position=0, reason="no"),
        entry("a", "c1", "pending", 1, name="set", payload='{"x":1}'),
        entry("a", "c2", "pending", 2, name="reboot"),
        entry("b", "c1", "pending", 3, name="reboot"),
        entry("b", "c1", "timed_out", 3, name="reboot"),
        entry("b", "c9", "unmatched", None, 4, reason="late"),
    )
    found = commands(home)
    assert [(one["device_id"], one["command_id"], one["status"], one["answers"], one["reason"]) for one in found] == [
        ("a", "c1", "rejected", 2, "no"),
        ("a", "c2", "pending", 0, None),
        ("b", "c1", "timed_out", 0, None),
        ("b", "c9", "unmatched", 1, "late"),
    ]
    assert found[0]["payload"] == {"x": 1} and found[1]["payload"] is None
    assert [one["command_id"] for one in commands(home, "b", last=1)] == ["c9"]
    assert [one["command_id"] for one in commands(home, status=CommandStatus.PENDING)] == ["c2"]


def test_a_command_that_is_sent_again_with_its_id_is_one_command(tmp_path: Path) -> None:
    rows = [
        entry("a", "c1", "pending", 1, name="set", payload=None),
        entry("a", "c1", "timed_out", 1, name="set", payload=None),
        entry("a", "c1", "pending", 900, name="set", payload='{"x":2}'),
        entry("a", "c1", "pending", 905, name="set", payload='{"x":3}'),
        entry("b", "c1", "pending", 900, name="set"),
    ]
    [found, other] = commands(joined(tmp_path / "pending", *rows))
    assert (found["status"], found["payload"], other["device_id"]) == ("pending", None, "b")
    ends = [entry("a", "c1", "timed_out", at_s, name="set") for at_s in (900, 905)]
    assert commands(joined(tmp_path / "over", *rows, *ends))[0]["status"] == "timed_out"
    answers = [entry("a", "c1", "acknowledged", at_s, 907, answer_position=3, name="set") for at_s in (900, 905)]
    [found, _] = commands(joined(tmp_path / "answered", *rows, *answers))
    assert (found["status"], found["answers"], found["latency_ms"]) == ("acknowledged", 1, 906_000)


def test_a_command_with_a_timeout_of_its_own_is_timed_out_when_the_table_is_beyond_it(tmp_path: Path) -> None:
    rows = [entry("a", "c1", "pending", 1, timeout_ms=5_000), entry("a", "c2", "pending", 1)]
    at = entry("b", "c3", "pending", 6)
    assert [one["status"] for one in commands(joined(tmp_path / "at", *rows, at))] == ["pending"] * 3
    later = entry("b", "c3", "unmatched", None, 6.001)
    assert [one["status"] for one in commands(joined(tmp_path / "later", *rows, later), "a")] == ["timed_out", "pending"]
    assert [one["status"] for one in commands(joined(tmp_path / "all", *rows, later))] == ["timed_out", "pending", "unmatched"]


@pytest.mark.parametrize(("own", "before"), [({}, "pending"), ({"timeout_ms": 5_000}, "timed_out")])
def test_a_command_whose_answer_the_stream_did_not_read_counts_once_it_is_sent_again(
    tmp_path: Path, own: dict[str, Any], before: str
) -> None:
    """The stream was off from second 2 to second 500: it has neither the answer nor the timeout."""
    rows = [entry("a", "c1", "pending", 1, **own), entry("a", "c2", "pending", 500)]
    [found, _] = commands(joined(tmp_path / "lost", *rows))
    assert found["status"] == before
    again = [entry("a", "c1", "pending", 600, **own), entry("a", "c1", "acknowledged", 600, 601, answer_position=0, **own)]
    [found, _] = commands(joined(tmp_path / "again", *rows, *again))
    assert (found["status"], found["answers"]) == ("acknowledged", 1)


def test_a_twin_merges_commands_and_answers_in_order(tmp_path: Path) -> None:
    first: dict[str, Any] = {"name": "set", "payload": '{"interval_s":30,"unit":"C","mode":{"night":true}}'}
    second: dict[str, Any] = {"name": "set", "payload": '{"interval_s":60,"unit":null}'}
    home = joined(
        tmp_path / "home",
        entry("a", "c2", "pending", 2, **second),
        entry("a", "c1", "pending", 1, **first),
        entry("a", "c3", "pending", 3, name="firmware", payload='{"version":"2.0"}'),
        entry("a", "c2", "acknowledged", 2, 6, reported='{"interval_s":60}', **second),
        entry("a", "c1", "acknowledged", 1, 5, reported='{"interval_s":30,"mode":{"night":false}}', **first),
        entry("b", "c1", "acknowledged", 1, 7, reported='{"interval_s":1}'),
    )
    sent = [row(10, "fleet/s/a/birth", firmware="1.0", metrics={"t": 1}), row(11, "fleet/s/a/telemetry", metrics={"t": 2})]
    land(home, [*sent, row(12, "fleet/s/b/birth", firmware="3.0")], 1)
    found = twin(home, "a")
    assert found.desired == {"interval_s": 60, "mode": {"night": True}, "firmware": "2.0"}
    assert found.reported == {"interval_s": 60, "mode": {"night": False}, "firmware": "1.0"}
    assert found.difference == {"mode": {"night": True}, "firmware": "2.0"}
    assert found.metrics == {"t": 2}
    assert [one["status"] for one in found.commands] == ["acknowledged", "acknowledged", "pending"]
    unknown = twin(home, "z")
    assert (unknown.desired, unknown.reported, unknown.metrics, unknown.commands) == ({}, {}, {}, [])


def test_a_twin_lists_pending_commands_and_the_newest(tmp_path: Path) -> None:
    old = [entry("a", f"c{number}", "pending", number) for number in range(NEWEST + 2)]
    home = joined(tmp_path / "home", *old, entry("a", "c1", "timed_out", 1))
    assert [one["command_id"] for one in twin(home, "a").commands] == ["c0", *(f"c{number + 2}" for number in range(NEWEST))]
