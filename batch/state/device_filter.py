"""Selection of the devices of a snapshot by an SQL condition."""

import re
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from fleetpulse.columnar.snapshot.rows import DEVICE
from fleetpulse.core.errors import FleetError

_CALLS_JAVA: Final = re.compile(r"\b(?:try_)?reflect\b|\bjava_method\b", re.IGNORECASE)  # in any quotes and spacing


def check_condition(only: str) -> None:
    """Check that a condition calls no Java: it may come from a web form.

    Raises:
        FleetError: the condition names a function that calls Java.
    """
    if found := _CALLS_JAVA.search(only):
        raise FleetError(
            f'"{only}" is no condition on a device: it must not contain {found[0]}, which calls Java; '
            f"write a condition on the columns of device_snapshots, such as: site = 'north'",
            code="condition-calls-java",
        )


def matching_devices(rows: DataFrame, only: str) -> DataFrame:
    """Return the devices that fit a condition.

    Args:
        rows: rows of a snapshot.
        only: SQL condition on their columns.

    Raises:
        FleetError: the condition is invalid.
    """
    check_condition(only)
    try:
        chosen = rows.filter((F.col("part") == DEVICE) & F.expr(f"({only})"))
        chosen.limit(1).collect()
    except PySparkException as error:
        why = str(error).splitlines()[0][:200]
        raise FleetError(
            f'"{only}" is no condition on a device ({why}); write an SQL condition on the columns of device_snapshots, such as: '
            f"site = 'north'",
            code="condition-invalid",
        ) from error
    return chosen


def keep_devices(rows: DataFrame, fit: DataFrame) -> DataFrame:
    """Remove the devices that do not fit, and their pending rows, from a state.

    Pending rows of devices without a state yet stay.

    Args:
        rows: rows of the state.
        fit: rows of the devices that stay.
    """
    devices = rows.filter(F.col("part") == DEVICE).select("device_id")
    others = devices.join(fit.select("device_id"), "device_id", "left_anti")
    return rows.join(others, "device_id", "left_anti").select(rows.columns)
