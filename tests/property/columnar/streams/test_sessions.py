"""Sessions of key groups: they equal the definition over random histories, cut and stored at random."""

from collections import Counter
from collections.abc import Sequence
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


def folded(rows: Sequence[Row], cuts: Sequence[int], silence_ms: int) -> Counter[tuple[Any, ...]]:
    """Fold rows in batches as the stream does, with the stored form between two batches."""
    stored = [SessionGroup.begin(rows[0].received_at_ms).to_bytes()] * GROUPS
    found: list[pa.RecordBatch] = []
    for start, end in pairwise([0, *cuts, len(rows)]):
        part = rows[start:end]
        for group in range(GROUPS):
            state = SessionGroup.from_bytes(stored[group])
            mine = [one for one in part if is_signal(one) and key_group(one.device_id, GROUPS) == group]
            gaps = [one for one in part if one.kind is Kind.GAP]
            found.append(state.fold(signals_to_batch(mine), gaps, max(one.received_at_ms for one in part), silence_ms))
            stored[group] = state.to_bytes()
    names = [field.name for field in fields(Session)]
    return Counter(tuple(one[name] for name in names) for batch in found for one in batch.to_pylist())


def test_batch_cuts_and_stored_forms_do_not_change_the_sessions() -> None:
    reasons: Counter[Any] = Counter()
    for seed in range(60):
        random = Random(seed)
        rows, silence_ms = connections(random), random.choice(SILENCES_MS)
        want = Counter(astuple(one) for one in sessions(rows, silence_ms))
        each = [*range(1, len(rows))]
        for cuts in ([], each[: 60 if seed % 3 else 0], sorted(random.sample(each, min(7, len(each))))):
            assert folded(rows, cuts, silence_ms) == want, (seed, cuts)
        reasons.update(one.ended_by or one.started_by for one in sessions(rows, silence_ms))
    assert min(reasons[reason] for reason in (*EndedBy, *StartedBy)) > 40
