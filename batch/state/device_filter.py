"""Some of the devices of a snapshot: by a condition on its columns."""

import re
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from fleetpulse.columnar.snapshot.rows import DEVICE
from fleetpulse.core.errors import FleetError

_CALLS_JAVA: Final = re.compile(r"\b(?:try_)?reflect\b|\bjava_method\b", re.IGNORECASE)  # however it is quoted or spaced


def check_condition(only: str) -> None:
    """See that a condition asks for values alone: whoever may fill in a form may not call Java.

    Raises:
        FleetError: it names a function that does.
    """
    if found := _CALLS_JAVA.search(only):
        raise FleetError(
            f'"{only}" is no condition on a device: it may not contain the word {found[0]}, which calls Java; '
            f"write one over the columns of device_snapshots, such as: site = 'north'",
            code="condition-calls-java",
        )


def fitting(rows: DataFrame, only: str) -> DataFrame:
    """Return the devices that fit a condition.

    Args:
        rows: of a snapshot.
        only: SQL on their columns.

    Raises:
        FleetError: it is no condition.
    """
    check_condition(only)
    try:
        chosen = rows.filter((F.col("part") == DEVICE) & F.expr(f"({only})"))
        chosen.limit(1).collect()
    except PySparkException as error:
        why = str(error).splitlines()[0][:200]
        raise FleetError(
            f'"{only}" is no condition on a device ({why}); write one in SQL over the columns of device_snapshots, such as: '
            f"site = 'north'",
            code="condition-invalid",
        ) from error
    return chosen


def these(rows: DataFrame, fit: DataFrame) -> DataFrame:
    """Return a state without the devices that do not fit; what waits of devices that have no state yet stays.

    Args:
        rows: of the state.
        fit: rows of the devices that do.
    """
    devices = rows.filter(F.col("part") == DEVICE).select("device_id")
    others = devices.join(fit.select("device_id"), "device_id", "left_anti")
    return rows.join(others, "device_id", "left_anti").select(rows.columns)
