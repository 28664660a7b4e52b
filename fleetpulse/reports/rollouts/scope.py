"""Devices in the scope of a rollout, and the silence after which they are offline.

Rule: a filter reaches DuckDB as columns and parameters, never as its text.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final, assert_never

from fleetpulse.core.errors import FleetError
from fleetpulse.core.lifecycle import OUT_OF_SERVICE
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
from fleetpulse.core.policy import Policy
from fleetpulse.core.rollouts.plan import SCOPED
from fleetpulse.core.rows import EVERYONE
from fleetpulse.core.tables import MESSAGES, literals
from fleetpulse.io.home.home import Home
from fleetpulse.io.tables.tables import fetch, open_table_in, query
from fleetpulse.reports.effective_policy import evaluation_context
from fleetpulse.reports.frontiers import judged_frontier_ms
from fleetpulse.reports.present.kept import open_present
from fleetpulse.reports.present.parts import UNJUDGED, listed_sql

_FIRMWARE: Final = "firmware"
_COLUMNS: Final = {  # SQL by column of a filter; instants as epoch milliseconds
    **dict.fromkeys(SCOPED, ""),
    "mode_since": "epoch_ms(since)",
    "last_seen": "epoch_ms(last_seen)",
}


@dataclass(frozen=True, slots=True)
class ScopedDevice:
    """Device in the scope of a rollout.

    Attributes:
        device_id: id of the device, as in bronze.
        site: its site.
        mode: its mode at present.
        device_class: its class at present.
    """

    device_id: str
    site: str
    mode: str
    device_class: str


def devices_in_scope(home: Home, scope: DeviceFilter) -> list[ScopedDevice]:
    """Return the devices in service that a filter selects at present, ordered by id.

    Devices without a mode or a site, decommissioned and forgotten ones are left out.

    Args:
        home: home to read.
        scope: filter over the columns `SCOPED`.

    Raises:
        FleetError: the filter compares another column.
    """
    named = set(_named(scope.condition))
    if unknown := sorted(named - {*SCOPED}):
        raise FleetError(
            f"the scope of a rollout cannot compare {', '.join(unknown)}; expected columns of the present fleet: "
            f"{', '.join(SCOPED)}; change the scope",
            code="rollout-scope-invalid",
        )
    condition, filtered = condition_sql(scope.condition)
    without = literals((*OUT_OF_SERVICE, UNJUDGED))
    with open_present(home, judged_frontier_ms(home)) as present:
        facts, values = present.facts()
        listed = f"({listed_sql(present.limits, f'({facts})')})"
        if _FIRMWARE in named:
            open_table_in(present.connection, home, MESSAGES)
            newest = "max_by(firmware, (received_at, coalesce(position, 0), bridge))"
            reported = f"(SELECT device_id, {newest} AS firmware FROM messages WHERE firmware IS NOT NULL GROUP BY device_id)"
            listed = f"({listed} LEFT JOIN {reported} USING (device_id))"
        sql = f"""SELECT device_id, site, mode, device_class FROM (SELECT * FROM {listed})
            WHERE mode NOT IN ({without}) AND site != '{EVERYONE}' AND ({condition}) ORDER BY device_id"""
        return [ScopedDevice(**row) for row in fetch(present.connection, sql, [*values, *filtered])]


def rules_in_force(home: Home, at_ms: int) -> Policy | None:
    """Return the policy in force at an instant, epoch milliseconds; None before any row has landed."""
    known = evaluation_context(home, None)
    return None if known is None else known.policies.at(at_ms).policy


def longest_timeout(home: Home, policy: Policy, devices: Collection[ScopedDevice]) -> tuple[int, str]:
    """Return the longest timeout of devices, milliseconds, and the name of its class or device.

    Args:
        home: home to read.
        policy: policy in force.
        devices: devices; there must be one.
    """
    by_class = {name: policy.of(name).timeout_ms for name in {one.device_class for one in devices}}
    longest, name = max((timeout_ms, name) for name, timeout_ms in by_class.items())
    of, wanted = f'class "{name}"', {one.device_id for one in devices}
    newest = "QUALIFY row_number() OVER (PARTITION BY device_id ORDER BY effective_from DESC, received_at DESC) = 1"
    entries = f"SELECT device_id, timeout_ms FROM devices WHERE op = 'add' {newest}"
    for row in query(home, f"SELECT * FROM ({entries}) WHERE timeout_ms > {longest} ORDER BY timeout_ms", tables=["devices"]):
        if row["device_id"] in wanted:
            longest, of = row["timeout_ms"], f'device "{row["device_id"]}"'
    return longest, of


def condition_sql(condition: Condition) -> tuple[str, list[Any]]:
    """Compile a condition to SQL with parameters."""
    values: list[Any] = []

    def parameter(value: Any) -> str:
        values.append(value)
        return "?"

    return _sql(condition, parameter), values


def _sql(condition: Condition, parameter: Callable[[Any], str]) -> str:
    def operand(value: Operand) -> str:
        match value:
            case ColumnName(name):
                return _column(name)
            case Instant(instant_ms):
                return parameter(instant_ms)
            case _:
                return parameter(value)

    match condition:
        case Constant(value):
            return "true" if value else "false"
        case Comparison(column, sign, value):
            return f"({_column(column)} {sign} {operand(value)})"
        case Between(column, low, high):
            return f"({_column(column)} BETWEEN {operand(low)} AND {operand(high)})"
        case In(column, listed):
            plain = [value.instant_ms if isinstance(value, Instant) else value for value in listed]
            return f"({_column(column)} IN (SELECT unnest({parameter(plain)})))"
        case Like(column, pattern):
            return f"({_column(column)} LIKE {parameter(pattern)} ESCAPE '\\')"
        case IsNull(column):
            return f"({_column(column)} IS NULL)"
        case Not(negated):
            return f"(NOT {_sql(negated, parameter)})"
        case AllOf(parts):
            return f"({' AND '.join(_sql(part, parameter) for part in parts)})"
        case AnyOf(parts):
            return f"({' OR '.join(_sql(part, parameter) for part in parts)})"
        case _:
            assert_never(condition)


def _column(name: str) -> str:
    return _COLUMNS[name] or name


def _named(condition: Condition) -> Iterator[str]:
    """Yield the columns that a condition names."""
    match condition:
        case Constant():
            return
        case Not(negated):
            yield from _named(negated)
        case AllOf(parts) | AnyOf(parts):
            for part in parts:
                yield from _named(part)
        case Comparison(column, _, value):
            yield from (column, *([value.name] if isinstance(value, ColumnName) else []))
        case Between(column, low, high):
            yield from (column, *(one.name for one in (low, high) if isinstance(one, ColumnName)))
        case In(column, _) | Like(column, _) | IsNull(column):
            yield column
        case _:
            assert_never(condition)
