"""Two generations side by side over the live input: the newer one says what it says into a table of its own, and is compared.

Rule 1: the running one knows nothing of it; it is stopped once, at the end, for as long as the two are compared.
Rule 2: what the running one still had to say where the newer one began is pending in the state that it was begun from.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pyarrow.parquet as pq

from batch.carried import compare, packed, summed
from batch.generation import Plan, await_end, build, settle, state_of, take_over
from batch.verbs import Work
from fleetpulse.core.errors import FleetError
from fleetpulse.core.judgements import COMPARED, Verdict
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.checkpoint import Stand, newest_begun, query_id, stand
from fleetpulse.io.generations import Generation, checkpoint_of, discard_generation
from fleetpulse.io.lifecycle_query import start

Bag = Counter[tuple[Any, ...]]
_SHOWN: Final = 5
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


def canary(work: Work, verb: str, trial: Trial) -> Generation:
    """Run a newer generation beside the one that runs, compare what both say, and give it the work if that is the same.

    Raises:
        FleetError: they differ; the newer one is discarded, and the one that ran goes on.
    """
    spark, home, say = work.spark, work.home, work.say
    current, began = home.generation(), stand(home.checkpoint)
    plan = Plan(
        f"{verb} --canary",
        {"generation": current.number, "batch": began.batch},
        state_of(spark, home, current, began),
        began.version,
        trial.key_groups,
        began.partitions,
        trial.form,
        chosen=True,
    )
    with packed(plan.rows, plan.key_groups) as given:  # at once: the running job keeps a batch until it has done twenty more
        made = build(spark, home, plan, given, began, say)
    pending = _pending(given.account.pending)
    aside = home.lifecycle / f"told-{made.number:04d}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        say(f"both generations judge the live input for {trial.for_s:.0f} s; generation {made.number} says it aside")
        _side_by_side(work, made, aside, trial.for_s)
        with trial.stopped():
            at = settle(spark, home, say, newest_begun(checkpoint_of(home.lifecycle, made.number)))
            await_end(start(spark, home, None, generation=made, through=at.version, told=aside))
            say("comparing what both have said, all devices, and all that waits")
            was = _said(home.table(JUDGEMENTS.name), query_id(home.checkpoint), began, at)
            now = pending + _said(aside, query_id(checkpoint_of(home.lifecycle, made.number)), None, None)
            if was != now:
                raise _differ(current, made, was, now)
            compare(summed(state_of(spark, home, current, at)), summed(state_of(spark, home, made)), made)
            say(f"{sum(was.values()):,} judgements, all the same")
            take_over(home, made, at, say)
    except BaseException:
        if home.generation().number != made.number:
            discard_generation(home.lifecycle, made)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return made


def _side_by_side(work: Work, made: Generation, aside: Path, for_s: float) -> None:
    query = start(work.spark, work.home, generation=made, told=aside)
    limit = time.monotonic() + for_s
    try:
        while time.monotonic() < limit:
            if not query.isActive:
                raise FleetError(f"generation {made.number} stopped by itself: {str(query.exception()).splitlines()[0][:500]}")
            time.sleep(_LOOK_S)
    finally:
        query.stop()


def _pending(contents: Iterable[str]) -> Bag:
    return Counter(_compared(json.loads(content)) for content in contents)


def _said(table: Path, query: str | None, after: Stand | None, through: Stand | None) -> Bag:
    """Return what a query has written to a table, summaries left out, in the batches after one and through another."""
    bag: Bag = Counter()
    for path in _files(table, query, after.batch if after else -1, through.batch if through else None):
        kind = path.parent.name.removeprefix("kind=")
        if kind != Verdict.SUMMARY:
            bag.update(_compared({**row, "kind": kind}) for row in pq.ParquetFile(path).read().to_pylist())
    return bag


def _files(table: Path, query: str | None, after: int, through: int | None) -> Iterator[Path]:
    for commit in sorted((table / "_delta_log").glob("*.json")):
        if not commit.stem.isdecimal():
            continue
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        batches = [one["txn"]["version"] for one in actions if "txn" in one and one["txn"]["appId"] == query]
        if batches and batches[0] > after and (through is None or batches[0] <= through):
            yield from (table / unquote(one["add"]["path"]) for one in actions if "add" in one)


def _compared(row: dict[str, Any]) -> tuple[Any, ...]:
    values: list[Any] = []
    for name in COMPARED:
        stored = row.get(name, row.get(name.removesuffix("_ms")))
        values.append(round(stored.timestamp() * 1000) if isinstance(stored, datetime) else stored)
    return tuple(values)


def _differ(before: Generation, after: Generation, was: Bag, now: Bag) -> FleetError:
    shown = [
        f"{one[COMPARED.index('kind')]} of {one[COMPARED.index('device_id')]}" for one in ((was - now) | (now - was)).elements()
    ]
    return FleetError(
        f"generation {after.number} does not say what generation {before.number} says, and is discarded: "
        f"{sum((was - now).values()):,} judgements are missing, {sum((now - was).values()):,} are too many: "
        f"{', '.join(shown[:_SHOWN])}; nothing has changed"
    )
