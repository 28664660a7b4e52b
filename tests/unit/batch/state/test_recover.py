"""Judgements that a recovery emits: only those without an emitted row; a row may be for several messages."""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake

from batch.state.recover import _left  # pyright: ignore[reportPrivateUsage]
from fleetpulse.core.judgements import Judgement, compared
from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.checkpoints.generations import Generation, checkpoint_of
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables
from fleetpulse.io.tables.outbox import flush_outbox
from fleetpulse.io.tables.snapshots import SnapshotInfo
from fleetpulse.reports.operations.agreement import differences, emitted
from tests.support.histories.floods import FIRST_MS, flood, summed
from tests.support.homes.homes import empty
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
HOUR_MS = 3_600_000
SNAPSHOT = SnapshotInfo(1, 1, 1, FIRST_MS - 1, FIRST_MS - 1, 0, 1)
NEW = Generation(2, 1, 1, "recover", {})


def _rows(judgements: Sequence[Judgement]) -> list[Mapping[str, Any]]:
    return [{**asdict(one), "last_errors": None} for one in judgements]


def _home(path: Path, *calls: Sequence[Judgement]) -> Home:
    """Return a home whose job emitted judgements before the snapshot, and in some calls after it."""
    home = empty(path, Deployment())
    earlier = [replace(one, received_at_ms=(one.received_at_ms or 0) - HOUR_MS) for one in flood(random.Random(1), 50)]
    old = summed([replace(one, device_id="old") for one in earlier], FIRST_MS - 1)
    for number, judgements in enumerate((old, *map(summed, calls)), 1):
        tables.append(home, JUDGEMENTS, tables.to_table(JUDGEMENTS, _rows(judgements)), "job", number)
    return home


def _recover(home: Home, due: Sequence[Judgement], pending: int) -> tuple[int, int]:
    scratch = home.path / "scratch"
    write_deltalake(str(scratch), tables.to_table(JUDGEMENTS, _rows(due[pending:])), partition_by=["kind"])
    checkpoint_of(home.lifecycle, NEW.number).mkdir(parents=True, exist_ok=True)
    counts = _left(home, NEW, scratch, map(json.dumps, _rows(due[:pending])), SNAPSHOT)
    flush_outbox(home, NEW.number)
    return counts


@pytest.mark.parametrize("seed", range(6))
def test_recovery_emits_the_messages_that_no_row_stands_for(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    due = flood(chance, 300, devices="ab")
    first, second = sorted(chance.randrange(len(due)) for _ in range(2))
    home = _home(tmp_path / "home", due[:first], due[first:second])
    assert _recover(home, due, chance.randrange(len(due))) == (len(due), len(due) - second)
    judged = Counter({value: count for value, count in emitted(home).items() if value[1] != "old"})
    assert differences(judged, compared(due)) == []


def test_row_for_more_messages_than_follow_from_the_snapshot_is_refused(tmp_path: Path) -> None:
    due = flood(random.Random(3), 300)
    home = _home(tmp_path / "home", due)
    with refused("judgements-do-not-follow"):
        _recover(home, due[:-1], 0)
