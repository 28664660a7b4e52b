"""Two generations side by side over the live input: the newer one says what it says into a table of its own, and is compared.

Rule 1: the running one knows nothing of it; it is stopped once, at the end, for as long as the two are compared.
Rule 2: what the running one still had to say where the newer one began is pending in the state that it was begun from.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pyarrow as pa

from batch.common.progress import Paced
from batch.state.generation import GenerationSpec, activate, await_end, build, drain, judged_version, state_of
from batch.state.operations import StateOperation
from batch.state.transfer import compare, pack_by_key_group, with_checksum
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.checkpoints.checkpoint import newest_begun, position_after, query_id
from fleetpulse.io.checkpoints.generations import Generation, checkpoint_of, discard_generation
from fleetpulse.io.delta.log import actions_of
from fleetpulse.io.lifecycle.query import start
from fleetpulse.io.tables.tables import connect, fetch, open_files
from fleetpulse.reports.agreement import AS_COMPARED

_SHOWN: Final = 5
_MEMORY: Final = "1GB"  # of the comparison; what is more goes to the disk
_LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Trial:
    """How a canary is run.

    Attributes:
        key_groups: of the newer generation.
        form: likewise, its stored form.
        for_s: how long both run side by side, seconds.
        stopped: holds the running job stopped, and its state, as long as it is entered.
    """

    key_groups: int
    form: int
    for_s: float
    stopped: Callable[[], AbstractContextManager[None]]


def canary(work: StateOperation, verb: str, trial: Trial) -> Generation:
    """Run a newer generation beside the one that runs, compare what both say, and give it the work if that is the same.

    Raises:
        FleetError: they differ; the newer one is discarded, and the one that ran goes on.
    """
    spark, home, say = work.spark, work.home, work.say
    current, began = home.generation(), position_after(home.checkpoint)
    plan = GenerationSpec(
        f"{verb} --canary",
        {"generation": current.number, "batch": began.batch},
        state_of(spark, home, current, began),
        began.version,
        trial.key_groups,
        began.partitions,
        trial.form,
        chosen=True,
    )
    with pack_by_key_group(
        plan.rows, plan.key_groups
    ) as given:  # at once: the running job keeps a batch until it has done twenty more
        made = build(spark, home, plan, given, began, say)
    aside = home.lifecycle / f"told-{made.number:04d}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        say(f"both generations judge the live input for {trial.for_s:.0f} s; generation {made.number} says it aside")
        _side_by_side(work, made, aside, trial.for_s)
        with trial.stopped():
            at = drain(spark, home, say, newest_begun(checkpoint_of(home.lifecycle, made.number)))
            query = start(spark, home, None, generation=made, through=at.version, told=aside)
            await_end(query, lambda version: say(f"canary: bronze is judged up to version {version} of {at.version}"))
            say("comparing what both have said")
            was = _files(home.table(JUDGEMENTS.name), query_id(home.checkpoint), began.batch, at.batch)
            now = _files(aside, query_id(checkpoint_of(home.lifecycle, made.number)))
            try:
                judged = _agreed(aside / "spilled", was, now, given.account.pending)
            except FleetError as error:
                raise FleetError(
                    f"generation {made.number} does not say what generation {current.number} says, and is discarded: "
                    f"{error}; nothing has changed",
                    code="canary-differs",
                ) from error
            say("comparing all devices, and all that waits")
            compare(with_checksum(state_of(spark, home, current, at)), with_checksum(state_of(spark, home, made)), made)
            say(f"{judged:,} judgements, all the same")
            shutil.rmtree(aside, ignore_errors=True)  # not behind the switch: who is killed there has nothing left to do
            activate(home, made, at, say)
    except BaseException:
        if home.generation().number != made.number:
            discard_generation(home.lifecycle, made)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return made


def _side_by_side(work: StateOperation, made: Generation, aside: Path, for_s: float) -> None:
    query = start(work.spark, work.home, generation=made, told=aside)
    began, far, said = time.monotonic(), Paced(work.say), Said(aside)

    def watched() -> str:
        gone_s, judged = time.monotonic() - began, position_after(work.home.checkpoint).version
        reached = judged_version(query)
        so_far = "none of bronze yet" if reached is None else f"bronze up to version {reached}"
        return (
            f"canary: {gone_s:.0f} s of {for_s:.0f} s; generation {made.number} has judged {so_far}, the running one up to "
            f"{judged}; {said.count():,} judgements said aside"
        )

    try:
        while time.monotonic() < began + for_s:
            if not query.isActive:
                raise FleetError(
                    f"generation {made.number} stopped by itself: {str(query.exception()).splitlines()[0][:500]}",
                    code="canary-job-ended",
                )
            far(watched)
            time.sleep(_LOOK_S)
    finally:
        query.stop()


class Said:
    """Counts what is written to a table while it is written: its log says how much that is, and each entry is read once.

    Args:
        table: its folder; it may not be there yet.
    """

    def __init__(self, table: Path) -> None:
        self._log, self._next, self._count = table / "_delta_log", 0, 0

    def count(self) -> int:
        """Return how many rows there are by now."""
        while (entry := self._log / f"{self._next:020}.json").exists():
            try:
                added = [one["add"] for one in actions_of(entry) if "add" in one]
                self._count += sum(int(json.loads(one["stats"])["numRecords"]) for one in added)
            except (ValueError, KeyError, TypeError):
                break  # it is being written, or says nothing of rows: only people are told
            self._next += 1
        return self._count


def _agreed(scratch: Path, was: Iterable[Path], now: Iterable[Path], pending: Iterable[str]) -> int:
    """Compare what two generations have written, summaries left out, in bounded memory; what was pending is of the second.

    Returns:
        How many judgements there are.

    Raises:
        FleetError: they differ: by how many, and in what.
    """
    with connect() as connection:
        connection.execute(f"SET memory_limit='{_MEMORY}'")
        connection.execute("SET temp_directory=$folder", {"folder": str(scratch)})
        for name, files in (("was", was), ("now", now)):
            open_files(connection, name, JUDGEMENTS, list(files))
        form = connection.sql(f"SELECT {AS_COMPARED} FROM was LIMIT 0").to_arrow_table().schema
        connection.register("pending", pa.Table.from_pylist([json.loads(content) for content in pending], form))
        said = f"SELECT {AS_COMPARED} FROM {{}} WHERE kind <> '{JudgementKind.SUMMARY}'"
        connection.execute(
            "CREATE TABLE differ AS SELECT * EXCLUDE side, sum(side) AS times "
            f"FROM (SELECT *, 1 AS side FROM ({said.format('was')}) UNION ALL SELECT *, -1 FROM ({said.format('now')}) "
            "UNION ALL SELECT *, -1 FROM pending) GROUP BY ALL HAVING sum(side) <> 0"
        )
        [counts] = fetch(
            connection,
            "SELECT (SELECT count(*) FROM was WHERE kind <> ?) AS judged, "
            "coalesce(sum(greatest(times, 0)), 0)::BIGINT AS missing, "
            "coalesce(sum(greatest(-times, 0)), 0)::BIGINT AS extra FROM differ",
            [JudgementKind.SUMMARY],
        )
        if counts["missing"] or counts["extra"]:
            shown = fetch(connection, f"SELECT kind, device_id FROM differ ORDER BY ALL LIMIT {_SHOWN}")
            raise FleetError(
                f"{counts['missing']:,} judgements are missing, {counts['extra']:,} are too many: "
                + ", ".join(f"{one['kind']} of {one['device_id']}" for one in shown),
                code="canary-differs",
            )
        return int(counts["judged"])


def _files(table: Path, query: str | None, after: int = -1, through: int | None = None) -> Iterator[Path]:
    """Name the files that a query has written to a table, in the batches after one and through another."""
    for commit in sorted((table / "_delta_log").glob("*.json")):
        if not commit.stem.isdecimal():
            continue
        actions = actions_of(commit)
        batches = [one["txn"]["version"] for one in actions if "txn" in one and one["txn"]["appId"] == query]
        if batches and batches[0] > after and (through is None or batches[0] <= through):
            yield from (table / unquote(one["add"]["path"]) for one in actions if "add" in one)
