"""Tables of the streams of a live home, compared with independent SQL over its bronze up to the position of the streams."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fleetpulse.core.streams.names import StreamName
from fleetpulse.core.streams.tables import SESSIONS
from fleetpulse.io.checkpoints.checkpoint import committed_batches, unfinished
from fleetpulse.io.checkpoints.stream_rebuild import read_begin
from fleetpulse.io.delta.log import DeltaLog
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.adaptive_batching import newest_received_ms
from tests.support.histories.command_sql import commands_sql, found
from tests.support.histories.session_sql import sessions_by_sql
from tests.support.histories.sessions import counted
from tests.support.histories.vital_sql import require_equal_windows, windows_by_sql, windows_of

_MARGIN_MS = 15_000  # two clocks of bridges


def position_ms(home: Home, name: StreamName) -> int:
    """Return the watermark with which the newest committed batch of a stream was run, epoch milliseconds; 0 without one."""
    checkpoint = home.stream_checkpoint(name)
    if not (done := committed_batches(checkpoint)):
        return 0
    return int(json.loads((checkpoint / "offsets" / str(done[-1])).read_text().splitlines()[1])["batchWatermarkMs"])


def is_in_a_batch(home: Home) -> bool:
    """Return whether a stream has started a batch that it has not committed, after another one."""
    checkpoints = [home.stream_checkpoint(name) for name in StreamName]
    return any(unfinished(one) is not None and committed_batches(one) for one in checkpoints)


def begin_ms(home: Home) -> int:
    """Return the newest ``received_at`` before the version at which the last of the streams began, epoch milliseconds."""
    begun = [read_begin(home.stream_checkpoint(name)) for name in StreamName]
    log, last = DeltaLog(home.table("messages")), max(one.begin for one in begun if one is not None)
    known = (newest_received_ms(log, version) for version in range(last - 1, -1, -1))
    return next((one for one in known if one is not None), 0)


def require_streams_agree(
    home: Home, since_ms: int, silence_ms: int, answer_ms: int, vitals: Mapping[str, tuple[int, int]]
) -> dict[str, int]:
    """Check the rows of all streams up to their positions; return the number of required rows of each.

    Args:
        home: stopped home whose streams have run from ``since_ms`` on, sessions from the first row on.
        since_ms: `begin_ms`, taken while these versions were in the log.
        silence_ms: limit of silence, milliseconds.
        answer_ms: time after which a command has timed out, milliseconds.
        vitals: width and slide of each metric, milliseconds, by the one policy with vitals.
    """
    ends = {name: position_ms(home, name) for name in StreamName}
    sessions = counted(tables.query(home, "SELECT * FROM sessions", tables=[SESSIONS.name]))
    # The stream has certainly read the rows up to this instant, and may have read later ones.
    read_ms = ends[StreamName.SESSIONS] - _MARGIN_MS
    required = counted(sessions_by_sql(home, silence_ms, read_ms))
    _require_all_in(required, sessions, "the table sessions")
    _require_all_in(sessions, counted(sessions_by_sql(home, silence_ms)), "the sessions by SQL")
    until_ms = ends[StreamName.COMMANDS] - answer_ms - _MARGIN_MS
    bound = f"WHERE epoch_ms(coalesce(sent_at, answered_at)) BETWEEN {since_ms + _MARGIN_MS} AND {until_ms}"
    commands = found(home, f"SELECT * FROM commands {bound}")
    wanted_commands = found(home, f"SELECT * FROM ({commands_sql(answer_ms)}) {bound}")
    _require_all_in(wanted_commands, commands, "the table commands")
    _require_all_in(commands, wanted_commands, "the commands by SQL")
    [policy] = tables.query(
        home,
        "SELECT epoch_ms(received_at) AS received_ms, epoch_ms(event_time) AS effective_ms FROM messages "
        "WHERE kind = 'policy' AND body LIKE '%\"vitals\"%window_ms%'",
        tables=["messages"],
    )
    from_ms = max(policy["received_ms"] + 1, policy["effective_ms"])
    closed_ms = ends[StreamName.VITALS]
    windows = [
        [one for one in rows if one["closed_ms"] <= closed_ms and one["start_ms"] >= since_ms]
        for rows in (windows_of(home), windows_by_sql(home, [(from_ms, vitals)], closed_ms))
    ]
    require_equal_windows(*windows)
    return {"sessions": required.total(), "commands": commands.total(), "vitals": len(windows[0])}


def _require_all_in(rows: Counter[Any], others: Counter[Any], name: str) -> None:
    missing = rows - others
    assert not missing, "\n".join([f"rows missing in {name}:", *map(str, missing.elements())])
