"""Figures of a backtest: effect of a candidate policy on verdicts and alerts.

Rule: an alert is a transition into a mode that needs attention: offline, degraded or flagged.
Devices that are unreachable do not count: the alert is that of their gateway.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from fleetpulse.columnar.backtest.replay import BacktestResult
from fleetpulse.core.lifecycle import Mode
from fleetpulse.core.operations.backtests import AFTER, BEFORE, CHANGES, MOVED
from fleetpulse.core.times import DAY_MS, format_instant

ALERTS: Final = frozenset({Mode.OFFLINE, Mode.DEGRADED, Mode.FLAGGED})
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Backtest:
    """Figures of a backtest.

    Attributes:
        policy_version: version of the new policy.
        from_ms: instant from which verdicts are compared; by default that of the first row.
        to_ms: instant up to which verdicts are compared.
        rows: number of rows of bronze that were read.
        changes: number of verdicts by change: added, gone, moved.
        moved_by_ms: median shift of moved verdicts, positive if later; None if none moved.
        by_class: row for each device class: ``device_class``, ``added``, ``gone``, ``moved``; the
            most changed first.
        by_site: row for each site: ``site``, ``added``, ``gone``, ``moved``; the most changed
            first.
        by_mode: row for each mode: ``to_mode``, and the number of transitions into it ``before``
            and ``after``.
        by_day: row for each day (UTC): ``day``, and the number of alerts ``before`` and ``after``.
        others: row for each kind of judgement other than transitions: ``kind``, and the number
            ``before`` and ``after``.
    """

    policy_version: str
    from_ms: int
    to_ms: int
    rows: int
    changes: Mapping[str, int]
    moved_by_ms: float | None
    by_class: list[Row]
    by_site: list[Row]
    by_mode: list[Row]
    by_day: list[Row]
    others: list[Row]

    def alerts(self, side: str) -> int:
        """Return the number of alerts on one side: ``before`` or ``after``."""
        return sum(row[side] for row in self.by_day)

    def plain(self) -> Row:
        """Return the figures as JSON values."""
        figures = asdict(self)
        span = {name: format_instant(figures.pop(f"{name}_ms")) for name in ("from", "to")}
        return {**span, **figures, "alerts": {side: self.alerts(side) for side in (BEFORE, AFTER)}}


def figures(found: BacktestResult, policy_version: str, from_ms: int, to_ms: int, rows: int) -> Backtest:
    """Compute the figures of a backtest.

    Args:
        found: result over all key groups.
        policy_version: version of the new policy.
        from_ms: instant from which verdicts were compared.
        to_ms: instant up to which verdicts were compared.
        rows: number of rows of bronze that were read.
    """
    changed: dict[str, list[Any]] = found.changed.to_pydict()
    shifts = [
        after - before
        for change, before, after in zip(changed["change"], changed["before_ms"], changed["after_ms"], strict=True)
        if change == MOVED
    ]
    count = Counter(changed["change"])
    return Backtest(
        policy_version,
        from_ms,
        to_ms,
        rows,
        {change: count[change] for change in CHANGES},
        median(shifts) if shifts else None,
        _by("device_class", changed),
        _by("site", changed),
        _sides(found.days, lambda key: key[2], "to_mode"),
        _alerts_a_day(found.days, from_ms, to_ms),
        _sides(found.others, lambda key: key[1], "kind"),
    )


def _by(name: str, changed: Mapping[str, list[Any]]) -> list[Row]:
    counts: dict[str, Counter[str]] = {}
    for value, change in zip(changed[name], changed["change"], strict=True):
        counts.setdefault(value or "", Counter())[change] += 1
    rows = [{name: value, **{change: found[change] for change in CHANGES}} for value, found in counts.items()]
    return sorted(rows, key=lambda row: (-sum(row[change] for change in CHANGES), row[name]))


def _sides(counts: Mapping[Any, int], of: Callable[[Any], str], name: str) -> list[Row]:
    rows: dict[str, Row] = {}
    for key, count in counts.items():
        row = rows.setdefault(of(key), {name: of(key), BEFORE: 0, AFTER: 0})
        row[key[0]] += count
    return [rows[group] for group in sorted(rows)]


def _alerts_a_day(days: Mapping[tuple[str, int, str], int], from_ms: int, to_ms: int) -> list[Row]:
    """Return one row for each day, including days without alerts."""
    known = [day for _, day, _ in days]
    first, last = min([from_ms // DAY_MS, *known]), max([to_ms // DAY_MS, *known])
    rows = {day: {"day": format_instant(day * DAY_MS)[:10], BEFORE: 0, AFTER: 0} for day in range(first, last + 1)}
    for (side, day, mode), count in days.items():
        if mode in ALERTS:
            rows[day][side] += count
    return list(rows.values())


def verdicts(found: BacktestResult) -> Iterator[Row]:
    """Yield the verdicts that differ, oldest first, as rows of `DIFFERENCE_SCHEMA`."""
    for start in range(0, found.changed.num_rows, 10_000):
        yield from found.changed.slice(start, 10_000).to_pylist()
