"""Declarations of the Delta tables of the streams beside the lifecycle."""

from typing import Final

from fleetpulse.core.tables import Column, Table

SESSIONS: Final = Table(
    "sessions",
    "Connection sessions: one row when a session begins, and one when it ends. `fleet sessions` shows each once.",
    ("device_id", "started_at", "position", "ended_at"),
    (
        Column("device_id", "string", "id of the device", required=True),
        Column("started_at", "timestamp", "received_at of its first message", required=True),
        Column("ended_at", "timestamp", "instant of its end; null in the row of its start"),
        Column("site", "string", "site in the topic of its newest signal", required=True),
        Column("gateway", "string", "gateway that delivered its signals"),
        Column("session", "string", "name of the connection"),
        Column("boot", "string", "name of the run of the device since its last start"),
        Column("firmware", "string", "firmware version"),
        Column(
            "position", "long", "place in delivery order of its first message; identifies it with device and start", required=True
        ),
        Column("started_by", "string", "birth, or signal: another message while no session was open", required=True),
        Column("last_seen", "timestamp", "received_at of its newest signal", required=True),
        Column("messages", "long", "number of its signals, copies included", required=True),
        Column("ended_by", "string", "will, disconnect, birth (of another session) or silence; null in the row of its start"),
        Column("duration_ms", "long", "time from start to end, in milliseconds; null in the row of its start"),
    ),
)

VITALS: Final = Table(
    "vitals",
    "Values of metrics over windows of presence time, one row for each closed window; late values have rows of their own.",
    ("device_id", "site", "metric", "window_start", "window_end", "late", "closed_at"),
    (
        Column("device_id", "string", "id of the device", required=True),
        Column("metric", "string", "name of the metric", required=True),
        Column("window_start", "timestamp", "start of the window, which is in it", required=True),
        Column("window_end", "timestamp", "end of the window, which is not in it", required=True),
        Column("site", "string", "site in the topic of the messages", required=True),
        Column(
            "late",
            "boolean",
            "whether the row lists values that were late for the window; they are not in its other row",
            required=True,
        ),
        Column(
            "closed_at", "timestamp", "window_end; of late values: end of the slide in which they were received", required=True
        ),
        Column("count", "long", "number of values; copies of a message count once", required=True),
        Column("min", "double", "least value", required=True),
        Column("max", "double", "greatest value", required=True),
        Column("mean", "double", "mean, from a sum with 12 decimal places; null if the sum exceeds 2^63"),
        Column("last", "double", "value with the greatest presence time; of several: seq, then value", required=True),
        Column("last_at", "timestamp", "presence time of that value", required=True),
    ),
)

VITAL_ALARMS: Final = Table(
    "vital_alarms",
    "Broken bounds of metrics: one row when all values of a device have been beyond a bound for its time.",
    ("device_id", "site", "metric", "raised_at"),
    (
        Column("device_id", "string", "id of the device", required=True),
        Column("metric", "string", "name of the metric", required=True),
        Column("broken_from", "timestamp", "start of the first of the consecutive windows that break the bound", required=True),
        Column("raised_at", "timestamp", "end of the last of these windows", required=True),
        Column("site", "string", "site in the topic of the messages", required=True),
        Column("below", "double", "bound below which all values lie; null if the bound is above"),
        Column("above", "double", "bound above which all values lie; null if the bound is below"),
        Column("for_ms", "long", "time of the bound in the policy, in milliseconds", required=True),
        Column("last", "double", "last value of the last window", required=True),
    ),
)

COMMANDS: Final = Table(
    "commands",
    "Commands to devices and their answers, of the stream `commands`: a row when a command was sent, and a row for each "
    "answer, or after the timeout without one. The first answer to a command counts.",
    ("device_id", "command_id", "sent_at", "status", "answered_at", "answer_position"),
    (
        Column("device_id", "string", "id of the device", required=True),
        Column("sent_at", "timestamp", "received_at of the command; null if unmatched"),
        Column("answered_at", "timestamp", "received_at of the answer; null if pending or timed_out"),
        Column("command_id", "string", "id of the command", required=True),
        Column(
            "status", "string", "pending, acknowledged, rejected, timed_out, or unmatched: an answer without such a command", True
        ),
        Column("name", "string", "name of the command; null if unmatched"),
        Column("payload", "string", "JSON object: payload of the command; null if it has none"),
        Column("latency_ms", "long", "time from sent_at to answered_at, in milliseconds"),
        Column("reason", "string", "reason of the device"),
        Column("reported", "string", "JSON object: state that the device reported with the answer"),
        Column("answer_position", "long", "place in delivery order of the answer among the rows of its bridge and received_at"),
        Column("site", "string", "site in the topic of the command, or of an unmatched answer"),
        Column("timeout_ms", "long", "own timeout of the command, in milliseconds; null: setting `command_timeout`"),
    ),
)
