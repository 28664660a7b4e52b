"""Definition of sessions: it equals an independent computation in SQL over the same bronze, row by row."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fleetpulse.core.rows import Kind, Row
from fleetpulse.core.streams.sessions import EndedBy
from tests.support.histories.histories import START, row, stamped_by_bridge
from tests.support.histories.session_sql import sessions_by_sql
from tests.support.histories.sessions import SILENCES_MS, connections, counted, defined
from tests.support.histories.streams import DEPLOYMENT, history
from tests.support.homes.homes import landed_home

pytestmark = pytest.mark.property


def with_outages(rows: Sequence[Row], random: Random) -> list[Row]:
    """Return rows with some of their pauses as outages of the one bridge that serves all sites."""
    pauses = [(one.received_at_ms, other.received_at_ms) for one, other in pairwise(rows)]
    outages = random.sample(pauses, min(8, len(pauses)))
    found = list(rows)
    for begin_ms, end_ms in outages:
        if end_ms - begin_ms > 1_000:
            begin_s, end_s = (begin_ms - START) / 1000, (end_ms - START) / 1000
            found.append(row(end_s - 0.002, "fleet/_/b/gap", op="open", from_s=begin_s))
            found.append(row(end_s - 0.001, "fleet/_/b/gap", op="close", until_s=end_s - 0.001))
    return stamped_by_bridge(found)


def with_answers(rows: Sequence[Row]) -> list[Row]:
    """Return rows with some heartbeats as answers to commands, which are signals, too."""
    return [replace(one, kind=Kind.ACK) if one.kind is Kind.HEARTBEAT and one.digest % 3 == 0 else one for one in rows]


def test_the_sessions_equal_those_by_sql(tmp_path: Path) -> None:
    reasons: Counter[Any] = Counter()
    for seed in range(30):
        random = Random(seed)
        silence_ms = random.choice(SILENCES_MS)
        rows = with_answers(with_outages([one for one in connections(random) if one.kind is not Kind.GAP], random))
        found = counted(sessions_by_sql(landed_home(tmp_path / str(seed), rows, DEPLOYMENT), silence_ms))
        assert found == defined(rows, silence_ms), seed
        reasons.update(one[-2] for one in found)
    assert min(reasons[reason] for reason in EndedBy) > 10


def test_the_sessions_of_a_simulated_fleet_equal_those_by_sql(tmp_path: Path) -> None:
    rows = [one for one in history(3) if one.kind is not Kind.GAP]
    found = counted(sessions_by_sql(landed_home(tmp_path / "home", rows, DEPLOYMENT), 600_000))
    assert found == defined(rows, 600_000) and len(found) > 40
