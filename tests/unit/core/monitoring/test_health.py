"""Health of a batch: metrics from recorded progress, and the ratings of their thresholds."""

import json
from typing import Any

import pytest

from fleetpulse.core.monitoring.health import THRESHOLDS, BatchContext, Progress, Rating, Threshold, to_row
from fleetpulse.core.tables import STREAM_HEALTH
from fleetpulse.core.times import parse_instant_ms
from tests.support.histories.histories import recorded_progress

GB = 1_000_000_000
BOUNDS = {  # independent copy of the bounds, as operators know them
    "state size": (1 * GB, 5 * GB),
    "checkpoint": (10_000, 30_000),
    "state update": (10_000, 50_000),
    "clean-up": (5_000, 15_000),
    "memory": (2 * GB, 4 * GB),
}


def test_every_threshold_reads_a_stored_column() -> None:
    assert {one.metric for one in THRESHOLDS} == set(BOUNDS)
    assert {one.column for one in THRESHOLDS} <= {column.name for column in STREAM_HEALTH.columns}


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda one: one.metric)
def test_a_metric_is_rated_on_each_side_of_each_bound(threshold: Threshold) -> None:
    good_below, critical_above = BOUNDS[threshold.metric]
    ratings = [threshold.rate(value) for value in (0, good_below - 1, good_below, critical_above, critical_above + 1)]
    assert ratings == [Rating.GOOD, Rating.GOOD, Rating.WARNING, Rating.WARNING, Rating.CRITICAL]
    assert threshold.rate(None) is None


def _row(name: str, **context: Any) -> dict[str, Any]:
    return to_row(Progress(recorded_progress(name)), BatchContext(1, **context))


def test_a_row_has_every_column_and_all_required_values() -> None:
    for name in ("first", "timers", "compaction"):
        row = _row(name)
        stored = {f"{column.name}_ms" if column.type == "timestamp" else column.name for column in STREAM_HEALTH.columns}
        assert row.keys() == stored
        for column in STREAM_HEALTH.columns:
            value = row[f"{column.name}_ms" if column.type == "timestamp" else column.name]
            assert value is not None or not column.required, column.name


def test_the_first_batch_has_no_watermark_and_no_rate() -> None:
    row = _row("first", input_rows=3000, judgements={"late": 2, "transition": 9}, devices={"online": 5})
    assert (row["watermark_ms"], row["watermark_delay_ms"], row["watermark_age_ms"], row["input_rows_per_s"]) == (None,) * 4
    assert (row["batch_id"], row["input_rows"], row["input_blocks"], row["rows_late"]) == (0, 3000, 8, 2)
    assert row["processed_rows_per_s"] == pytest.approx(3000 * 1000 / row["batch_ms"])
    assert (row["judgements"], row["devices"]) == ('{"late": 2, "transition": 9}', '{"online": 5}')
    assert row["began_at_ms"] == parse_instant_ms(recorded_progress("first")["timestamp"])


def test_the_watermark_delay_is_measured_from_the_newest_row_of_any_batch() -> None:
    newest_ms = _row("first")["newest_received_at_ms"]
    row = _row("timers", input_rows=0, newest_received_ms=newest_ms)
    assert (row["newest_received_at_ms"], row["watermark_delay_ms"]) == (newest_ms, 1)
    assert row["watermark_age_ms"] == row["began_at_ms"] + row["batch_ms"] - row["watermark_ms"]
    assert row["input_rows_per_s"] == 0.0


def test_each_rated_metric_is_computed_from_its_fields_of_the_progress() -> None:
    progress = recorded_progress("compaction")
    operator, custom, parts = (
        progress["stateOperators"][0],
        progress["stateOperators"][0]["customMetrics"],
        progress["durationMs"],
    )
    row = _row("compaction")
    assert row["state_bytes"] == custom["rocksdbSstFileSize"] > 0
    assert row["state_memory_bytes"] == operator["memoryUsedBytes"] > 0
    assert row["checkpoint_ms"] == parts["walCommit"] + parts["commitOffsets"] + operator["commitTimeMs"] // 2
    assert row["clean_up_ms"] == custom["rocksdbTotalCompactionLatencyMs"] == 80
    assert (
        operator["allRemovalsTimeMs"] == custom["timerProcessingTimeMs"] == 0
    )  # if this changes, review the sources of the metrics
    stored_ms = custom["rocksdbGetLatency"] + custom["rocksdbPutLatency"] + custom["rocksdbWriterStallLatencyMs"]
    assert row["state_update_us"] == stored_ms * 1000 // operator["numRowsUpdated"]
    assert row["updates_ms"] == operator["allUpdatesTimeMs"] > 1000


def test_a_metric_without_measurements_has_no_value() -> None:
    progress = recorded_progress("timers")
    progress["stateOperators"][0]["numRowsUpdated"] = 0
    assert to_row(Progress(progress), BatchContext(1))["state_update_us"] is None


def test_offsets_without_versions_leave_the_versions_unknown() -> None:
    assert Progress(recorded_progress("first")).versions is not None
    for offset in ('{"version": 7}', {"version": 7}):
        source = {"startOffset": None, "endOffset": offset}
        assert Progress({**recorded_progress("first"), "sources": [source]}).versions == (0, 7)
    for offset in ({"version": "7-3"}, "no object"):
        source = {"startOffset": None, "endOffset": json.dumps(offset)}
        assert Progress({**recorded_progress("first"), "sources": [source]}).versions is None
