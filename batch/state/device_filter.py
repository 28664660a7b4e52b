"""Selection of the devices of a snapshot by a filter.

Rule: Spark receives the parsed filter as columns and literals, never its text.
"""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any, Final, assert_never

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from fleetpulse.columnar.snapshot.rows import DEVICE
from fleetpulse.core.operations.device_filter import (
    AllOf,
    AnyOf,
    Between,
    ColumnName,
    Comparison,
    Condition,
    Constant,
    DeviceFilter,
    In,
    Instant,
    IsNull,
    Like,
    Not,
    Operand,
)

_SIGNS: Final[dict[str, Callable[[Any, Any], Column]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def matching_devices(rows: DataFrame, only: DeviceFilter) -> DataFrame:
    """Return the devices that a filter selects.

    Args:
        rows: rows of a snapshot.
        only: filter on their columns.
    """
    return rows.filter((F.col("part") == DEVICE) & column_of(only.condition))


def column_of(condition: Condition) -> Column:
    """Compile a condition to a boolean column of snapshot rows."""
    match condition:
        case Constant(value):
            return F.lit(value)
        case Comparison(column, sign, operand):
            return _SIGNS[sign](F.col(column), _operand(operand))
        case Between(column, low, high):
            return F.col(column).between(_operand(low), _operand(high))
        case In(column, values):
            return F.col(column).isin([_operand(value) for value in values])
        case Like(column, pattern):
            return F.col(column).like(pattern)
        case IsNull(column):
            return F.col(column).isNull()
        case Not(negated):
            return ~column_of(negated)
        case AllOf(conditions):
            return reduce(operator.and_, map(column_of, conditions))
        case AnyOf(conditions):
            return reduce(operator.or_, map(column_of, conditions))
        case _:
            assert_never(condition)


def _operand(operand: Operand) -> Column:
    match operand:
        case ColumnName(name):
            return F.col(name)
        case Instant(instant_ms):
            return F.timestamp_millis(F.lit(instant_ms))
        case _:
            return F.lit(operand)


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
