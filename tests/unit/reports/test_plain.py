"""Rows of reports as values of JSON."""

from datetime import UTC, datetime

import pytest

from fleetpulse.reports.plain import numbered_row, plain_levels, plain_row

pytestmark = pytest.mark.unit
AT = datetime(2026, 1, 31, 12, 0, 0, 250_000, UTC)
AT_MS = 1_769_860_800_250


def test_instants_become_text_and_durations_stay_numbers() -> None:
    row = {"since_ms": AT_MS, "until_ms": None, "judged_at": AT, "runtime_ms": 5, "last_errors": '["E1"]'}
    assert plain_row(row) == {
        "since": "2026-01-31T12:00:00.250Z", "until": None, "judged_at": "2026-01-31T12:00:00.250Z", "runtime_ms": 5,
        "last_errors": ["E1"],
    }  # fmt: skip


def test_rows_within_a_row_are_converted_as_well() -> None:
    found = plain_levels({"mode": "online", "judged": {"judged_at_ms": AT_MS}, "late": [{"received_at_ms": AT_MS}], "next": None})
    text = "2026-01-31T12:00:00.250Z"
    assert found == {"mode": "online", "judged": {"judged_at": text}, "late": [{"received_at": text}], "next": None}


def test_instants_of_tables_become_numbers_even_if_they_are_missing() -> None:
    row = {"event_time": AT, "received_at": None, "late_by_ms": 7, "kind": "late"}
    assert numbered_row(row) == {"event_time_ms": AT_MS, "received_at_ms": None, "late_by_ms": 7, "kind": "late"}
