"""Going on from a snapshot where nobody knows how far the one before came: what its own logs would say, the table says.

A verdict is a function of the rows received. So all that follows from the snapshot is judged again, into a table of its own. What
is in `judgements` of it was said; the rest was not, and is said when the new generation has the work.

Rule 1: what was said since and does not follow from the snapshot is a reason to refuse: another state was gone on from then.
Rule 2: where rows of the table may have been removed that were said since, nobody knows, and it is refused.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import SparkSession

from batch.state.generation import GenerationSpec, Say, build
from batch.state.transfer import pack_by_key_group
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import AMENDMENTS, COMPARED, JudgementKind
from fleetpulse.core.tables import JUDGEMENTS, MESSAGES
from fleetpulse.core.times import format_instant
from fleetpulse.io.checkpoints.checkpoint import CheckpointPosition, committed, is_settled, position_after, query_id
from fleetpulse.io.checkpoints.generations import (
    Generation,
    checkpoint_of,
    discard_generation,
    load_generations,
    made_durable,
    save_generations,
)
from fleetpulse.io.delta.corruption import open_table
from fleetpulse.io.delta.log import DeltaLog, holds_table, is_committed
from fleetpulse.io.home.home import Home
from fleetpulse.io.home.retention_floor import oldest_kept_ms
from fleetpulse.io.system.fsync import put_in_place
from fleetpulse.io.system.wall_clock import wall_clock_ms
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.outbox import flush_outbox, outbox_path
from fleetpulse.io.tables.snapshots import SnapshotInfo, files_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_MEMORY: Final = "1GB"  # of the comparison; what is more goes to the disk
_SHOWN: Final = 5
_AT_ONCE: Final = 100_000  # verdicts that are said in one commit
_A_DAY_MS: Final = 86_400_000  # from a batch to the snapshot that was taken after it, beside a running job, at most
_DURATIONS: Final = ("runtime_ms", "late_by_ms")
_SAME: Final = ", ".join(f'"{name if name in _DURATIONS else name.removesuffix("_ms")}"' for name in COMPARED)
_OF_THE_JOB: Final = "kind NOT IN (" + ", ".join(f"'{kind.value}'" for kind in (JudgementKind.SUMMARY, *AMENDMENTS)) + ")"


def where_it_stopped(home: Home) -> tuple[CheckpointPosition | None, str]:
    """Return where the current generation stopped, by its logs of batches; None where they do not tell, and why."""
    number, checkpoint = home.generation().number, home.checkpoint
    try:
        if not committed(checkpoint):
            return None, "it has no batch that was committed"
        at = position_after(checkpoint)
        if not is_settled(checkpoint):
            return None, f"generation {number} was stopped in the middle of a batch"
        query = query_id(checkpoint)
    except FleetError as error:
        return None, str(error).partition(";")[0]
    told = home.table(JUDGEMENTS.name)
    said = open_table(told).transaction_version(query) if query and holds_table(told) else None
    if query is None or (said is not None and said > at.batch):
        return None, f"its last batches are gone: there are those up to {at.batch}, and judgements has those up to {said}"
    return at, ""


def require_since(home: Home, snapshot: SnapshotInfo) -> None:
    """See that all that was said since a snapshot is still in the table.

    Raises:
        FleetError: maintenance may have removed some of it.
    """
    kept_ms = oldest_kept_ms(home, "late")
    if kept_ms is not None and kept_ms + _A_DAY_MS > (snapshot.at_ms or 0):
        raise FleetError(
            f"what was said since snapshot version {snapshot.version} was taken is no longer in judgements as a whole: kept is "
            f"what was said from {format_instant(kept_ms)} on (keep_late); name a newer snapshot with --version, restore the "
            f"checkpoint from a backup, or play the history into another home",
            code="judgements-not-retained",
        )


def go_on(spark: SparkSession, home: Home, plan: GenerationSpec, snapshot: SnapshotInfo, say: Say) -> Generation:
    """Make a generation of a snapshot, find what is still to be said, and give it the work.

    Args:
        spark: the session.
        home: the home, its state held by the caller.
        plan: what it is made of: all rows of the snapshot.
        snapshot: that.
        say: told each step.

    Raises:
        FleetError: what was said since does not follow from the snapshot; nothing has changed then.
    """
    through = max(DeltaLog(home.table(MESSAGES.name)).latest() + 1, plan.bronze)
    at, aside = CheckpointPosition(-1, through, snapshot.newest_ms, plan.partitions), home.lifecycle / "told-again"
    try:
        with pack_by_key_group(plan.rows, plan.key_groups) as given:
            pending = given.account.pending
            made = build(spark, home, plan, given, at, say, aside)
        due, unsaid = _switched(home, made, aside, pending, snapshot, say)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    say(f"saying what was not said: {unsaid:,} of {due:,} verdicts that follow from the snapshot")
    flush_outbox(home, made.number)
    return made


def _switched(
    home: Home, made: Generation, aside: Path, pending: Iterable[str], snapshot: SnapshotInfo, say: Say
) -> tuple[int, int]:
    """Find what is still to be said, and give the work to a generation; return as `_left` does."""
    try:
        say("comparing what follows from the snapshot with what was said since")
        counts = _left(home, made, aside, pending, snapshot)
        made_durable(home.lifecycle, made.number)
        record = load_generations(home.lifecycle)
        stands = {"damaged": True, "retired_at_ms": wall_clock_ms()}
        save_generations(home.lifecycle, record.switched(made.number, stands))
    except BaseException:
        if home.generation().number != made.number:
            discard_generation(home.lifecycle, made)
        raise
    say(
        f"generation {made.number} is current; generation {record.current} cannot be gone back to: ./fleet state prune removes it"
    )
    return counts


def _left(home: Home, made: Generation, aside: Path, pending: Iterable[str], snapshot: SnapshotInfo) -> tuple[int, int]:
    """Write beside a generation's checkpoint what is still to be said; return how many verdicts follow, and how many are left.

    Raises:
        FleetError: some were said that do not follow.
    """
    shell = {"judged_at_ms": wall_clock_ms(), "generation": made.number}
    again = files_of(aside, open_table(aside).version()) if is_committed(aside) else []
    with tables.connect() as connection:
        connection.execute(f"SET memory_limit='{_MEMORY}'")
        connection.execute("SET temp_directory=$folder", {"folder": str(aside / "spilled")})
        tables.open_files(connection, "again", JUDGEMENTS, again)
        tables.open_files(connection, "told", JUDGEMENTS, tables.paths_of(home, JUDGEMENTS))
        connection.register("pending", tables.to_table(JUDGEMENTS, [{**json.loads(one), **shell} for one in pending]))
        connection.execute(
            f"""CREATE TABLE beside AS SELECT *,
                count(*) FILTER (side = 'told') OVER (PARTITION BY {_SAME}) AS said,
                count(*) FILTER (side = 'due') OVER (PARTITION BY {_SAME}) AS due,
                row_number() OVER (PARTITION BY side, {_SAME}) AS nth
            FROM (SELECT *, 'due' AS side FROM (SELECT * FROM again UNION ALL BY NAME SELECT * FROM pending)
                  UNION ALL BY NAME SELECT *, 'told' AS side FROM told) WHERE {_OF_THE_JOB}"""
        )
        _require_following(connection, snapshot)
        columns = ", ".join(f'"{column.name}"' for column in JUDGEMENTS.columns)
        left = f"SELECT {columns} FROM beside WHERE side = 'due' AND nth > said ORDER BY event_time, device_id, transition_no"
        [counts] = tables.fetch(
            connection,
            "SELECT count(*) FILTER (side = 'due') AS due, count(*) FILTER (side = 'due' AND nth > said) AS unsaid FROM beside",
        )
        if counts["unsaid"]:
            _write(connection, left, outbox_path(checkpoint_of(home.lifecycle, made.number)))
    return int(counts["due"]), int(counts["unsaid"])


def _require_following(connection: "DuckDBPyConnection", snapshot: SnapshotInfo) -> None:
    since = "TRUE"
    parameters: Sequence[Any] = []
    if snapshot.newest_ms is not None:
        since = "(epoch_ms(received_at) > ? OR (received_at IS NULL AND epoch_ms(event_time) > ?))"
        parameters = [snapshot.newest_ms, snapshot.frontier_ms or snapshot.newest_ms]
    strange = f"FROM beside WHERE side = 'told' AND nth > due AND {since}"
    [counts] = tables.fetch(connection, f"SELECT count(*) AS n {strange}", parameters)
    if counts["n"]:
        shown = tables.fetch(connection, f"SELECT kind, device_id {strange} ORDER BY ALL LIMIT {_SHOWN}", parameters)
        raise FleetError(
            f"{counts['n']:,} verdicts were said since snapshot version {snapshot.version} that do not follow from it ("
            + ", ".join(f"{one['kind']} of {one['device_id']}" for one in shown)
            + "): another state was gone on from since; nothing has changed; name another snapshot with --version",
            code="judgements-do-not-follow",
        )


def _write(connection: "DuckDBPyConnection", sql: str, path: Path) -> None:
    fresh = path.with_suffix(".new")
    named = str(fresh).replace("'", "''")
    connection.execute(f"COPY ({sql}) TO '{named}' (FORMAT parquet, ROW_GROUP_SIZE {_AT_ONCE})")
    put_in_place(fresh, path)
