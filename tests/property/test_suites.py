"""What the job makes of any history, in any batches and key groups, holds by every law: nothing is raised that is no fault."""

from pathlib import Path
from random import Random
from typing import Any

import pyarrow.compute
import pytest

from batch.quality import facts
from batch.quality.derived_tables import DerivedTables, snapshot_state
from fleetpulse.core.quality.suites import Severity
from fleetpulse.core.quality.table_suites import SUITES
from fleetpulse.core.replay import Deployment
from fleetpulse.core.rows import Row
from fleetpulse.io.home.home import Home
from fleetpulse.io.quality.suite_inputs import opened
from tests.histories import START, any_own_row, any_signal, as_the_bridge_says
from tests.looked_at import eventful, in_shards, judged_home, write_state
from tests.property.test_laws import Stream
from tests.property.test_snapshots import snapshot_of

pytestmark = [pytest.mark.property, pytest.mark.timeout(300)]  # on a busy machine the fold alone takes long to be loaded
pc: Any = pyarrow.compute  # its functions are made at run time: no checker knows them
DEPLOYMENT = Deployment(30_000, 20_000)


def wild(seed: int) -> list[Row]:
    """Return a history with rows of all kinds, gaps and policies without sense among them."""
    choose = Random(seed).choice
    devices = [f"device-{number}" for number in range(6)]
    rows = [any_signal(choose, devices, 80) for _ in range(250)]
    return as_the_bridge_says([*rows, *(any_own_row(choose, devices, 80) for _ in range(25))])


def judged_in_batches(rows: list[Row], random: Random, key_groups: int) -> Any:
    """Return the state that rows come to, as the rows of a snapshot."""
    stream, begin = Stream(DEPLOYMENT, key_groups, {}), 0
    while begin < len(rows):
        end = min(begin + random.choice((1, 5, 30, 100)), len(rows))
        while end < len(rows) and rows[end].received_at_ms == rows[end - 1].received_at_ms:
            end += 1  # what is received at one instant is read at once
        stream.batch(rows[begin:end])
        begin = end
    return snapshot_of(stream)


def raised(home: Home) -> list[tuple[str, str]]:
    """Return the critical laws that do not hold, with their suites."""
    found: list[tuple[str, str]] = []
    judged = facts.stand_of(home)
    with opened(home) as tables:
        made = DerivedTables(home, tables, judged, snapshot_state(home))
        for suite in SUITES:
            assert made.why_not(suite) == ""
            made.make(suite)
            rows = tables.arrow(suite.rows)
            laws = [one for one in suite.expectations if one.form == "holds" and one.severity is Severity.CRITICAL]
            found += [(suite.name, one.name) for one in laws if pc.any(pc.equal(rows[one.column], False)).as_py()]
    return found


@pytest.mark.parametrize("until_s", [340, 1000], ids=["while it does not listen", "after it"])
@pytest.mark.parametrize("seed", [1, 3, 5])
def test_a_history_in_which_a_bridge_held_back_its_sites_raises_nothing(seed: int, until_s: int, tmp_path: Path) -> None:
    rows = [one for one in in_shards(eventful(seed)) if one.received_at_ms < START + until_s * 1000]
    home = judged_home(tmp_path / "home", rows, DEPLOYMENT)
    write_state(home, judged_in_batches(rows, Random(seed), 2), key_groups=2)
    assert raised(home) == []


@pytest.mark.parametrize("seed", [0, 1, 8, 23, 39, 69])  # of the last three each lists copies of messages out of service
def test_a_history_that_was_judged_raises_nothing(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    rows = sorted(eventful(seed) if seed % 2 else wild(seed), key=lambda one: one.received_at_ms)
    key_groups = random.choice((1, 2, 3))
    home = judged_home(tmp_path / "home", rows, DEPLOYMENT)
    write_state(home, judged_in_batches(rows, random, key_groups), key_groups=key_groups)
    assert raised(home) == []
