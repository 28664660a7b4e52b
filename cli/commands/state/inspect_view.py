"""Printed output of ``fleet state inspect``: contents of a checkpoint."""

from collections import Counter, defaultdict
from statistics import mean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from cli.common.output import console
from fleetpulse.core.times import format_duration, format_instant
from fleetpulse.io.home.desired_state import STOPPED
from fleetpulse.io.tables.snapshots import is_known

_KINDS = 4  # maximum number of file types that are listed


def show_inspected(found: dict[str, Any]) -> None:
    """Print the results of `batch.state.inspect.inspect`."""
    generation, at, groups, batches = found["generation"], found["position"], found["groups"], found["batches"]
    out = console()
    modes: Counter[str] = Counter()
    for group in groups:
        modes.update(group["modes"])
    newest = _instant(at["newest_ms"])
    frontiers = [group["context"]["frontier_ms"] for group in groups if group["context"]["frontier_ms"] is not None]
    lines = {
        "generation": f"{generation['number']}, made by {generation['made_by']}; stored form {generation['form']}",
        "batch": f"{at['batch']}; bronze is read up to version {at['version']}, received {newest}",
        "watermark": _instant(found["watermark_ms"]),
        "kept": f"batches {batches['oldest']} to {batches['newest']}: choose one with --at-batch",
        "judged": f"up to {format_instant(min(frontiers))}" if frontiers else "nothing yet",
        "devices": f"{sum(group['devices'] for group in groups):,}: "
        + (", ".join(f"{count:,} {mode}" for mode, count in modes.most_common()) or "modes are known after the first batch"),
        "waiting": f"{sum(group['waiting'] for group in groups):,} pending messages, beyond the frontier",
        "skew": _skew([group["block_bytes"] + group["waiting_bytes"] for group in groups]),
        "rocksdb": _files(found["files"]),
        "snapshot": _snapshot(found["snapshots"]),
        "next start": _next(found),
    }
    for name, value in lines.items():
        out.print(f"[bold]{name:12}[/] {escape(value)}", highlight=False, soft_wrap=True)
    out.print(_by_partition(groups))


def _skew(sizes: list[int]) -> str:
    if not sizes or not mean(sizes):
        return "-"
    return f"the largest key group has {max(sizes) / mean(sizes):.2f} times the mean bytes"


def _instant(instant_ms: int | None) -> str:
    return "-" if instant_ms is None else format_instant(instant_ms)


def _files(files: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count} {kind}" for kind, count in list(files["kinds"].items())[:_KINDS])
    return f"{files['count']:,} files, {files['bytes']:,} bytes ({kinds})"


def _snapshot(newest: list[dict[str, Any]]) -> str:
    if not newest:
        return "none yet"
    one = newest[0]
    age = format_duration(one["age_ms"] // 1000 * 1000)
    source = f"after batch {one['batch']} of generation {one['generation']}"
    if not is_known(one["form"]):
        source = f"by another version of fleetpulse (form {one['form']})"
    return f"version {one['version']}, {age} old, of {format_instant(one['at_ms'])}, {source}"


def _next(found: dict[str, Any]) -> str:
    upcoming, desired, held = found["next"], found["next"]["desired"], found["next"]["held"]
    text = f"continues with bronze version {upcoming['version']}; {upcoming['versions']:,} versions are unread"
    if found["unfinished"] is not None:
        text = f"repeats batch {found['unfinished']}, which was started but not committed, and {text}"
    if desired["state"] == STOPPED:
        text += f"; the job is stopped by {desired['by']} since {format_instant(desired['at_ms'])}: ./fleet stream start"
    if held is not None:
        number = held["generation"]
        text += f"; generation {number}, made by {held['made_by']}, is held: ./fleet state switch {number}, or discard {number}"
    return text


def _by_partition(groups: list[dict[str, Any]]) -> Table:
    sums: dict[int, Counter[str]] = defaultdict(Counter)
    for group in groups:
        one = sums[group["partition"]]
        one["groups"] += 1
        for name in ("devices", "waiting", "block_bytes", "waiting_bytes"):
            one[name] += group[name]
    table = Table(box=SIMPLE_HEAD)
    for name in ("partition", "key groups", "devices", "waiting", "bytes of devices", "bytes of pending rows"):
        table.add_column(name, justify="right")
    for partition, one in sorted(sums.items()):
        names = ("groups", "devices", "waiting", "block_bytes", "waiting_bytes")
        table.add_row(str(partition), *(f"{one[name]:,}" for name in names))
    return table
