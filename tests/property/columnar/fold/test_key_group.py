"""Columnar fold without a JVM: it equals the definition over random dense histories, cut and stored at random.

The test compares the judgements, the final state of each device, and after each batch the timer of each key group.

A step is a judged row, or a deadline that changed a mode. ``FLEET_STEPS`` sets the number of steps, and ``FLEET_SEED`` the seed
of the first history. The long form is ``FLEET_STEPS=2000000 ./fleet test property -k columnar``.
"""

import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeVar

import pytest

from fleetpulse.core.judgements import JudgementKind, compared
from fleetpulse.core.replay import Deployment, Outcome, outcome, replay
from fleetpulse.core.rows import FOR_EVERYONE, Row
from tests.support.form import IS_LONG
from tests.support.histories.dense import UNJUDGED, CutRow, JudgingParameters, dense_history, difference, difference_from
from tests.support.histories.histories import START, positioned, row, signal, tick
from tests.support.histories.key_groups import in_batches

pytestmark = pytest.mark.property
STEPS = int(os.environ.get("FLEET_STEPS", "80000" if IS_LONG else "30000"))
SEED = int(os.environ.get("FLEET_SEED", "1"))
Item = TypeVar("Item")


def steps_of(rows: Sequence[Row], result: Outcome) -> int:
    """Count the rows that were judged and the deadlines that changed a mode."""
    of_devices = sum(one.kind not in FOR_EVERYONE for one in rows) - len(result.pending)
    unjudged = sum(one.kind in UNJUDGED and one.device_id not in ("_", "b") for one in result.judgements)
    return (
        of_devices
        - unjudged
        + sum(one.kind is JudgementKind.TRANSITION and one.message_kind is None for one in result.judgements)
    )


def shrunk(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Return a subset of the items that still fails, from which no item can be removed."""
    kept, size = list(items), max(1, len(items) // 2)
    while True:
        before, start = len(kept), 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if fewer and fails(fewer):
                kept = fewer
            else:
                start += size
        if size == 1 and len(kept) == before:
            return kept
        size = max(1, size // 2)


def describe_difference(seed: int, history: Sequence[CutRow], parameters: JudgingParameters) -> str:
    """Return the smallest history with a difference, and the variables that reproduce it."""
    last = history[-1]  # the flush, without which judgements that a jitter delays would differ too
    history = [*shrunk(history[:-1], lambda some: difference([*some, last], parameters) is not None), last]
    lines = [f"{'batch' if cut.begins else '':6}{(cut.row.received_at_ms - START) / 1000:10.3f} s {cut.row}" for cut in history]
    return "\n".join(
        [f"FLEET_SEED={seed} FLEET_STEPS=1; {parameters}", *lines, difference(history, parameters) or "no difference"]
    )


@pytest.mark.timeout(0 if STEPS > 1_000_000 else 300)
def test_the_columnar_fold_equals_the_definition_at_every_step() -> None:
    steps = 0
    for seed in count(SEED):
        history, parameters = dense_history(seed)
        rows = [cut.row for cut in history]
        want = outcome(rows, parameters.deployment)
        if difference_from(want, history, parameters):
            pytest.fail(describe_difference(seed, history, parameters), pytrace=False)
        steps += steps_of(rows, want)
        if steps >= STEPS:
            break
    assert steps >= STEPS


def test_a_split_of_a_shard_keeps_its_pending_gateway_rows_in_each_part() -> None:
    died = row(20, "g/death", gateway="g")
    gap = [row(24, "fleet/_/b/gap", op="open", from_s=24, sites=["south"]), row(80, "fleet/_/b/gap", op="close", until_s=80)]
    behind = [signal(10, "a", gateway="g"), row(11, "fleet/south/b/heartbeat", ts_s=11)]
    rows = positioned([*behind, died, *gap, tick(400)])
    want = replay(rows, Deployment(60_000))
    assert [one.device_id for one in want if one.trigger == "gateway_death"] == ["a"]
    assert in_batches(rows, [3, 4], Deployment(60_000), 1) == compared(want)


def test_a_failing_history_shrinks_to_the_rows_that_make_it_fail() -> None:
    assert shrunk(range(1000), lambda some: {17, 803} <= set(some)) == [17, 803]
    assert shrunk([1, 2, 3], lambda some: True) == [3]
