"""Sessions of key groups: they equal the definition over random histories, cut and stored at random."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from itertools import pairwise
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from fleetpulse.columnar.codec.arrow import is_signal, signals_to_batch
from fleetpulse.columnar.streams.sessions import SessionGroup
from fleetpulse.core.rows import Kind, Row, key_group
from fleetpulse.core.streams.sessions import EndedBy, Session, StartedBy, sessions
from tests.support.histories.sessions import SILENCES_MS, connections

pytestmark = pytest.mark.property
GROUPS = 2


def one_batch(
    states: list[bytes], part: Sequence[Row], silence_ms: int, *, begins: bool = False, repeats: bool = True
) -> Counter[tuple[Any, ...]]:
    """Fold the rows of a batch into the stored states of all key groups; skip rows that a first batch has read before."""
    found: list[pa.RecordBatch] = []
    for group, stored in enumerate(states):
        state = SessionGroup.from_bytes(stored)
        signals = signals_to_batch([one for one in part if is_signal(one) and key_group(one.device_id, len(states)) == group])
        gaps = [one for one in part if one.kind is Kind.GAP]
        newest_ms = max([one.received_at_ms for one in part] + [state.shards.newest_ms] * begins)
        if begins:
            signals, gaps = state.unread(signals, gaps, repeats=repeats)
        found.append(state.fold(signals, gaps, newest_ms, silence_ms))
        states[group] = state.to_bytes()
    names = [field.name for field in fields(Session)]
    return Counter(tuple(one[name] for name in names) for batch in found for one in batch.to_pylist())


def folded(rows: Sequence[Row], cuts: Sequence[int], silence_ms: int) -> Counter[tuple[Any, ...]]:
    """Fold rows in batches as the stream does, with the stored form between two batches."""
    states = [SessionGroup.begin(rows[0].received_at_ms).to_bytes()] * GROUPS
    found: Counter[tuple[Any, ...]] = Counter()
    for start, end in pairwise([0, *cuts, len(rows)]):
        found += one_batch(states, rows[start:end], silence_ms)
    return found


def histories() -> Iterator[tuple[int, Random, list[Row], int, Counter[tuple[Any, ...]]]]:
    """Yield seeds with their random numbers, rows, limits of silence (milliseconds) and sessions by the definition."""
    for seed in range(60):
        random = Random(seed)
        rows, silence_ms = connections(random), random.choice(SILENCES_MS)
        yield seed, random, rows, silence_ms, Counter(astuple(one) for one in sessions(rows, silence_ms))


def test_batch_cuts_and_stored_forms_do_not_change_the_sessions() -> None:
    reasons: Counter[Any] = Counter()
    for seed, random, rows, silence_ms, want in histories():
        each = [*range(1, len(rows))]
        for cuts in ([], each[: 60 if seed % 3 else 0], sorted(random.sample(each, min(7, len(each))))):
            assert folded(rows, cuts, silence_ms) == want, (seed, cuts)
        reasons.update(one.ended_by or one.started_by for one in sessions(rows, silence_ms))
    assert min(reasons[reason] for reason in (*EndedBy, *StartedBy)) > 40


def between_instants(rows: Sequence[Row], number: int) -> int:
    """Return the least number of rows, at least ``number``, after which another instant begins."""
    while 0 < number < len(rows) and rows[number].received_at_ms == rows[number - 1].received_at_ms:
        number += 1
    return number


def test_a_checkpoint_continues_from_a_snapshot_of_a_version_that_ends_within_an_instant() -> None:
    """Landing reads an instant whole only if there are several bridges."""
    splits = 0
    for seed, random, rows, silence_ms, want in histories():
        shared = [at for at in range(1, len(rows)) if between_instants(rows, at) > at and rows[at].kind is not Kind.GAP]
        for taken in random.sample(shared, min(3, len(shared))):
            states = [SessionGroup.begin(rows[0].received_at_ms).to_bytes()] * GROUPS
            before = one_batch(states, rows[:taken], silence_ms)
            states = [one.to_bytes() for one in SessionGroup.joined([*map(SessionGroup.from_bytes, states)]).split(GROUPS)]
            assert before + one_batch(states, rows[taken:], silence_ms, begins=True, repeats=False) == want, (seed, taken)
            splits += 1
    assert splits > 20


def test_a_checkpoint_that_begins_with_a_snapshot_continues_as_if_it_was_never_interrupted() -> None:
    overlaps = 0
    for seed, random, rows, silence_ms, want in histories():
        taken, through, again = sorted(between_instants(rows, random.randrange(1, len(rows))) for _ in range(3))
        states = [SessionGroup.begin(rows[0].received_at_ms).to_bytes()] * GROUPS
        before = one_batch(states, rows[:taken], silence_ms)
        snapshot = SessionGroup.joined([SessionGroup.from_bytes(one) for one in states]).to_bytes({"version": 3})
        part = rows[taken:through]
        lost = (
            one_batch(states, part, silence_ms) if part else Counter[tuple[Any, ...]]()
        )  # the table has these rows, the checkpoint is lost
        states = [one.to_bytes() for one in SessionGroup.from_bytes(snapshot).split(random.choice([1, 2, 5]))]
        begin = random.choice([taken, between_instants(rows, random.randrange(taken))])  # a compacted file begins before it
        rebuilt = one_batch(states, rows[begin : max(again, taken + 1)], silence_ms, begins=True)
        if rest := rows[max(again, taken + 1) :]:
            rebuilt += one_batch(states, rest, silence_ms)
        assert not lost - rebuilt, "the same rows follow again, and are not written twice"
        assert before + rebuilt == want, seed
        overlaps += bool(lost)
    assert overlaps > 20
