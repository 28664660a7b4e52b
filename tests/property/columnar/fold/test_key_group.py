"""The columnar fold equals the definition, step by step over random dense histories, cut and stored at random; no JVM.

What it emits is compared, the state of each device at the end, and behind each batch the instant at which a key group wakes.

A step is a row that was judged, or a deadline that changed a mode. ``FLEET_STEPS`` says how many are wanted, ``FLEET_SEED`` the
first history's seed: ``FLEET_STEPS=2000000 ./fleet test property -k columnar`` is the long form.
"""

import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeVar

import pytest

from fleetpulse.core.judgements import JudgementKind
from fleetpulse.core.replay import Outcome, outcome
from fleetpulse.core.rows import FOR_EVERYONE, Row
from tests.support.histories.dense import UNJUDGED, CutRow, JudgingParameters, dense_history, difference, difference_from
from tests.support.histories.histories import START

pytestmark = pytest.mark.property
STEPS = int(os.environ.get("FLEET_STEPS", "80000"))
SEED = int(os.environ.get("FLEET_SEED", "1"))
Item = TypeVar("Item")


def steps_of(rows: Sequence[Row], told: Outcome) -> int:
    """Count the rows that were judged and the deadlines that changed a mode."""
    of_devices = sum(one.kind not in FOR_EVERYONE for one in rows) - len(told.pending)
    unjudged = sum(one.kind in UNJUDGED and one.device_id not in ("_", "b") for one in told.judgements)
    return (
        of_devices - unjudged + sum(one.kind is JudgementKind.TRANSITION and one.message_kind is None for one in told.judgements)
    )


def shrunk(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Return some of the items that still fail, and of which none can be left out."""
    kept, size = list(items), max(1, len(items) // 2)
    while True:
        before, place = len(kept), 0
        while place < len(kept):
            fewer = kept[:place] + kept[place + size :]
            if fewer and fails(fewer):
                kept = fewer
            else:
                place += size
        if size == 1 and len(kept) == before:
            return kept
        size = max(1, size // 2)


def shown(seed: int, history: Sequence[CutRow], course: JudgingParameters) -> str:
    """Return the smallest history that still differs, and how to come by it."""
    last = history[-1]  # the flush, without which what a jitter holds back differs as well
    history = [*shrunk(history[:-1], lambda some: difference([*some, last], course) is not None), last]
    lines = [f"{'batch' if cut.begins else '':6}{(cut.row.received_at_ms - START) / 1000:10.3f} s {cut.row}" for cut in history]
    return "\n".join([f"FLEET_SEED={seed} FLEET_STEPS=1; {course}", *lines, difference(history, course) or "no difference"])


@pytest.mark.timeout(0 if STEPS > 1_000_000 else 300)
def test_the_columnar_fold_equals_the_definition_at_every_step() -> None:
    done = 0
    for seed in count(SEED):
        history, course = dense_history(seed)
        rows = [cut.row for cut in history]
        want = outcome(rows, course.deployment)
        if difference_from(want, history, course):
            pytest.fail(shown(seed, history, course), pytrace=False)
        done += steps_of(rows, want)
        if done >= STEPS:
            break
    assert done >= STEPS


def test_a_failing_history_shrinks_to_what_makes_it_fail() -> None:
    assert shrunk(range(1000), lambda some: {17, 803} <= set(some)) == [17, 803]
    assert shrunk([1, 2, 3], lambda some: True) == [3]
