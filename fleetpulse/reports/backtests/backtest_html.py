"""Self-contained HTML page of a backtest: figures, charts and tables.

Rule 1: the page loads nothing and runs no scripts. Charts are inline SVG, and the page's content
security policy forbids everything else.
Rule 2: every figure of a chart is also in a table. Text from messages is escaped.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from fleetpulse.core.operations.backtests import AFTER, BEFORE, CHANGES, FIGURES
from fleetpulse.core.times import format_duration, format_instant
from fleetpulse.reports.backtests.backtest import Backtest

Row = Mapping[str, Any]
_WIDTH: Final = 920
_LEFT: Final = 64  # width of the axis labels
_DAYS_HEIGHT: Final = 230
_BAR: Final = 26  # height of a bar with its gap
_NAMES: Final = 200
_BARS: Final = 15  # maximum number of classes or sites in a chart; the table has all
_STYLE: Final = """
:root { color-scheme: light dark; --text: #1c2430; --quiet: #5b6675; --line: #d5dae1; --ground: #ffffff;
  --before: #8794a5; --after: #c2410c; --added: #c2410c; --gone: #15803d; --moved: #2563a8 }
@media (prefers-color-scheme: dark) { :root { --text: #e6eaf0; --quiet: #9aa7b8; --line: #364152; --ground: #141a23;
  --before: #7c8a9e; --after: #fb923c; --added: #fb923c; --gone: #4ade80; --moved: #60a5fa } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); max-width: 960px; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem } h2 { font-size: 1.1rem; margin: 2.2rem 0 0.4rem }
p { color: var(--quiet); margin: 0.2rem 0 } svg { width: 100%; height: auto; display: block }
svg text { fill: var(--quiet); font-size: 12px }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 1.4rem 0 } .figures b { display: block; font-size: 1.7rem }
.figures span { color: var(--quiet) } .key i { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.4em 0 1em }
table { border-collapse: collapse; margin: 0.6rem 0; font-variant-numeric: tabular-nums } details { margin: 0.6rem 0 }
th, td { padding: 0.15rem 1.2rem 0.15rem 0; border-bottom: 1px solid var(--line); text-align: right }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere } th { color: var(--quiet); font-weight: 600 }
.before { fill: var(--before); background: var(--before) } .after { fill: var(--after); background: var(--after) }
.added { fill: var(--added); background: var(--added) } .gone { fill: var(--gone); background: var(--gone) }
.moved { fill: var(--moved); background: var(--moved) } .axis { stroke: var(--line) }
"""


def _short(result: Backtest) -> Row:
    """Return the figures by which a list of backtests shows this one, see `backtest_list`."""
    return {
        "policy_version": result.policy_version,
        "from_ms": result.from_ms,
        "to_ms": result.to_ms,
        "rows": result.rows,
        "moved_by_ms": None if result.moved_by_ms is None else round(result.moved_by_ms),
        **{f"alerts_{side}": result.alerts(side) for side in (BEFORE, AFTER)},
        **{change: result.changes[change] for change in CHANGES},
    }


def page(result: Backtest) -> str:
    """Render the figures of a backtest as an HTML page."""
    span = f"{format_instant(result.from_ms)} to {format_instant(result.to_ms)}"
    title = f"Backtest of policy {escape(result.policy_version)}"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="{FIGURES}" content="{escape(json.dumps(_short(result)))}">',
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            f"<h1>{title}</h1>\n<p>The same {result.rows:,} rows, under the policies in force and under this one.<br>{span}</p>",
            _headline(result),
            f"<h2>Alerts per day</h2>\n<p>Transitions into offline, degraded or flagged. {_key((BEFORE, AFTER))}</p>",
            _days(result.by_day),
            _hidden("all days", _table(result.by_day, ("day", BEFORE, AFTER))),
            "<h2>Transitions by mode</h2>",
            _table(result.by_mode, ("to_mode", BEFORE, AFTER)),
            *_changes(result.by_class, "device_class", "Verdicts that differ, by device class"),
            *_changes(result.by_site, "site", "Verdicts that differ, by site"),
            "<h2>Other judgements</h2>",
            _table(result.others, ("kind", BEFORE, AFTER)),
            "</body>\n</html>\n",
        ]
    )


def _headline(result: Backtest) -> str:
    moved = ""
    if result.moved_by_ms is not None:
        way = "later" if result.moved_by_ms >= 0 else "earlier"
        moved = f", {format_duration(abs(round(result.moved_by_ms)))} {way} (median)"
    figures = [
        (f"{result.alerts(BEFORE):,} → {result.alerts(AFTER):,}", "alerts, before and after"),
        *((f"{result.changes[change]:,}", f"verdicts {change}{moved if change == 'moved' else ''}") for change in CHANGES),
    ]
    return (
        '<div class="figures">' + "".join(f"<div><b>{figure}</b><span>{name}</span></div>" for figure, name in figures) + "</div>"
    )


def _key(names: Sequence[str]) -> str:
    return '<span class="key">' + "".join(f'<i class="{name}"></i>{name}' for name in names) + "</span>"


def _days(days: Sequence[Row]) -> str:
    """Draw one step line for each side; each day has its figures as a tooltip."""
    most = max([1, *(day[side] for day in days for side in (BEFORE, AFTER))])
    wide, high = (_WIDTH - _LEFT) / len(days), _DAYS_HEIGHT - 50

    def level(count: float) -> float:
        return 20 + high * (1 - count / most)

    drawn = [
        f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{level(tick):.1f}" y2="{level(tick):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{level(tick) + 4:.1f}" text-anchor="end">{tick:,}</text>'
        for tick in _ticks(most)
    ]
    for side in (BEFORE, AFTER):
        steps = " ".join(f"V{level(day[side]):.1f}H{_LEFT + (place + 1) * wide:.1f}" for place, day in enumerate(days))
        colour = f"var(--{side})"
        drawn.append(f'<path d="M{_LEFT} {level(0):.1f}{steps}" fill="none" style="stroke: {colour}; stroke-width: 1.8"/>')
    for place, day in enumerate(days):
        tooltip = f"{day['day']}: {day[BEFORE]:,} before, {day[AFTER]:,} after"
        x = _LEFT + place * wide
        drawn.append(
            f'<rect x="{x:.1f}" y="20" width="{wide:.2f}" height="{high}" fill="transparent"><title>{tooltip}</title></rect>'
        )
    named = sorted({round(share * (len(days) - 1) / 5) for share in range(6)})
    for place in named:
        x, anchor = _LEFT + (place + 0.5) * wide, "end" if place == len(days) - 1 and len(days) > 1 else "start"
        drawn.append(f'<text x="{x:.1f}" y="{_DAYS_HEIGHT - 8}" text-anchor="{anchor}">{days[place]["day"]}</text>')
    return _svg(_DAYS_HEIGHT, "Alerts per day, before and after", drawn)


def _ticks(most: int) -> list[int]:
    """Return the ticks of an axis from 0 to ``most``: a few, at round distances.

    The distance is 1, 2 or 5 times a power of ten.
    """
    step = next(factor * 10**power for power in range(20) for factor in (1, 2, 5) if most / (factor * 10**power) <= 5)
    return list(range(0, most + 1, step))


def _changes(rows: Sequence[Row], name: str, title: str) -> list[str]:
    if not rows:
        return [f"<h2>{title}</h2>\n<p>None.</p>"]
    drawn = rows[:_BARS]
    left = f" The chart shows the {_BARS} with the most." if len(rows) > _BARS else ""
    return [
        f"<h2>{title}</h2>\n<p>{_key(CHANGES)}{left}</p>",
        _bars(drawn, name, title),
        _table(rows, (name, *CHANGES)) if len(rows) <= _BARS else _hidden("all", _table(rows, (name, *CHANGES))),
    ]


def _bars(rows: Sequence[Row], name: str, title: str) -> str:
    most = max(1, *(sum(row[change] for change in CHANGES) for row in rows))
    drawn: list[str] = []
    for place, row in enumerate(rows):
        y, x = place * _BAR, float(_NAMES)
        label = str(row[name])
        short = label if len(label) <= 26 else label[:25] + "…"
        drawn.append(
            f'<text x="{_NAMES - 8}" y="{y + 17}" text-anchor="end">{escape(short)}<title>{escape(label)}</title></text>'
        )
        for change in CHANGES:
            width = (_WIDTH - _NAMES - 70) * row[change] / most
            drawn.append(
                f'<rect class="{change}" x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{_BAR - 8}">'
                f"<title>{escape(label)}: {row[change]:,} {change}</title></rect>"
            )
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 17}">{sum(row[change] for change in CHANGES):,}</text>')
    return _svg(len(rows) * _BAR + 6, title, drawn)


def _svg(height: int, title: str, drawn: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">' + "\n".join(drawn) + "</svg>"


def _hidden(title: str, table: str) -> str:
    return f"<details><summary>{title}, as a table</summary>{table}</details>"


def _table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    if not rows:
        return "<p>None.</p>"
    head = "".join(f"<th>{name.replace('_', ' ')}</th>" for name in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{_cell(row[name])}</td>" for name in columns) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else escape(str(value))
