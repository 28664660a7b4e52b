"""What a checkpoint holds, for a person."""

from collections import Counter, defaultdict
from statistics import mean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cli.output import console
from fleetpulse.core.times import format_instant
from fleetpulse.io.home import Home


def show_inspected(home: Home, found: dict[str, Any]) -> None:
    """Print what `batch.verbs.inspect` found."""
    generation, at, groups = found["generation"], found["stand"], found["groups"]
    out = console()
    modes: Counter[str] = Counter()
    for group in groups:
        modes.update(group["modes"])
    newest = "-" if at["newest_ms"] is None else format_instant(at["newest_ms"])
    frontiers = [group["world"]["frontier_ms"] for group in groups if group["world"]["frontier_ms"] is not None]
    lines = {
        "generation": f"{generation['number']}, made by {generation['made_by']}; stored form {generation['form']}",
        "batch": f"{at['batch']}; bronze is read up to version {at['version']}, received {newest}",
        "judged": f"up to {format_instant(min(frontiers))}" if frontiers else "nothing yet",
        "devices": f"{sum(group['devices'] for group in groups):,}: "
        + (", ".join(f"{count:,} {mode}" for mode, count in modes.most_common()) or "none"),
        "waiting": f"{sum(group['waiting'] for group in groups):,} messages, whose time has not come",
        "skew": _skew([group["block_bytes"] + group["waiting_bytes"] for group in groups]),
        "rocksdb": _files(home),
        "snapshot": _snapshot(found["snapshots"]),
        "next start": _next(found),
    }
    for name, value in lines.items():
        out.print(f"[bold]{name:12}[/] {value}", highlight=False, soft_wrap=True)
    out.print(_by_partition(groups))


def _skew(sizes: list[int]) -> str:
    if not sizes or not mean(sizes):
        return "-"
    return f"the largest key group has {max(sizes) / mean(sizes):.2f} times the bytes of the mean"


def _files(home: Home) -> str:
    files = [path for path in (home.checkpoint / "state").rglob("*") if path.is_file() and not path.name.startswith(".")]
    kinds = Counter(path.suffix or path.name.split("-")[0] for path in files)
    told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4))
    return f"{len(files)} files, {sum(path.stat().st_size for path in files):,} bytes ({told})"


def _snapshot(newest: list[dict[str, Any]]) -> str:
    if not newest:
        return "none yet"
    one = newest[0]
    taken = f"after batch {one['batch']} of generation {one['generation']}"
    return f"version {one['version']} of {format_instant(one['at_ms'])}, {taken}"


def _next(found: dict[str, Any]) -> str:
    if found["unfinished"] is not None:
        return f"does batch {found['unfinished']} again, which was begun and not committed, and goes on"
    return f"goes on with bronze version {found['stand']['version']}"


def _by_partition(groups: list[dict[str, Any]]) -> Table:
    sums: dict[int, Counter[str]] = defaultdict(Counter)
    for group in groups:
        one = sums[group["partition"]]
        one["groups"] += 1
        for name in ("devices", "waiting", "block_bytes", "waiting_bytes"):
            one[name] += group[name]
    table = Table(box=SIMPLE_HEAD)
    for name in ("partition", "key groups", "devices", "waiting", "bytes of devices", "bytes that wait"):
        table.add_column(name, justify="right")
    for partition, one in sorted(sums.items()):
        names = ("groups", "devices", "waiting", "block_bytes", "waiting_bytes")
        table.add_row(str(partition), *(f"{one[name]:,}" for name in names))
    return table
