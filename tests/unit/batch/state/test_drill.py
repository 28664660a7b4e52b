"""Drill: cut of a recording, report of differences (whole drill: tests/e2e/operations/test_drill.py)."""

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch.state.drill import cut
from cli.commands.batch.drill import report_differences
from fleetpulse.reports.operations.agreement import COMPARED
from tests.support.refusals import refused

pytestmark = pytest.mark.unit
JUDGEMENT = {**dict.fromkeys(COMPARED), "kind": "transition", "device_id": "pump-1", "transition_no": 3, "to_mode": "offline"}
AGREED = (*JUDGEMENT.values(),)
MOVED = (*{**JUDGEMENT, "event_time_ms": 7}.values(),)
RECORDING = Path("recording.ndjson")


@pytest.mark.parametrize("counts", [(7,), (700,), (1, 733), (3, 0, 9), (1,) * 20, (5_000, 1, 1, 1, 1, 1, 1)])
def test_cut_keeps_each_row_once_in_order_and_makes_enough_parts(tmp_path: Path, counts: tuple[int, ...]) -> None:
    files: list[Path] = []
    begin = 0
    for count in counts:
        files.append(tmp_path / f"{begin}-{count}.parquet")
        pq.write_table(pa.table({"row": range(begin, begin + count)}), files[-1])
        begin += count
    landings = cut(files, 7)
    rows = [pq.read_table(one.path)["row"].to_pylist()[one.begin : one.end] for one in landings]
    assert [row for part in rows for row in part] == [*range(sum(counts))]
    assert all(rows) and len(rows) >= 7


def test_cut_makes_at_most_one_part_per_row(tmp_path: Path) -> None:
    path = tmp_path / "short.parquet"
    pq.write_table(pa.table({"row": range(6)}), path)
    assert len(cut([path], 7)) == 6


@pytest.mark.parametrize("json_lines", [True, False])
def test_each_difference_is_reported_with_its_run(capsys: pytest.CaptureFixture[str], json_lines: bool) -> None:
    with refused("drill-differs"):
        report_differences(RECORDING, Counter([AGREED]), Counter([MOVED]), json_lines=json_lines)
    out, err = capsys.readouterr()
    if json_lines:
        rows = [json.loads(line) for line in out.splitlines()]
        sides = [("disturbed", "pump-1", "1970-01-01T00:00:00.007Z"), ("undisturbed", "pump-1", None)]
        assert [(row["side"], row["device_id"], row["event_time"]) for row in rows] == sides
    else:
        assert "differences" in err


def test_equal_runs_are_reported_without_output(capsys: pytest.CaptureFixture[str]) -> None:
    report_differences(RECORDING, Counter([AGREED, AGREED]), Counter([AGREED, AGREED]), json_lines=False)
    assert capsys.readouterr() == ("", "")


def test_drill_without_verdicts_is_refused() -> None:
    with refused("drill-without-verdicts"):
        report_differences(RECORDING, Counter(), Counter(), json_lines=False)
