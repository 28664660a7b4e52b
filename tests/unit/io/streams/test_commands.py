"""Sink of the stream `commands`: rows of a rebuild that has read only one of a command and its answer."""

from typing import Any

import pytest

from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.tables import COMMANDS
from fleetpulse.io.checkpoints.stream_rebuild import StreamBegin, end_rebuild, rebuild
from fleetpulse.io.home.home import Home
from fleetpulse.io.streams.commands import CommandSink
from fleetpulse.io.tables import tables
from tests.support.homes.checkpoints import write_offsets

pytestmark = pytest.mark.unit


def command(command_id: str, status: str, sent_s: int | None, answered_s: int | None = None, **more: Any) -> dict[str, Any]:
    """Return a row of the table; instants in seconds."""
    instants = {"sent_at_ms": sent_s, "answered_at_ms": answered_s}
    found = {name: at_s * 1_000 for name, at_s in instants.items() if at_s is not None}
    position = {} if answered_s is None else {"answer_position": 0}
    return {"device_id": "a", "command_id": command_id, "status": status, **found, **position, **more}


def rows(home: Home) -> list[tuple[str, str]]:
    sql = "SELECT command_id, status FROM commands ORDER BY ALL"
    return [(one["command_id"], one["status"]) for one in tables.query(home, sql, tables=[COMMANDS.name])]


BEFORE = (
    command("met", "pending", 1),
    command("met", "acknowledged", 1, 100),
    command("other", "pending", 100),
    command("other", "rejected", 100, 100),
    command("none", "pending", 100),
    command("none", "timed_out", 100),
)


@pytest.mark.parametrize(
    ("again", "is_new"),
    [
        (command("met", "unmatched", None, 100), False),
        (command("met", "unmatched", None, 101), True),
        (command("met", "unmatched", None, 100, answer_position=1), True),
        (command("met", "unmatched", None, 100, device_id="b"), True),
        (command("none", "unmatched", None, 100), True),
        (command("other", "timed_out", 100), False),
        (command("other", "timed_out", 101), True),
        (command("none", "timed_out", 100), False),
        (command("none", "acknowledged", 100, 120), True),
        (command("other", "rejected", 100, 100), False),
        (command("other", "pending", 100), False),
        (command("new", "pending", 130), True),
    ],
)
def test_a_rebuild_adds_no_row_for_a_command_and_an_answer_that_the_table_has_together(
    home: Home, monkeypatch: pytest.MonkeyPatch, again: dict[str, Any], is_new: bool
) -> None:
    checkpoint = home.stream_checkpoint(StreamName.COMMANDS)
    monkeypatch.setattr("fleetpulse.io.tables.batch_appender.query_id", lambda _: "before")
    CommandSink(home, checkpoint).append(tables.to_table(COMMANDS, BEFORE), 0)
    write_offsets(checkpoint, 0, {"reservoirVersion": 4})
    rebuild(checkpoint, StreamBegin(3, 4))
    monkeypatch.setattr("fleetpulse.io.tables.batch_appender.query_id", lambda _: "rebuilt")
    sink = CommandSink(home, checkpoint)
    sink.append(tables.to_table(COMMANDS, [again]), 0)
    assert len(rows(home)) == len(BEFORE) + is_new
    end_rebuild(checkpoint)
    sink.append(tables.to_table(COMMANDS, [again]), 1)
    assert len(rows(home)) == len(BEFORE) + is_new + 1, "later rows are not compared"
