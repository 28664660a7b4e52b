"""Home of a large fleet for benchmarks, generated in the declared tables without broker and job.

Rule: all histories have the same devices, and end at the same instant.
"""

import json
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from fleetpulse.core.catalog import TABLES
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import hash64
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES, Table
from fleetpulse.core.times import DAY_MS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.row_accounting import IngestCounters

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

NOW_MS: Final = 1_764_000_000_000
ID: Final = "pump-0001234"
SPAN_MS: Final = 30 * DAY_MS  # of the transitions
_ROWS: Final = 250_000  # rows of a commit
_SORTED: Final = 1_000_000  # transitions that are sorted at once


def generate(home: Home, devices: int, history: int, messages_each: int | None = None, span_ms: int = SPAN_MS) -> tuple[int, int]:
    """Write transitions and messages of a fleet; return the number of each.

    Args:
        home: home to write.
        devices: number of devices.
        history: length of the history, as a multiple of about 4.5 transitions a device.
        messages_each: number of messages of a device; None: three times the history.
        span_ms: time between the first and the last transition, milliseconds.
    """
    home.prepare(Deployment())
    for table in TABLES:
        tables.create(home, table)
    with tables.connect() as connection:
        _create_fleet(connection, devices, f"{4 * history} + n % {history + 1}")
        transitions, slices = 0, 4 * history * devices // _SORTED + 1
        for number in range(slices):
            first_ms, until_ms = (number * span_ms // slices, (number + 1) * span_ms // slices)
            beyond_ms = 1 if number == slices - 1 else 0  # the newest is at the end of the span
            sql = _TRANSITIONS.format(now=NOW_MS, span=span_ms, first=first_ms, until=until_ms + beyond_ms)
            transitions += append(home, JUDGEMENTS, connection, sql)
        last = 3 * history if messages_each is None else messages_each
        messages = append(home, MESSAGES, connection, _MESSAGES.format(now=NOW_MS, last=last, first=0))
    commit_batch(home, NOW_MS)
    return transitions, messages


def _create_fleet(connection: "DuckDBPyConnection", devices: int, changes: str) -> None:
    """Create the table of the devices, with their number of transitions."""
    hashes = pa.table({"n": range(devices), "device_hash": [hash64(f"pump-{n:07d}") for n in range(devices)]})
    connection.register("hashes", hashes)
    connection.execute(f"""CREATE TABLE fleet AS SELECT n, device_hash, format('pump-{{:07d}}', n) AS device_id,
        format('site-{{:03d}}', floor(sqrt(hash(n) % 250000))::INT) AS site, format('class-{{}}', n % 6) AS device_class,
        {changes} AS changes FROM hashes""")


_TRANSITIONS: Final = """
    SELECT 'transition' AS kind, device_id, site, device_class, epoch_ms(life) AS life_ms, j + 1 AS transition_no,
           CASE WHEN j % 2 = 1 THEN 'online' ELSE 'offline' END AS from_mode,
           CASE WHEN j % 2 = 0 THEN 'online' WHEN n % 37 = 0 THEN 'degraded' ELSE 'offline' END AS to_mode,
           CASE WHEN j % 2 = 0 THEN 'signal' ELSE 'silence' END AS "trigger", epoch_ms(moment) AS event_time_ms,
           epoch_ms(moment - INTERVAL 3 MINUTE) AS last_seen_ms, 1000 * j AS runtime_ms, '[]' AS last_errors,
           'p1' AS policy_version, epoch_ms(moment + INTERVAL 1 MINUTE) AS judged_at_ms, 1 AS generation
    FROM (SELECT *, make_timestamp(1000 * ({now} - {span}))::TIMESTAMPTZ AS life,
                 make_timestamp(1000 * ({now} - {span} + after_ms))::TIMESTAMPTZ AS moment
          FROM (SELECT *, ((j + (hash(n, j) % 1000) / 1000.0) / changes * {span})::BIGINT AS after_ms
                FROM (SELECT *, unnest(range(greatest(0, floor({first} / {span} * changes)::BIGINT - 1),
                             least(changes, ceil({until} / {span} * changes)::BIGINT + 1))) AS j FROM fleet))
          WHERE after_ms >= {first} AND after_ms < {until})
    ORDER BY moment, device_id
"""
_MESSAGES: Final = """
    SELECT epoch_ms(moment) AS received_at_ms, epoch_ms(moment) AS event_time_ms, 'telemetry' AS kind, device_id, site,
           'device' AS clock, 'b1' AS boot, j AS seq, '{{"temperature": 21.5}}' AS metrics, n AS digest, 0 AS position,
           device_hash, 'mqtt' AS origin, 'bridge-1' AS bridge, 1 AS segment
    FROM (SELECT *, make_timestamp(1000 * ({now} - ({last} - j) * 60000 + (hash(n) % 60000)::BIGINT))::TIMESTAMPTZ AS moment
          FROM fleet, range({first}, {last}) AS numbers(j))
    ORDER BY moment, device_id
"""


def append(home: Home, table: Table, connection: "DuckDBPyConnection", sql: str) -> int:
    """Append the rows of a query in commits of `_ROWS` rows; return their number."""
    count, number = 0, tables.landed(home, table, "bench")
    for batch in connection.sql(sql).to_arrow_reader(_ROWS):
        rows = pa.Table.from_batches([batch])
        count, number = count + rows.num_rows, number + 1
        held = tables.from_columns(table, {name: rows[name] for name in rows.column_names}, rows.num_rows)
        counters = IngestCounters(count, 0).numbers() if table is MESSAGES else {}
        tables.append_of(home, table, held, {"bench": number, **counters})
    return count


def add_newer(home: Home, devices: int) -> None:
    """Add a minute of messages, and a transition of every two-hundredth device."""
    with tables.connect() as connection:
        _create_fleet(connection, devices, "1")
        newest = """SELECT 'transition' AS kind, device_id, site, device_class, {life} AS life_ms, 1000 AS transition_no,
            'offline' AS from_mode, 'online' AS to_mode, 'signal' AS "trigger", {now} + n % 60000 AS event_time_ms,
            {now} AS last_seen_ms, 0 AS runtime_ms, '[]' AS last_errors, 'p1' AS policy_version, {now} + 60000 AS judged_at_ms,
            1 AS generation FROM fleet WHERE n % 200 = 0 ORDER BY event_time_ms, device_id"""
        append(home, JUDGEMENTS, connection, newest.format(now=NOW_MS, life=NOW_MS - SPAN_MS))
        append(home, MESSAGES, connection, _MESSAGES.format(now=NOW_MS + 60_000, last=1, first=0))
    commit_batch(home, NOW_MS + 60_000)


def add_transitions(home: Home, number: int, count: int, devices: int, span_ms: int = SPAN_MS) -> None:
    """Commit transitions of some devices, as a batch of the lifecycle job does.

    Args:
        home: home of the fleet.
        number: number of the batch, from 1; other devices change in each.
        count: number of devices that change.
        devices: number of devices of the fleet.
        span_ms: time between the first and the last transition of the home, see `generate`.
    """
    rows = [
        {
            "kind": "transition", "device_id": f"pump-{(number * count + n) * 7_919 % devices:07d}", "site": "site-001",
            "device_class": "class-1", "life_ms": NOW_MS - span_ms, "transition_no": 2_000 + number, "from_mode": "online",
            "to_mode": ("offline", "online")[number % 2], "trigger": ("silence", "signal")[number % 2],
            "event_time_ms": NOW_MS + 60_000 + number, "last_seen_ms": NOW_MS, "runtime_ms": 0, "last_errors": "[]",
            "policy_version": "p1", "judged_at_ms": NOW_MS + 60_000 + number, "generation": 1,
        }
        for n in range(count)
    ]  # fmt: skip
    tables.append_of(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), {"bench-live": number})


def commit_batch(home: Home, received_ms: int) -> None:
    """Write the files of a committed batch that judged rows up to an instant."""
    for folder in ("offsets", "commits"):
        (home.checkpoint / folder).mkdir(parents=True, exist_ok=True)
    number = len(list((home.checkpoint / "offsets").iterdir()))
    metadata = json.dumps({"batchWatermarkMs": received_ms - 1, "conf": {"spark.sql.shuffle.partitions": "2"}})
    position = json.dumps({"version": 1})
    (home.checkpoint / "offsets" / str(number)).write_text(f"v1\n{metadata}\n{position}\n", encoding="utf-8")
    committed = json.dumps({"nextBatchWatermarkMs": received_ms - 1})
    (home.checkpoint / "commits" / str(number)).write_text(f"v1\n{committed}", encoding="utf-8")
