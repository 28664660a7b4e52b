"""Generated home of a large fleet: a long history in slices of time."""

from itertools import pairwise
from pathlib import Path

import pytest

from bench import large_home
from bench.large_home import generate
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables import tables

pytestmark = pytest.mark.unit


def test_a_history_in_slices_is_the_same_and_in_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[object]()
    for name, at_once in (("whole", 10**9), ("slices", 1_500)):
        monkeypatch.setattr(large_home, "_SORTED", at_once)
        home = Home(tmp_path / name)
        transitions, messages = generate(home, 1_000, 2, 1)
        assert messages == 1_000
        rows = tables.query(home, "SELECT * FROM judgements ORDER BY device_id, transition_no")
        assert len(rows) == transitions
        found.append(rows)
        spans = sorted((file.least, file.greatest) for file in tables.files_of(home, JUDGEMENTS, "event_time"))
        assert len(spans) == (1 if name == "whole" else 6)
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(spans))
    assert found[0] == found[1]
