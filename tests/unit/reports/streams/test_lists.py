"""Lists of streams read only the files of their span, and a span changes no state."""

import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.streams.tables import COMMANDS, SESSIONS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.tables import fetch
from fleetpulse.reports.streams.commands import commands
from fleetpulse.reports.streams.lists import COMMAND_LIST, SESSION_LIST, StreamList, Wanted, list_sql, open_list
from fleetpulse.reports.streams.sessions import sessions
from tests.support.homes.streams import MINUTE_MS, add_commands, add_sessions

pytestmark = [pytest.mark.unit, pytest.mark.home(tables=Deployment(1_000, 300_000))]
END_MS = 1_700_000_000_000
DAY_MS = 86_400_000


def listed(home: Home, of: StreamList, wanted: Wanted) -> list[dict[str, object]]:
    """Return the results of a list."""
    connection = open_list(home, of, wanted.since_ms)
    try:
        return fetch(connection, *list_sql(home, of, wanted, None))
    finally:
        connection.close()


def test_files_before_the_span_are_not_opened(home: Home) -> None:
    add_commands(home, "d", END_MS - 9 * DAY_MS)
    old = tables.paths_of(home, COMMANDS)
    add_commands(home, "d", END_MS)
    since_ms = END_MS - 3 * DAY_MS
    wanted = listed(home, COMMAND_LIST, Wanted(since_ms))
    assert len(wanted) == 6
    for path in old:
        path.unlink()
    assert listed(home, COMMAND_LIST, Wanted(since_ms)) == wanted
    with pytest.raises(Exception, match=r"No files found|No such file"):
        listed(home, COMMAND_LIST, Wanted())


def test_a_span_changes_no_state(home: Home) -> None:
    add_commands(home, "d", END_MS)
    add_sessions(home, "d", END_MS)
    for of, whole, at in (
        (COMMAND_LIST, commands(home), lambda row: row["sent_at"] or row["answered_at"]),
        (SESSION_LIST, sessions(home), lambda row: row["ended_at"] or row["started_at"]),
    ):
        states = {(round(at(row).timestamp() * 1000), row.get("status") or row.get("ended_by")) for row in whole}
        for minutes in range(0, 60, 7):
            since_ms = END_MS - minutes * MINUTE_MS
            rows = listed(home, of, Wanted(since_ms))
            found = {
                (
                    next(row[f"{name}_ms"] for name in of.at if row[f"{name}_ms"] is not None),
                    row.get("status") or row.get("ended_by"),
                )
                for row in rows
            }
            assert found == {one for one in states if one[0] >= since_ms}, minutes


def test_the_newest_instant_is_that_of_the_statistics(home: Home) -> None:
    assert COMMAND_LIST.newest_ms(home) is SESSION_LIST.newest_ms(home) is None
    add_commands(home, "d", END_MS)
    add_sessions(home, "d", END_MS)
    assert COMMAND_LIST.newest_ms(home) == END_MS
    assert SESSION_LIST.newest_ms(home) == END_MS - 10 * MINUTE_MS, "the open session began then"
    assert SESSIONS.name == SESSION_LIST.table.name
