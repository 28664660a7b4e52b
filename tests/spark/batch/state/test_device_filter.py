"""Filters of devices on Spark: each selects the devices that the same condition selects in SQL."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from batch.state.device_filter import column_of, matching_devices
from fleetpulse.core.operations.device_filter import FILTER_COLUMNS, parse_device_filter
from fleetpulse.io.lifecycle.state_reader import SNAPSHOT_COLUMNS

pytestmark = pytest.mark.spark
_NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
_DEVICES = [  # part, device_id, site, gateway, seq, last_seen
    ("device", "pump-1", "north", "g", 1, _NOON),
    ("device", "pump_2", "south", None, 2**40, _NOON.replace(minute=30)),
    ("device", "it's", "north", "north", None, None),
    ("signal", "pump-1", "north", "g", 1, _NOON),
]
_SELECTED = {
    "site = 'north'": ["pump-1", "it's"],
    "site = gateway": ["it's"],
    "gateway != 'g'": ["it's"],
    "NOT gateway = 'g'": ["it's"],
    "gateway IS NULL OR seq IS NULL": ["pump_2", "it's"],
    "seq <= 1": ["pump-1"],
    f"seq > 1 AND seq >= {2**40} AND seq < {2**41}": ["pump_2"],
    "last_seen = '2026-01-31T13:00:00+01:00'": ["pump-1"],
    "last_seen BETWEEN '2026-01-31T12:00:00.001Z' AND TIMESTAMP '2026-01-31T12:30:00Z'": ["pump_2"],
    r"device_id LIKE 'pump\__'": ["pump_2"],
    "device_id LIKE 'p%' AND NOT device_id LIKE '%2'": ["pump-1"],
    "device_id IN ('it''s', 'none')": ["it's"],
    "device_id NOT IN ('pump-1') AND (false OR true)": ["pump_2", "it's"],
}
_LITERALS = {"string": "'a'", "number": "1", "instant": "'2026-01-31T12:00:00Z'"}


def test_a_filter_selects_the_devices_of_its_meaning_in_sql(spark: SparkSession) -> None:
    arrays = [pa.array(values) for values in zip(*_DEVICES, strict=True)]
    table = pa.Table.from_arrays(arrays, ["part", "device_id", "site", "gateway", "seq", "last_seen"])
    rows = spark.createDataFrame(table)  # a local relation: no query below starts a job
    devices = rows.filter("part = 'device'")
    filters = {text: column_of(parse_device_filter(text).condition).alias(text) for text in _SELECTED}
    found = devices.select("device_id", *filters.values()).collect()
    assert {text: [row.device_id for row in found if row[text]] for text in _SELECTED} == _SELECTED
    selected = matching_devices(rows, parse_device_filter("site = 'north'")).collect()
    assert [(row.part, row.device_id) for row in selected] == [("device", "pump-1"), ("device", "it's")]
    every = " AND ".join(f"{name} != {_LITERALS[kind]}" for name, kind in FILTER_COLUMNS.items())
    assert matching_devices(spark.createDataFrame([], SNAPSHOT_COLUMNS), parse_device_filter(every)).schema.names
