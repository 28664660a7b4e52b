"""Join of small files: no row changes, each new file is sorted, and readers search it by its statistics."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fleetpulse.core.replay import Deployment
from fleetpulse.core.tables import JUDGEMENTS
from fleetpulse.io.home.home import Home
from fleetpulse.io.maintenance import sorted_join, vacuum
from fleetpulse.io.maintenance.sorted_join import join_sorted
from fleetpulse.io.tables import tables
from tests.support.homes.homes import empty

pytestmark = pytest.mark.unit
BY = ("device_id", "event_time")
START = 1_700_000_000_000


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = empty(tmp_path / "a 'home'", Deployment())
    for number in range(1, 13):
        rows: list[dict[str, Any]] = [
            {
                "kind": kind,
                "device_id": f"d{(number * 7 + at) % 10}",
                "event_time_ms": START + number * 1000 + at,
                "life_ms": START,
                "transition_no": number,
                "to_mode": "online",
            }
            for kind in ("transition", "late")
            for at in range(5)
        ]
        tables.append(made, JUDGEMENTS, tables.to_table(JUDGEMENTS, rows), "test", number)
    return made


def _rows(home: Home) -> list[tuple[Any, ...]]:
    return sorted((tuple(row.values()) for row in tables.query(home, "SELECT * FROM judgements")), key=repr)


def _transitions(home: Home) -> vacuum.SmallFiles:
    [found] = [one for one in vacuum.small_files(home.table(JUDGEMENTS.name)) if one.partition[0][2] == "transition"]
    return found


def _files(home: Home, kind: str) -> list[Path]:
    return [path for path in tables.paths_of(home, JUDGEMENTS) if path.parent.name == f"kind={kind}"]


def test_a_join_changes_no_row_and_sorts_each_file(home: Home) -> None:
    before = _rows(home)
    assert join_sorted(home.table(JUDGEMENTS.name), JUDGEMENTS, _transitions(home), BY)
    assert _rows(home) == before
    [joined] = _files(home, "transition")
    assert len(_files(home, "late")) == 12, "other partitions stay"
    read = pq.ParquetFile(joined).read(columns=list(BY)).to_pylist()
    assert len(read) == 60
    assert read == sorted(read, key=lambda row: (row["device_id"], row["event_time"]))
    [logged] = [file for file in tables.files_of(home, JUDGEMENTS, "device_id") if file.path == joined]
    assert (logged.rows, logged.least, logged.greatest) == (60, "d0", "d9")


def test_rows_are_joined_in_groups_of_a_limited_size(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    before, size = _rows(home), _files(home, "transition")[0].stat().st_size
    monkeypatch.setattr(sorted_join, "SMALL_BYTES", 2 * size)
    assert join_sorted(home.table(JUDGEMENTS.name), JUDGEMENTS, _transitions(home), BY)
    assert 1 < len(_files(home, "transition")) < 12
    assert _rows(home) == before


def test_files_that_another_writer_replaced_are_not_joined(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    table, small = home.table(JUDGEMENTS.name), _transitions(home)
    [old] = sorted_join._groups(table, {"kind": "transition"})
    assert vacuum.compact_small_files(table, small)
    before = _rows(home)
    monkeypatch.setattr(sorted_join, "_groups", lambda *_: iter([old]))
    assert not join_sorted(table, JUDGEMENTS, small, BY)
    assert _rows(home) == before
